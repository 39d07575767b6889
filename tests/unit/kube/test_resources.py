"""Paths of objects: a name from an object stays one segment of the path, whatever it contains."""

import asyncio

import pytest
from yarl import URL

from kube.client import Client
from kube.errors import Invalid
from kube.resources import ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES
from kube.transport import Request, Response

UNSAFE = ["", ".", "..", "a/b", "../../team-b/endpointslices/chat.studio-1", "a%2Fb", "a\x00b"]


def test_path_of_an_object() -> None:
    assert ENDPOINT_SLICES.path("team-a", "chat.studio-1", "status") == (
        "/apis/discovery.k8s.io/v1/namespaces/team-a/endpointslices/chat.studio-1/status"
    )
    assert METAL_HOSTS.path(None, "studio-1") == "/apis/inference.pomona.dev/v1alpha1/metalhosts/studio-1"
    assert METAL_PROCESSES.path() == "/apis/inference.pomona.dev/v1alpha1/metalprocesses"


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_unsafe_name_is_refused(unsafe: str) -> None:
    with pytest.raises(
        Invalid, match=r"endpointslices\.discovery\.k8s\.io: 422 InvalidName: the name .* cannot be used"
    ):
        ENDPOINT_SLICES.path("team-a", unsafe)
    with pytest.raises(Invalid, match=r"the namespace .* cannot be used in a path"):
        ENDPOINT_SLICES.path(unsafe, "chat.studio-1")


def test_object_without_its_namespace_is_refused() -> None:
    with pytest.raises(Invalid, match=r"endpointslices chat\.studio-1 has no namespace"):
        ENDPOINT_SLICES.path(None, "chat.studio-1")


@pytest.mark.parametrize("name", ["grants:studio-1", "a?b", "a#b", "a b", "ä", "..a", "a&limit=1"])
def test_unusual_name_stays_one_segment(name: str) -> None:
    url = URL("https://api" + ENDPOINT_SLICES.path("team-a", name) + "/status")
    assert url.parts[-2:] == (name, "status")
    assert url.query_string == ""


class _NoTransport:
    """A transport that must not be reached."""

    async def request(self, request: Request) -> Response:
        raise AssertionError(request.path)


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_no_request_is_sent_for_an_unsafe_name(unsafe: str) -> None:
    client = Client(_NoTransport())  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        asyncio.run(client.delete(ENDPOINT_SLICES, unsafe, "team-a"))
