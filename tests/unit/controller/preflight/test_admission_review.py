"""AdmissionReviews: what is none is named, and an answer is one that API servers accept."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.preflight.admission_review import (
    LONGEST_MESSAGE,
    LONGEST_WARNING,
    InvalidReviewError,
    encode_answer,
    parse_review,
)
from controller.preflight.preflight_verdict import PreflightAnswer
from tests.support.api_objects import service


def review(**changes: Any) -> dict[str, Any]:
    request = {
        "uid": "u-1",
        "operation": "CREATE",
        "resource": {"group": "inference.pomona.dev", "version": "v1alpha1", "resource": "inferenceservices"},
        "object": service(),
        "oldObject": None,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request | changes}


def parse(found: object) -> Any:
    return parse_review(msgspec.json.encode(found))


def test_write_has_what_is_stored_and_what_is_to_be_stored() -> None:
    created = parse(review())
    assert (created.uid, created.before, created.is_update) == ("u-1", None, False)
    assert created.service.metadata.name == "chat"
    updated = parse(review(operation="UPDATE", oldObject=service(replicas=2)))
    assert (updated.is_update, updated.before.spec.replicas) == (True, 2)


def test_service_of_another_version_is_not_understood() -> None:
    assert parse(review(object={"metadata": {}})).service is None
    assert parse(review(operation="UPDATE", oldObject={"spec": 1})).before is None
    assert parse(review(object=service(status={"phase": 7}))).service is not None, "no status is judged"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no AdmissionReview"),
        (b"\xff\xfe\x00", "no AdmissionReview"),
        (b'{"apiVersion":"\xff"}', "no AdmissionReview"),
        (b"[" * 100_000, "no AdmissionReview"),
        (b'{"a":' * 100_000, "no AdmissionReview"),
        (b"model=tiny&a=b", "no AdmissionReview"),
        (msgspec.json.encode(review() | {"kind": "Pod"}), "admission.k8s.io/v1"),
        (msgspec.json.encode(review() | {"apiVersion": "admission.k8s.io/v1beta1"}), "admission.k8s.io/v1"),
        (msgspec.json.encode(review(resource={"group": "", "resource": "secrets"})), "request.resource is not"),
        (msgspec.json.encode(review(uid=7)), "$.request.uid"),
    ],
)
def test_what_is_no_review_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(InvalidReviewError) as refused:
        parse_review(body)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


@given(st.binary(max_size=300))
def test_no_body_raises_another_error(body: bytes) -> None:
    with pytest.raises(InvalidReviewError):
        parse_review(body)


def test_deep_object_of_a_hostile_tenant_is_no_error() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    body = msgspec.json.encode(review()).replace(b'"modelRef":"tiny"', b'"modelRef":' + msgspec.json.encode(deep))
    assert parse_review(body).service is None


def test_answer_allows_refuses_or_warns() -> None:
    allowed = msgspec.json.decode(encode_answer("u-1"))
    assert allowed["response"] == {"uid": "u-1", "allowed": True}
    refused = msgspec.json.decode(encode_answer("u-1", PreflightAnswer(refusal="too large")))["response"]
    assert refused["allowed"] is False
    assert refused["status"] == {"code": 422, "reason": "Invalid", "message": "too large"}
    warned = msgspec.json.decode(encode_answer("u-1", PreflightAnswer(warning="unknown")))["response"]
    assert (warned["allowed"], warned["warnings"]) == (True, ["unknown"])


def test_texts_of_others_are_one_short_line() -> None:
    hostile = "a\r\nWarning: 299 forged\x00\x1b[2J" * 200
    response = msgspec.json.decode(encode_answer("u", PreflightAnswer(hostile, hostile)))["response"]
    for text, longest in ((response["status"]["message"], LONGEST_MESSAGE), (response["warnings"][0], LONGEST_WARNING)):
        assert text.isprintable()
        assert len(text) < longest + 40
