"""AdmissionReviews of the API server about InferenceServices, and the answers to them, as JSON."""

from typing import Any, Final

import msgspec

from controller.preflight.preflight_verdict import ALLOWED, PreflightAnswer
from crds.inferenceservice import InferenceService
from crds.text import shorten_text
from kube.resources import INFERENCE_SERVICES

LONGEST_MESSAGE: Final = 2048
LONGEST_WARNING: Final = 220
"""Longer warnings may be cut by the API server."""
_API_VERSION: Final = "admission.k8s.io/v1"


class InvalidReviewError(ValueError):
    """The request is no AdmissionReview about an InferenceService; the message says what is wrong with it."""


class _Resource(msgspec.Struct, frozen=True):
    group: str = ""
    resource: str = ""


class _AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of admission.k8s.io/v1 AdmissionRequest that are read."""

    uid: str
    operation: str
    resource: _Resource
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None


class _AdmissionReview(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    request: _AdmissionRequest


class ReviewedWrite(msgspec.Struct, frozen=True):
    """A write of an InferenceService."""

    uid: str
    """Identity of the question."""
    service: InferenceService | None
    """As it is to be stored; None: no service is stored, or it is of a version that is not understood."""
    before: InferenceService | None
    """As it is stored; None: it is being created, or is not understood."""
    is_update: bool


_decode_review: Final = msgspec.json.Decoder(_AdmissionReview).decode


def parse_review(body: bytes | bytearray) -> ReviewedWrite:
    """Return the write of a review. Raises InvalidReviewError."""
    try:
        review = _decode_review(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidReviewError(
            f"the body is no AdmissionReview: {shorten_text(str(error), LONGEST_WARNING)}"
        ) from error
    if (review.api_version, review.kind) != (_API_VERSION, "AdmissionReview"):
        raise InvalidReviewError(f"the body is no AdmissionReview of {_API_VERSION}")

    # It must be about an InferenceService.
    request = review.request
    if (request.resource.group, request.resource.resource) != (INFERENCE_SERVICES.group, INFERENCE_SERVICES.plural):
        raise InvalidReviewError(f"request.resource is not {INFERENCE_SERVICES.plural}.{INFERENCE_SERVICES.group}")
    return ReviewedWrite(
        uid=request.uid,
        service=_convert_service(request.object),
        before=_convert_service(request.old_object),
        is_update=request.operation == "UPDATE",
    )


def encode_answer(uid: str, answer: PreflightAnswer = ALLOWED) -> bytes:
    """Return the answer to the review with this uid."""
    response: dict[str, Any] = {"uid": uid, "allowed": not answer.refusal}
    if answer.refusal:
        message = _make_line(answer.refusal, LONGEST_MESSAGE)
        response["status"] = {"code": 422, "reason": "Invalid", "message": message}
    if answer.warning:
        response["warnings"] = [_make_line(answer.warning, LONGEST_WARNING)]
    return msgspec.json.encode({"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": response})


def _convert_service(obj: dict[str, Any] | None) -> InferenceService | None:
    """Return a service with no status but its serving options; None if there is none, or it cannot be decoded."""
    if obj is None:
        return None
    status = {name: value for name, value in (obj.get("status") or {}).items() if name == "serving"}
    try:
        return msgspec.convert({**obj, "status": status}, InferenceService)
    except (msgspec.ValidationError, RecursionError):
        return None


def _make_line(text: str, longest: int) -> str:
    """Return a text as one line of printable characters, as a header field needs it."""
    return shorten_text("".join(character if character.isprintable() else " " for character in text), longest)
