"""Access to an S3 service: where it is, and the signature (AWS Signature Version 4) of each request to it.

AWS's own library signs; it never connects. It is imported with the first signature, because it takes a fifth of a
second, and it is an extra, because it takes 12 MB. Requests without keys are not signed: enough for a public bucket.
"""

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote, urlencode

from yarl import URL

from artifacts.errors import ArtifactError

KEY_ID_VARIABLE: Final = "AWS_ACCESS_KEY_ID"
SECRET_KEY_VARIABLE: Final = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 - a name
SESSION_TOKEN_VARIABLE: Final = "AWS_SESSION_TOKEN"  # noqa: S105 - a name
REGION_VARIABLE: Final = "AWS_REGION"
ENDPOINT_VARIABLE: Final = "AWS_ENDPOINT_URL"
REQUIRED_VARIABLES: Final = (KEY_ID_VARIABLE, SECRET_KEY_VARIABLE)
OPTIONAL_VARIABLES: Final = (SESSION_TOKEN_VARIABLE, REGION_VARIABLE, ENDPOINT_VARIABLE)
"""Environment variables, and keys of the Secret of a source, by the names that every S3 client takes."""

_DEFAULT_REGION: Final = "us-east-1"
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_SIGNING_SECONDS: Final = 10.0
_SHA256_BYTES: Final = 32
# Digests that the service keeps are sent only if they are asked for.
_DIGESTS: Final = {"x-amz-checksum-mode": "ENABLED"}


@dataclasses.dataclass(frozen=True)
class S3Access:
    """An S3 service and the keys for it.

    Attributes:
        key_id: access key ID; empty sends requests without a signature.
        secret_key: secret access key.
        session_token: token of temporary keys, else empty.
        region: region that is signed for, and that AWS is asked in.
        endpoint: URL of the service; empty is that of AWS.

    """

    key_id: str = ""
    secret_key: str = dataclasses.field(default="", repr=False)
    session_token: str = dataclasses.field(default="", repr=False)
    region: str = _DEFAULT_REGION
    endpoint: str = ""

    @classmethod
    def read_environment(cls, environment: Mapping[str, str]) -> "S3Access":
        """Return the access that the variables state.

        Raises:
            ArtifactError: one key is there without the other, or a value cannot be used.
        """
        names = (*REQUIRED_VARIABLES, *OPTIONAL_VARIABLES)
        stated = {name: environment.get(name, "").strip() for name in names}
        for name, value in stated.items():
            if not value.isascii() or not value.isprintable() or " " in value:
                problem = f"{name} has a blank, a line break or another character that no {name} has: write it again"
                raise ArtifactError("SourceUnauthorized", problem)

        # Without both of them, requests are not signed.
        missing = [name for name in REQUIRED_VARIABLES if not stated[name]]
        if len(missing) == 1:
            problem = f"{missing[0]} is missing: S3 takes {' and '.join(REQUIRED_VARIABLES)}, or none of them"
            raise ArtifactError("SourceUnauthorized", problem)

        region = stated[REGION_VARIABLE] or _DEFAULT_REGION
        if not _REGION.fullmatch(region):
            problem = f"{REGION_VARIABLE} {region[:64]!r} is no region, such as eu-central-1"
            raise ArtifactError("SourceInvalid", problem)

        return cls(
            key_id=stated[KEY_ID_VARIABLE],
            secret_key=stated[SECRET_KEY_VARIABLE],
            session_token=stated[SESSION_TOKEN_VARIABLE],
            region=region,
            endpoint=_check_endpoint(stated[ENDPOINT_VARIABLE]),
        )

    def url(self, bucket: str, key: str = "", query: Mapping[str, str] | None = None) -> URL:
        """Return the URL of an object, or of the bucket."""
        base = self.endpoint or f"https://s3.{self.region}.amazonaws.com"
        # The bucket is in the path and not in the host: every server takes that, also one without names of its own.
        path = f"/{bucket}/{quote(key)}" if key else f"/{bucket}"
        question = f"?{urlencode(query, quote_via=quote, safe='')}" if query else ""
        # It is sent as it is signed: a URL library would undo some of the escapes.
        return URL(f"{base}{path}{question}", encoded=True)

    def authorize_headers(self, url: URL, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers of a GET of `url`: those given, one that asks for stored digests, and the signature.

        Without keys, requests are not signed.

        Raises:
            ArtifactError: the extra with the library is not installed.
        """
        # _DIGESTS: the header that asks for the digests that the service keeps.
        wanted = {**headers, **_DIGESTS}
        if not self.key_id:
            return wanted

        # Sign the request with the library of AWS, which is imported only if there are keys.
        try:
            from awscrt import auth, http  # noqa: PLC0415  see above
        except ImportError as error:
            problem = "keys for S3 need the extra `s3`: pip install '.[s3]' in a checkout of Pomona"
            raise ArtifactError("SourceInvalid", problem) from error

        keys = auth.AwsCredentialsProvider.new_static(self.key_id, self.secret_key, self.session_token or None)
        settings = auth.AwsSigningConfig(
            algorithm=auth.AwsSigningAlgorithm.V4,
            signature_type=auth.AwsSignatureType.HTTP_REQUEST_HEADERS,
            credentials_provider=keys,
            region=self.region,
            service="s3",
            # Other services want an escaped path to be escaped again, and `..` in it to be resolved.
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )

        lines = http.HttpHeaders([("Host", url.host_port_subcomponent or ""), *wanted.items()])
        request = http.HttpRequest("GET", url.raw_path_qs, lines)
        signed = auth.aws_sign_request(request, settings).result(_SIGNING_SECONDS)
        return dict(signed.headers)

    async def answer_challenges(self, challenges: Sequence[str], refused: str) -> bool:
        """Return False, as there are no other keys."""
        del challenges, refused
        return False


ANONYMOUS_S3: Final = S3Access()
"""AWS without keys."""


def _check_endpoint(text: str) -> str:
    """Return the endpoint without a slash at its end; empty for that of AWS.

    It comes from a Secret of any tenant. Raises ArtifactError: it is no URL, or has a user, a query or a fragment.
    """
    try:
        url = URL(text)
        is_url = url.scheme in ("http", "https") and url.host
        is_usable = not text or (is_url and url == url.with_user(None) and "?" not in text and "#" not in text)
    except ValueError:
        is_usable = False
    if not is_usable:
        problem = f"{ENDPOINT_VARIABLE} is no URL of an S3 service, such as https://s3.example:9000"
        raise ArtifactError("SourceInvalid", problem)
    return str(url).rstrip("/")


def read_digest(headers: Mapping[str, str]) -> str | None:
    """Return the SHA-256 of the whole object; None if the service keeps none, or only one of the parts of an upload."""
    try:
        digest = base64.b64decode(headers.get("x-amz-checksum-sha256", ""), validate=True)
    except (binascii.Error, ValueError):
        return None
    # Without this header, the digest counts as that of the whole object.
    is_whole = headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
    return digest.hex() if is_whole and len(digest) == _SHA256_BYTES else None
