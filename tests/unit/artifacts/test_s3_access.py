"""Keys for S3 are read from the environment checked, and sent as a signature only."""

import sys

import pytest

from artifacts.errors import ArtifactError
from artifacts.repositories.s3_access import ANONYMOUS_S3, S3Access

KEYS = {"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": "hunter2"}


def test_url_is_at_aws_unless_an_endpoint_is_stated() -> None:
    assert str(ANONYMOUS_S3.url("models", "a/b.gguf")) == "https://s3.us-east-1.amazonaws.com/models/a/b.gguf"
    elsewhere = S3Access.read_environment({"AWS_ENDPOINT_URL": "http://[::1]:9000/s3/", "AWS_REGION": "eu-west-1"})
    assert str(elsewhere.url("models")) == "http://[::1]:9000/s3/models"


def test_url_is_sent_as_it_is_signed() -> None:
    url = ANONYMOUS_S3.url("models", "a b/x!(1)+~ü.gguf")
    assert url.raw_path == "/models/a%20b/x%21%281%29%2B~%C3%BC.gguf"
    assert ANONYMOUS_S3.url("m", query={"prefix": "a/b !", "token": "+/="}).raw_query_string == (
        "prefix=a%2Fb%20%21&token=%2B%2F%3D"
    )


OF_SESSION = {**KEYS, "AWS_SESSION_TOKEN": "session", "AWS_REGION": "eu-west-1"}


def test_signature_covers_the_range_and_is_of_the_session() -> None:
    access = S3Access.read_environment(OF_SESSION)
    sent = access.authorize_headers(access.url("m", "k"), {"Range": "bytes=1-"})
    headers = {name.lower(): value for name, value in sent.items()}
    signature = headers["authorization"]
    assert "AK/" in signature
    assert "/eu-west-1/s3/aws4_request" in signature
    assert "host;range;x-amz-checksum-mode;x-amz-content-sha256;x-amz-date" in signature
    assert (headers["range"], headers["x-amz-security-token"]) == ("bytes=1-", "session")


def test_secret_is_neither_sent_nor_shown() -> None:
    access = S3Access.read_environment(OF_SESSION)
    assert "hunter2" not in str(access.authorize_headers(access.url("m", "k"), {}))
    for secret in ("hunter2", "session"):
        assert secret not in repr(access)


def test_request_without_keys_is_not_signed() -> None:
    assert dict(ANONYMOUS_S3.authorize_headers(ANONYMOUS_S3.url("m"), {})) == {"x-amz-checksum-mode": "ENABLED"}


def test_line_break_at_the_end_of_a_value_is_left_out() -> None:
    assert S3Access.read_environment({**KEYS, "AWS_REGION": "eu-west-1\n"}).region == "eu-west-1"


@pytest.mark.parametrize(
    ("environment", "reason", "named"),
    [
        ({"AWS_ACCESS_KEY_ID": "AK"}, "SourceUnauthorized", "AWS_SECRET_ACCESS_KEY is missing"),
        ({"AWS_SECRET_ACCESS_KEY": "hunter2"}, "SourceUnauthorized", "AWS_ACCESS_KEY_ID is missing"),
        ({**KEYS, "AWS_SECRET_ACCESS_KEY": "hunter2\nX: y"}, "SourceUnauthorized", "AWS_SECRET_ACCESS_KEY has a blank"),
        ({**KEYS, "AWS_REGION": "eu/west"}, "SourceInvalid", "AWS_REGION 'eu/west' is no region"),
        ({**KEYS, "AWS_ENDPOINT_URL": "s3.example"}, "SourceInvalid", "AWS_ENDPOINT_URL"),
        ({**KEYS, "AWS_ENDPOINT_URL": "ftp://s3.example"}, "SourceInvalid", "AWS_ENDPOINT_URL"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://user:hunter2@s3.example"}, "SourceInvalid", "AWS_ENDPOINT_URL"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://s3.example?x=hunter2"}, "SourceInvalid", "AWS_ENDPOINT_URL"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://s3.example:port"}, "SourceInvalid", "AWS_ENDPOINT_URL"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://"}, "SourceInvalid", "AWS_ENDPOINT_URL"),
    ],
)
def test_unusable_value_is_named_and_not_repeated(environment: dict[str, str], reason: str, named: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        S3Access.read_environment(environment)
    assert caught.value.reason == reason
    assert named in caught.value.message
    assert "hunter2" not in caught.value.message


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    access = S3Access.read_environment(KEYS)
    with pytest.raises(ArtifactError, match=r"extra `s3`: pip install '\.\[s3\]'"):
        access.authorize_headers(access.url("m"), {})
