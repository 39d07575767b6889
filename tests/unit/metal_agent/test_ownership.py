"""Who has a state folder: one at a time, and a `pomona up` makes way for an agent that asks."""

import asyncio
import errno
import fcntl
import os
import resource
import signal
from pathlib import Path

import msgspec
import pytest

from kube.errors import Unauthorized
from metal_agent import ownership
from metal_agent.handle import Identity
from metal_agent.ownership import HAND_OVER, Owner, own, take_over
from metal_agent.start import StartError


async def can_serve() -> None:
    """Who asks would serve."""


async def test_who_cannot_serve_in_its_place_ends_nobody(tmp_path: Path) -> None:
    async def refused() -> None:
        raise Unauthorized("list metalprocesses", status=401)

    before = signal.signal(HAND_OVER, lambda *_: pytest.fail("it was asked to end"))
    try:
        with own(tmp_path, standalone=True), pytest.raises(StartError, match=r"401.*goes on serving"):
            await take_over(tmp_path, refused)
    finally:
        signal.signal(HAND_OVER, before)


async def test_who_serves_alone_is_asked_and_waited_for(tmp_path: Path) -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(HAND_OVER, asked.set)
    taken = None
    try:
        with own(tmp_path, standalone=True):
            taken = asyncio.create_task(take_over(tmp_path, can_serve))
            await asked.wait()
            assert not taken.done()
        await taken
        with own(tmp_path):
            pass
    finally:
        asyncio.get_running_loop().remove_signal_handler(HAND_OVER)


async def test_who_does_not_hand_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "HAND_OVER_SECONDS", 0.1)
    asyncio.get_running_loop().add_signal_handler(HAND_OVER, lambda: None)
    try:
        with own(tmp_path, standalone=True), pytest.raises(StartError, match=rf"process {os.getpid()}\) did not hand"):
            await take_over(tmp_path, can_serve)
    finally:
        asyncio.get_running_loop().remove_signal_handler(HAND_OVER)


@pytest.mark.parametrize(
    "owner",
    [
        b"",
        b"{",
        msgspec.json.encode(Owner(Identity(os.getpid(), "ago", "start"), standalone=True)).replace(b"ago", b"\xff"),
        msgspec.json.encode(Owner(Identity(os.getpid(), "long ago", "another start"), standalone=True)),
    ],
    ids=["nothing", "damaged", "no text", "an earlier one, whose pid is another's now"],
)
async def test_nobody_else_gets_the_signal(tmp_path: Path, owner: bytes) -> None:
    before = signal.signal(HAND_OVER, lambda *_: pytest.fail("the signal went to a process that did not ask for it"))
    try:
        with own(tmp_path, standalone=True):
            (tmp_path / "agent.lock").write_bytes(owner)
            await take_over(tmp_path, can_serve)
    finally:
        signal.signal(HAND_OVER, before)


async def test_an_agent_is_not_asked_and_refuses_the_second(tmp_path: Path) -> None:
    with own(tmp_path):
        await take_over(tmp_path, can_serve)
        with pytest.raises(StartError, match="another agent"), own(tmp_path):
            pytest.fail("two agents")
    with own(tmp_path, standalone=True), pytest.raises(StartError, match="another `pomona up`"), own(tmp_path):
        pytest.fail("two of them")


async def test_a_free_folder_is_made_and_left_free(tmp_path: Path) -> None:
    await take_over(tmp_path / "new", can_serve)
    with own(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_full_disk_keeps_no_agent_from_its_engines(tmp_path: Path) -> None:
    with own(tmp_path):
        pass
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with own(tmp_path):
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            with pytest.raises(StartError, match="another agent uses"), own(tmp_path):
                pytest.fail("two agents")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_folder_that_cannot_be_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StartError, match=f"cannot lock --state-dir {tmp_path}: .*: use a local disk"):
        await take_over(tmp_path, can_serve)
    with pytest.raises(StartError, match=f"cannot lock --state-dir {tmp_path}: .*: use a local disk"), own(tmp_path):
        pytest.fail("not locked")


async def test_whom_we_may_not_ask_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with own(tmp_path, standalone=True):
        monkeypatch.setattr(os, "kill", refuse)
        with pytest.raises(StartError, match=rf"process {os.getpid()}\) of another user uses --state-dir"):
            await take_over(tmp_path, can_serve)


async def test_who_cannot_tell_processes_apart_owns_a_folder_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold(_pid: int) -> None:
        raise OSError("ps does not tell")

    with own(tmp_path / "other", standalone=True):
        monkeypatch.setattr(ownership, "identify", untold)
        with own(tmp_path):
            pass
        await take_over(tmp_path / "other", can_serve)
