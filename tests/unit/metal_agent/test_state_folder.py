"""A state folder has one owner at a time, and a `pomona up` hands it over to an agent."""

import asyncio
import errno
import fcntl
import os
import resource
import shutil
import signal
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from artifacts import durable
from devices import host
from kube.errors import Unauthorized
from metal_agent import state_folder
from metal_agent.native.engine_handle import ProcessIdentity
from metal_agent.options import StartError
from metal_agent.state_folder import HAND_OVER, Owner, identify_agent, load_identity, own_folder, take_over


async def can_serve() -> None:
    """Raise nothing, as an agent that can serve."""


async def test_agent_that_the_api_refuses_signals_no_pomona_up(tmp_path: Path) -> None:
    async def refused() -> None:
        raise Unauthorized("list metalprocesses", status=401)

    before = signal.signal(HAND_OVER, lambda *_: pytest.fail("it was asked to end"))
    try:
        with own_folder(tmp_path, standalone=True), pytest.raises(StartError, match=r"401.*goes on serving"):
            await take_over(tmp_path, refused)
    finally:
        signal.signal(HAND_OVER, before)


def test_state_folder_is_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_folder(tmp_path / "new" / "state"):
        assert stat.S_IMODE((tmp_path / "new" / "state").stat().st_mode) == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with own_folder(open_to_all):
        assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StartError, match="belongs to another user"), own_folder(open_to_all):
        pass


def test_state_file_that_comes_first_makes_the_folder_private(tmp_path: Path) -> None:
    durable.write(tmp_path / "state" / "address.json", "192.0.2.1")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "agent.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="cannot use --state-dir"), own_folder(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


async def test_pomona_up_is_signalled_and_waited_for(tmp_path: Path) -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(HAND_OVER, asked.set)
    taken = None
    try:
        with own_folder(tmp_path, standalone=True):
            taken = asyncio.create_task(take_over(tmp_path, can_serve))
            await asked.wait()
            assert not taken.done()
        await taken
        with own_folder(tmp_path):
            pass
    finally:
        asyncio.get_running_loop().remove_signal_handler(HAND_OVER)


async def test_pomona_up_that_does_not_hand_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_folder, "HAND_OVER_SECONDS", 0.1)
    asyncio.get_running_loop().add_signal_handler(HAND_OVER, lambda: None)
    try:
        with (
            own_folder(tmp_path, standalone=True),
            pytest.raises(StartError, match=rf"process {os.getpid()}\) did not hand"),
        ):
            await take_over(tmp_path, can_serve)
    finally:
        asyncio.get_running_loop().remove_signal_handler(HAND_OVER)


@pytest.mark.parametrize(
    "owner",
    [
        b"",
        b"{",
        msgspec.json.encode(Owner(ProcessIdentity(os.getpid(), "ago", "start"), standalone=True)).replace(
            b"ago", b"\xff"
        ),
        msgspec.json.encode(Owner(ProcessIdentity(os.getpid(), "long ago", "another start"), standalone=True)),
    ],
    ids=["nothing", "damaged", "no text", "an earlier one, whose pid is another's now"],
)
async def test_no_other_process_gets_the_signal(tmp_path: Path, owner: bytes) -> None:
    before = signal.signal(HAND_OVER, lambda *_: pytest.fail("the signal went to a process that did not ask for it"))
    try:
        with own_folder(tmp_path, standalone=True):
            (tmp_path / "agent.lock").write_bytes(owner)
            await take_over(tmp_path, can_serve)
    finally:
        signal.signal(HAND_OVER, before)


async def test_agent_is_not_signalled_and_the_second_is_refused(tmp_path: Path) -> None:
    with own_folder(tmp_path):
        await take_over(tmp_path, can_serve)
        with pytest.raises(StartError, match="another agent"), own_folder(tmp_path):
            pytest.fail("two agents")
    with (
        own_folder(tmp_path, standalone=True),
        pytest.raises(StartError, match="another `pomona up`"),
        own_folder(tmp_path),
    ):
        pytest.fail("two of them")


async def test_free_folder_is_made_and_left_unlocked(tmp_path: Path) -> None:
    await take_over(tmp_path / "new", can_serve)
    with own_folder(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_agent_starts_on_a_full_disk(tmp_path: Path) -> None:
    with own_folder(tmp_path):
        pass
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with own_folder(tmp_path):
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            with pytest.raises(StartError, match="another agent uses"), own_folder(tmp_path):
                pytest.fail("two agents")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_folder_that_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StartError, match=f"cannot lock --state-dir {tmp_path}: .*: use a local disk"):
        await take_over(tmp_path, can_serve)
    with (
        pytest.raises(StartError, match=f"cannot lock --state-dir {tmp_path}: .*: use a local disk"),
        own_folder(tmp_path),
    ):
        pytest.fail("not locked")


async def test_pomona_up_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with own_folder(tmp_path, standalone=True):
        monkeypatch.setattr(os, "kill", refuse)
        with pytest.raises(StartError, match=rf"process {os.getpid()}\) of another user uses --state-dir"):
            await take_over(tmp_path, can_serve)


async def test_folder_is_owned_without_process_identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(_: object) -> None:
        raise OSError("the kernel does not tell")

    with own_folder(tmp_path / "other", standalone=True):
        monkeypatch.setattr(state_folder, "identify_process", untold)
        monkeypatch.setattr(state_folder, "is_running", untold)
        with own_folder(tmp_path):
            pass
        await take_over(tmp_path / "other", can_serve)


def test_identity_is_the_same_after_a_restart_and_a_new_name_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify_agent(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert identify_agent(tmp_path) == before


def test_copy_of_state_folder_or_machine_has_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tmp_path / "original"
    identity = identify_agent(original)
    copy = shutil.copytree(original, tmp_path / "copy")
    assert load_identity(copy) == load_identity(original)
    assert identify_agent(copy) != identity
    monkeypatch.setattr(host, "machine_id", lambda: "another machine")
    assert identify_agent(original) != identity
