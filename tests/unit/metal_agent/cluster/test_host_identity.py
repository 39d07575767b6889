"""A token is on disk before it is used, is renewed in time whatever the wall clock says, and gives way to a join."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kube.client import Client, Obj
from kube.errors import Unreachable
from kube.kubeconfig import CredentialsError
from kube.resources import Resource
from metal_agent.cluster import host_identity
from metal_agent.cluster.host_identity import (
    FILE_NAME,
    HostIdentity,
    JoinedHost,
    read_joined_host,
    renewal_seconds,
    write_joined_host,
)
from tests.support import virtual_time

JOINED = JoinedHost("studio-1", "https://192.0.2.1", "token-0", "2026-11-23T00:00:00Z")
DAY = 86400.0


class Granting(Client):
    """An API server that grants `token-1`, `token-2` and so on, or does not answer."""

    def __init__(self, lifetime_seconds: float = 30 * DAY) -> None:
        self.lifetime_seconds = lifetime_seconds
        self.granted = 0
        self.at: list[float] = []
        self.answers = True

    async def create_subresource(
        self, resource: Resource, name: str, namespace: str | None, subresource: str, obj: Mapping[str, Any]
    ) -> Obj:
        assert (resource.plural, namespace, name, subresource) == (
            "serviceaccounts",
            "pomona-metal-hosts",
            "studio-1",
            "token",
        )
        assert obj["spec"]["expirationSeconds"] == 30 * DAY
        self.at.append(asyncio.get_running_loop().time())
        if not self.answers:
            raise Unreachable("down")
        self.granted += 1
        status = {"token": f"token-{self.granted}", "expirationTimestamp": f"2026-12-{self.granted:02}T00:00:00Z"}
        return {"spec": {"expirationSeconds": self.lifetime_seconds}, "status": status}


def make(folder: Path, joined: JoinedHost = JOINED) -> HostIdentity:
    write_joined_host(folder, joined)
    return HostIdentity(folder, joined, lambda: asyncio.get_running_loop().time())


@pytest.mark.parametrize(
    ("lifetime", "age"),
    [(30 * DAY, DAY), (2 * DAY, DAY), (DAY, DAY / 2), (3600, 1800), (600, 300), (100, 60), (0, 60)],
)
def test_token_is_renewed_after_half_of_its_life_or_a_day(lifetime: float, age: float) -> None:
    assert renewal_seconds(lifetime) == age


def test_token_is_renewed_at_the_start_and_then_in_time(tmp_path: Path) -> None:
    server = Granting(3600)

    async def main() -> None:
        identity = make(tmp_path)
        renewal = asyncio.create_task(identity.keep_renewed(server))
        await asyncio.sleep(3 * 3600)
        renewal.cancel()
        assert await identity.authorization() == f"Bearer token-{server.granted}"

    virtual_time.run(main())
    assert server.at[0] == 0
    assert len(server.at) >= 6
    pauses = [later - earlier for earlier, later in zip(server.at, server.at[1:], strict=False)]
    assert all(0.9 * 1800 <= pause <= 1860 for pause in pauses)


async def test_hosts_that_start_together_do_not_renew_together(tmp_path: Path) -> None:
    due = set()
    for number in range(20):
        identity = make(tmp_path / str(number))
        await identity.renew(Granting())
        due.add(identity.renews_at)
    assert max(due) - min(due) > timedelta(minutes=10)


def test_renewal_that_fails_is_tried_again_each_minute_at_the_latest(tmp_path: Path) -> None:
    server = Granting()
    server.answers = False

    async def main() -> None:
        identity = make(tmp_path)
        renewal = asyncio.create_task(identity.keep_renewed(server))
        await asyncio.sleep(3600)
        assert await identity.authorization() == "Bearer token-0"
        assert identity.renewal_problem
        server.answers = True
        await asyncio.sleep(80)
        renewal.cancel()
        assert not identity.renewal_problem
        assert await identity.authorization() == "Bearer token-1"

    virtual_time.run(main())
    pauses = [later - earlier for earlier, later in zip(server.at, server.at[1:], strict=False)]
    assert max(pauses) <= 72
    assert len(pauses) > 50


async def test_token_is_on_disk_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make(tmp_path)
    used: list[str] = []
    write = host_identity.write_joined_host

    def record(folder: Path, joined: JoinedHost) -> None:
        used.append(asyncio.run(identity.authorization()))
        write(folder, joined)

    monkeypatch.setattr(host_identity, "write_joined_host", record)
    await identity.renew(Granting())
    assert used == ["Bearer token-0"]
    assert read_joined_host(tmp_path) == msgspec.structs.replace(
        JOINED, token="token-1", expires_at="2026-12-01T00:00:00Z"
    )
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


async def test_full_disk_does_not_end_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make(tmp_path)
    monkeypatch.setattr(host_identity, "write_joined_host", _refuse_to_write)
    await identity.renew(Granting())
    assert await identity.authorization() == "Bearer token-1"
    assert read_joined_host(tmp_path) == JOINED


def test_token_that_was_not_written_is_used_and_soon_followed_by_one_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token on disk is older than the one in use, and no other join."""
    server = Granting(DAY)
    write, is_full = host_identity.write_joined_host, False

    def write_if_free(folder: Path, joined: JoinedHost) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        write(folder, joined)

    async def main() -> None:
        nonlocal is_full
        identity = make(tmp_path)
        monkeypatch.setattr(host_identity, "write_joined_host", write_if_free)
        renewal = asyncio.create_task(identity.keep_renewed(server))
        await asyncio.sleep(DAY / 4)
        is_full = True
        await asyncio.sleep(DAY / 2)
        used = f"token-{server.granted}"
        assert not await identity.refresh(f"Bearer {used}"), "the file has the token before"
        assert await identity.authorization() == f"Bearer {used}"
        is_full = False
        await asyncio.sleep(660)
        written = (read_joined_host(tmp_path) or JOINED).token
        assert written == f"token-{server.granted}" != used
        write(tmp_path, msgspec.structs.replace(JOINED, token="joined-again"))
        assert await identity.refresh(f"Bearer {written}"), "the file has changed"
        renewal.cancel()

    virtual_time.run(main())


def _refuse_to_write(_folder: Path, _joined: JoinedHost) -> None:
    raise OSError(28, "No space left on device")


async def test_refused_token_gives_way_to_another_join(tmp_path: Path) -> None:
    identity = make(tmp_path)
    assert not await identity.refresh("Bearer token-0")
    write_joined_host(tmp_path, msgspec.structs.replace(JOINED, token="joined-again"))
    assert await identity.refresh("Bearer token-0")
    assert await identity.authorization() == "Bearer joined-again"
    assert await identity.refresh("Bearer token-0"), "another request was refused with the token before"


async def test_renewal_does_not_overwrite_another_join(tmp_path: Path) -> None:
    identity = make(tmp_path)
    write_joined_host(tmp_path, msgspec.structs.replace(JOINED, token="joined-again"))
    await identity.renew(Granting())
    joined = read_joined_host(tmp_path)
    assert joined
    assert joined.token == "joined-again"
    assert await identity.authorization() == "Bearer joined-again"


@pytest.mark.parametrize("change", [{"host": "studio-2"}, {"server": "https://192.0.2.9"}, {"authority": "other"}])
async def test_join_of_another_host_or_cluster_needs_a_restart(tmp_path: Path, change: dict[str, str]) -> None:
    identity = make(tmp_path)
    other = msgspec.structs.replace(JOINED, token="t", **change)
    write_joined_host(tmp_path, other)
    with pytest.raises(CredentialsError, match=f"has joined as host {other.host} at {other.server}.*restart the agent"):
        await identity.refresh("Bearer token-0")
    with pytest.raises(CredentialsError, match="restart the agent"):
        await identity.renew(Granting())
    assert read_joined_host(tmp_path) == other


async def test_authority_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    identity = make(tmp_path, msgspec.structs.replace(JOINED, authority="no certificate"))
    with pytest.raises(CredentialsError, match=r"host-identity\.json: authority: .*join again"):
        identity.credentials()
    assert "token-0" not in repr(JOINED)
