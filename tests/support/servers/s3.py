"""An S3 service: the Versity gateway, which keeps its buckets as folders of this machine."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import io
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import quote

import aiohttp
from awscrt import auth, http
from yarl import URL

from artifacts.repositories.s3_access import S3Access
from tests.support.servers.programs import ensure_programs, find_free_port, run_server

REGION = "eu-central-1"
OWNER = ("owner", "owner-secret")
"""Key ID and secret key of the owner of all buckets."""
STRANGER = ("stranger", "stranger-secret")
"""Keys of a user that may read no bucket until a policy says so."""


@dataclasses.dataclass(frozen=True)
class S3Server:
    """A running S3 service, as its owner uses it.

    Attributes:
        url: its endpoint.
        buckets: folder with a folder for each bucket.
    """

    url: str
    buckets: Path

    def access(self, keys: tuple[str, str] | None = OWNER, *, region: str = REGION) -> S3Access:
        """Return the access with these keys, or with none."""
        key_id, secret_key = keys or ("", "")
        return S3Access(key_id=key_id, secret_key=secret_key, region=region, endpoint=self.url)

    def environment(self, keys: tuple[str, str] = OWNER) -> dict[str, str]:
        """Return the variables, or the keys of a Secret, with which a client reads from this service."""
        key_id, secret_key = keys
        return {
            "AWS_ACCESS_KEY_ID": key_id,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT_URL": self.url,
        }

    async def make_bucket(self, bucket: str) -> None:
        """Create a bucket that only its owner can read."""
        await self._send("PUT", f"/{bucket}")

    async def put(self, bucket: str, key: str, body: bytes, *, with_digest: bool = False) -> None:
        """Store an object; the service keeps its SHA-256 if it gets one."""
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        await self._send(
            "PUT", f"/{bucket}/{quote(key)}", body, {"x-amz-checksum-sha256": digest} if with_digest else {}
        )

    async def set_policy(self, bucket: str, policy: str) -> None:
        """Set the policy of a bucket, as JSON."""
        await self._send("PUT", f"/{bucket}?policy=", policy.encode())

    async def _send(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        url = URL(self.url + path, encoded=True)
        wanted = {"Content-Length": str(len(body)), **(headers or {})}
        settings = auth.AwsSigningConfig(
            algorithm=auth.AwsSigningAlgorithm.V4,
            signature_type=auth.AwsSignatureType.HTTP_REQUEST_HEADERS,
            credentials_provider=auth.AwsCredentialsProvider.new_static(*OWNER),
            region=REGION,
            service="s3",
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_value=hashlib.sha256(body).hexdigest(),
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        lines = http.HttpHeaders([("Host", url.host_port_subcomponent or ""), *wanted.items()])
        signed = auth.aws_sign_request(http.HttpRequest(method, url.raw_path_qs, lines), settings).result(10)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, data=io.BytesIO(body), headers=dict(signed.headers)) as response,
        ):
            assert response.ok, f"{method} {path}: {response.status} {await response.text()}"


@contextlib.asynccontextmanager
async def run_s3_server(folder: Path, *, address: str = "127.0.0.1") -> AsyncIterator[S3Server]:
    """Start an S3 service with its files in `folder`, without buckets, and with the users OWNER and STRANGER."""
    buckets, users, metadata = (folder / name for name in ("buckets", "users", "metadata"))
    for path in (buckets, users, metadata):
        path.mkdir(parents=True)
    port = find_free_port(address)
    listen = ("--port", f"{address}:{port}", "--region", REGION, "--quiet", "--iam-dir", str(users))
    environment = {"ROOT_ACCESS_KEY": OWNER[0], "ROOT_SECRET_KEY": OWNER[1]}
    arguments = [*listen, "posix", "--sidecar", str(metadata), str(buckets)]
    url = f"http://{address}:{port}"
    async with run_server(
        "versitygw", arguments, folder / "s3.log", address=address, port=port, environment=environment
    ):
        await _create_user(url, *STRANGER)
        yield S3Server(url, buckets)


async def _create_user(url: str, key_id: str, secret_key: str) -> None:
    create = ("create-user", "--access", key_id, "--secret", secret_key, "--role", "user")
    owner = ("--access", OWNER[0], "--secret", OWNER[1], "--region", REGION, "--endpoint-url", url)
    program = str(ensure_programs()["versitygw"])
    process = await asyncio.create_subprocess_exec(program, "admin", *owner, *create)
    assert await process.wait() == 0
