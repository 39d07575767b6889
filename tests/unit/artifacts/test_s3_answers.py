"""Answers of an S3 service are bounded, checked, and never repeated in a message."""

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.errors import ArtifactError
from artifacts.repositories.repository import RepositoryFile
from artifacts.repositories.s3_access import read_digest
from artifacts.repositories.s3_answers import explain_refusal, parse_page

NAMESPACE = b'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
CONTENTS = b"<Contents><Key>a%2Fb%20c.gguf</Key><Size>7</Size><ETag>&#34;e-1&#34;</ETag></Contents>"


def page(inner: bytes, attributes: bytes = b"") -> bytes:
    return b"<?xml version='1.0'?><ListBucketResult %b>%b</ListBucketResult>" % (attributes, inner)


def refusal(code: str, more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code><Message>inner secret</Message>{more}</Error>".encode()


@pytest.mark.parametrize("attributes", [NAMESPACE, b""])
def test_page_lists_unquoted_keys(attributes: bytes) -> None:
    listing = parse_page(page(CONTENTS + b"<IsTruncated>false</IsTruncated>", attributes))
    assert listing.objects == [RepositoryFile("a/b c.gguf", 7, None, "e-1")]
    assert listing.next_token == ""


def test_truncated_page_names_the_next_one() -> None:
    token = b"<NextContinuationToken>n+1</NextContinuationToken>"
    assert parse_page(page(b"<IsTruncated>true</IsTruncated>" + token)).next_token == "n+1"
    assert parse_page(page(b"<IsTruncated>false</IsTruncated>" + token)).next_token == ""


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"<ListBucketResult>",
        b"<Other/>",
        b"<!DOCTYPE x [<!ENTITY a 'aa'>]><ListBucketResult>&a;</ListBucketResult>",
        b"<!DOCTYPE x SYSTEM 'file:///etc/passwd'><ListBucketResult/>",
        b"<?xml version='1.0' encoding='no-such'?><ListBucketResult/>",
        page(b"<IsTruncated>true</IsTruncated>"),
        page(CONTENTS.replace(b"<Size>7</Size>", b"")),
        page(CONTENTS.replace(b">7<", b">-7<")),
        page(CONTENTS.replace(b">7<", b">" + b"9" * 5000 + b"<")),
        page(CONTENTS.replace(b"e-1", b"e 1")),
        page(CONTENTS.replace(b"e-1", b"e" * 201)),
        page(CONTENTS.replace(b"a%2Fb%20c.gguf", b"")),
    ],
)
def test_hostile_page_is_refused_without_its_text(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(a|no|an) [\w ]+$"):
        parse_page(text)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_page_or_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_page(text)


@pytest.mark.parametrize(
    ("status", "code", "signed", "reason", "way_out"),
    [
        (404, "NoSuchBucket", True, "SourceNotFound", "no such bucket: check its name, and AWS_ENDPOINT_URL"),
        (404, "NoSuchKey", True, "SourceNotFound", "check the key; for a folder, end it with a slash"),
        (404, "", True, "SourceNotFound", "check bucket and key"),
        (403, "AccessDenied", True, "SourceUnauthorized", "s3:GetObject"),
        (403, "AccessDenied", False, "SourceUnauthorized", "give AWS_ACCESS_KEY_ID"),
        (403, "", True, "SourceUnauthorized", "s3:ListBucket"),
        (403, "InvalidAccessKeyId", True, "SourceUnauthorized", "check AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", True, "SourceUnauthorized", "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", True, "SourceUnauthorized", "AWS_SESSION_TOKEN"),
        (403, "RequestTimeTooSkewed", True, "SourceUnauthorized", "clock"),
        (403, "InvalidObjectState", True, "SourceRefused", "restore it"),
        (301, "PermanentRedirect", True, "SourceRefused", "another region: set AWS_REGION"),
    ],
)
def test_refusal_names_object_and_way_out(status: int, code: str, signed: bool, reason: str, way_out: str) -> None:
    error = explain_refusal("s3://models/x.gguf", status, {}, refusal(code), signed=signed)
    assert isinstance(error, ArtifactError)
    assert (error.reason, error.retryable) == (reason, False)
    assert error.message.startswith("s3://models/x.gguf: ")
    assert way_out in error.message
    assert "inner secret" not in error.message


@pytest.mark.parametrize(
    ("region", "shown"),
    [("eu-central-1", "in region eu-central-1"), ("<b>\n</b>", "another region"), ("x" * 99, "another region")],
)
def test_wrong_region_is_named_only_if_it_is_one(region: str, shown: str) -> None:
    body = refusal("AuthorizationHeaderMalformed", f"<Region>{region}</Region>")
    for headers, text in (({}, body), ({"x-amz-bucket-region": region}, b"")):
        error = explain_refusal("s3://models/", 301, headers, text, signed=True)
        assert error is not None
        assert shown in error.message


@pytest.mark.parametrize(("status", "text"), [(503, refusal("SlowDown")), (500, b"<html>"), (400, b"<!DOCTYPE x>")])
def test_other_refusals_are_explained_by_their_status(status: int, text: bytes) -> None:
    assert explain_refusal("s3://models/x.gguf", status, {}, text, signed=True) is None


def test_digest_of_the_whole_object_only() -> None:
    digest = hashlib.sha256(b"x")
    stated = base64.b64encode(digest.digest()).decode()
    assert read_digest({"x-amz-checksum-sha256": stated}) == digest.hexdigest()
    assert read_digest({"x-amz-checksum-sha256": stated, "x-amz-checksum-type": "COMPOSITE"}) is None
    for text in ("", f"{stated}-2", stated[:20], "not base64!", "ä"):
        assert read_digest({"x-amz-checksum-sha256": text}) is None
