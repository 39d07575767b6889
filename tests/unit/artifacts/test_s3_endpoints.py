"""The endpoint of S3 is what a tenant states: where it may be, where keys are lost, and lists that cannot be used."""

import hashlib
from urllib.parse import quote

import pytest

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import Networks
from artifacts.repositories.repository import Listing, SourceAccess
from artifacts.repositories.s3_access import S3Access
from artifacts.repositories.s3_repository import S3Repository
from artifacts.source import parse
from tests.support.file_server import ALLOWED_NETWORKS, FileServer, TransferFault
from tests.unit.artifacts.fetch_call import FetchCall
from tests.unit.artifacts.stored_weights import HURRIED

SOURCE = "s3://acme/tiny/weights.gguf"


def access(server: FileServer) -> S3Access:
    return S3Access(key_id="AK", secret_key="hunter2", session_token="session", endpoint=server.url)


async def list_folder(server: FileServer, page: str, networks: Networks = ALLOWED_NETWORKS) -> Listing:
    """List s3://models/tiny/ at a server that answers every request for the bucket with `page`."""
    (server.root / "models").write_text(page)
    settings = SourceAccess(
        token=None, endpoint="", file_root=None, allowed_networks=networks, patience=HURRIED, s3=access(server)
    )
    return await S3Repository(parse("s3://models/tiny/"), settings).list_files(None)


def page(*keys: str, more: str = "") -> str:
    objects = (f"<Contents><Key>{quote(key)}</Key><Size>7</Size><ETag>e</ETag></Contents>" for key in keys)
    return f"<ListBucketResult>{''.join(objects)}{more}</ListBucketResult>"


async def test_keys_are_lost_with_a_redirect_to_another_origin(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    server.redirects["/acme/tiny/weights.gguf"] = f"http://127.0.0.1:{server.cdn_port}/weights.gguf"
    fetched = await call(SOURCE, s3=access(server))
    assert fetched.path.read_bytes() == weights
    signed, bare = server.requests
    assert signed.authorization is not None
    assert signed.authorization.startswith("AWS4-HMAC-SHA256 Credential=AK/")
    assert (bare.port, bare.authorization) == (server.cdn_port, None)


async def test_endpoint_in_a_private_network_is_refused(call: FetchCall, server: FileServer, weights: bytes) -> None:
    assert weights
    error = await call.refused(SOURCE, s3=access(server), allowed_networks=())
    assert error.reason == "SourceForbidden"
    assert "--allow-private-sources" in error.message
    assert server.requests == []


async def test_token_of_the_hub_does_not_go_to_s3(call: FetchCall, server: FileServer, weights: bytes) -> None:
    assert weights
    await call(SOURCE, token="hub-token", s3=S3Access(endpoint=server.url))
    assert [seen.authorization for seen in server.requests] == [None]


async def test_object_that_changed_between_two_requests_is_not_mixed(
    call: FetchCall, server: FileServer, weights: bytes
) -> None:
    server.faults.append(TransferFault(3 << 20))
    server.conditions = False  # S3 promises no If-Range
    first = server.root / "acme/tiny/weights.gguf"

    def change(done: int, _total: int | None) -> None:
        if 1 << 20 < done < len(weights) and first.read_bytes() == weights:
            first.write_bytes(bytes(reversed(weights)))

    fetched = await call(SOURCE, s3=access(server), on_progress=change)
    assert fetched.sha256 == hashlib.sha256(bytes(reversed(weights))).hexdigest()


async def test_redirect_without_a_target_is_a_refusal(call: FetchCall, server: FileServer) -> None:
    server.statuses.append(301)
    error = await call.refused(SOURCE, s3=access(server))
    assert error.message.startswith(f"{SOURCE}: the bucket is in another region: set AWS_REGION to it")


async def test_overload_is_worth_another_try(call: FetchCall, server: FileServer, weights: bytes) -> None:
    server.statuses.extend([503, 500])
    assert (await call(SOURCE, s3=access(server))).path.read_bytes() == weights


async def test_only_safe_names_below_the_prefix_are_listed(server: FileServer) -> None:
    keys = ("a.gguf", "sub/b.safetensors", "../c.gguf", "/d.gguf", "s//e.gguf", ".hidden.gguf", "f.py", "g\n.gguf")
    outside = ("other/h.gguf", "tiny-2/i.gguf", "/etc/j.gguf")
    listing = await list_folder(server, page(*(f"tiny/{key}" for key in keys), "tiny/", *outside))
    assert [file.path for file in listing.files] == ["a.gguf", "sub/b.safetensors"]


async def test_revision_of_a_folder_changes_with_its_objects(server: FileServer) -> None:
    before = await list_folder(server, page("tiny/a.gguf", "tiny/b.gguf"))
    assert (await list_folder(server, page("tiny/b.gguf", "tiny/a.gguf", "tiny/c.py"))).revision == before.revision
    assert (await list_folder(server, page("tiny/a.gguf"))).revision != before.revision
    changed = page("tiny/a.gguf", "tiny/b.gguf").replace("<ETag>e<", "<ETag>f<", 1)
    assert (await list_folder(server, changed)).revision != before.revision


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("<html>", "no XML"),
        ("<!DOCTYPE x [<!ENTITY a 'a'>]><ListBucketResult/>", "a document type"),
        ("<ListBucketResult>" + " " * (5 << 20), "longer than 4194304 bytes"),
        (page("tiny/a", more="<IsTruncated>true</IsTruncated>"), "without the token of the next one"),
        (
            page("tiny/a", more="<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"),
            "more than 10000 objects",
        ),
    ],
)
async def test_hostile_listing_is_refused(server: FileServer, answer: str, problem: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        await list_folder(server, answer)
    assert caught.value.reason == "SourceRefused"
    assert problem in caught.value.message
    assert len(server.requests) <= 10


async def test_listing_in_a_private_network_is_refused(server: FileServer) -> None:
    with pytest.raises(ArtifactError) as caught:
        await list_folder(server, page("tiny/a.gguf"), networks=())
    assert caught.value.reason == "SourceForbidden"
