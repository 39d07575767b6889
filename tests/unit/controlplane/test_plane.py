"""The administrator's requests to the control plane, answered by a stub."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.controlplane import plane
from tests.controlplane.binaries import Binaries
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.support import certificates
from tests.support.stub_server import serve_stub

NOWHERE = Path("/nowhere")


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    control_plane = ControlPlane(Binaries(NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE), tmp_path)
    control_plane.certificates.mkdir()
    (control_plane.certificates / "apiserver.crt").write_bytes(certificates.CA.read_bytes())
    yield control_plane
    await control_plane.stop()


def throttled(*waits: str | None) -> tuple[web.Response, ...]:
    """Return refusals that ask to wait, as an API server sends them while its storage is initialized."""
    return tuple(
        web.json_response({"message": "slow down"}, status=429, headers={"Retry-After": wait} if wait else {})
        for wait in waits
    )


async def test_throttled_request_is_sent_again_after_the_wait(
    admin: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [*throttled("0", "0"), web.json_response({"items": []})]
    bodies = []

    async def answer(request: web.BaseRequest) -> web.Response:
        bodies.append(await request.text())
        return answers.pop(0)

    async with serve_stub(answer) as url:
        monkeypatch.setattr(plane, "SERVER", url)
        assert await admin.request("POST", "/a", {"b": 1}) == {"items": []}
    assert bodies == ['{"b": 1}'] * 3


@pytest.mark.parametrize("wait", [None, "3600"], ids=["no wait", "an hour"])
async def test_refusal_without_a_short_wait_is_raised(
    admin: ControlPlane, monkeypatch: pytest.MonkeyPatch, wait: str | None
) -> None:
    answers = [*throttled(wait)]

    async def answer(_: web.BaseRequest) -> web.Response:
        return answers.pop(0)

    async with serve_stub(answer) as url:
        monkeypatch.setattr(plane, "SERVER", url)
        with pytest.raises(PlaneError, match=r"429 .*slow down"):
            await admin.request("GET", "/a")
