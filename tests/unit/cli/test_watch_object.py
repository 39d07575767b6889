"""Wait of commands for one object: an outage is survived, and a drain ends when the controller says so."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import click
import pytest

from cli.cluster_access import Cluster, watch_object
from cli.cluster_options import ClusterOptions
from cli.host.scheduling import wait_until_drained
from kube.client import Client, Obj, ObjectList, WatchEvent
from kube.credentials import Credentials
from kube.errors import Unreachable
from kube.resources import METAL_HOSTS
from tests.support import virtual_time

Step = Obj | float | Exception | None


class ScriptedClient(Client):
    """A client whose watch brings a script: an object is a change, None its deletion, a number seconds of quiet."""

    def __init__(self, first: Obj | None, *steps: Step, unreachable_from: float = float("inf")) -> None:
        self._now = first
        self._steps = list(steps)
        self._unreachable_from = unreachable_from

    async def list(self, *_arguments: Any, **_options: Any) -> ObjectList:
        if asyncio.get_running_loop().time() >= self._unreachable_from:
            raise Unreachable("connection refused")
        return ObjectList([self._now] if self._now else [], "1")

    async def watch(self, *_arguments: Any, **_options: Any) -> AsyncGenerator[WatchEvent, None]:
        while self._steps:
            match self._steps.pop(0):
                case float(seconds):
                    await asyncio.sleep(seconds)
                case Exception() as error:
                    raise error
                case None:
                    yield WatchEvent("DELETED", self._now or {})
                case dict(obj):
                    self._now = obj
                    yield WatchEvent("MODIFIED", obj)
        raise Unreachable("connection refused")


def drained(status: str, message: str, *, observed: int = 2, drain: bool = True, uid: str = "a") -> Obj:
    """Return a host whose drain is of its generation 2."""
    return {
        "metadata": {"name": "studio-1", "uid": uid, "generation": 2},
        "spec": {"unschedulable": True, "drain": drain},
        "status": {
            "conditions": [
                {"type": "Drained", "status": status, "message": message, "observedGeneration": observed},
            ]
        },
    }


HOST = drained("False", "")
FAR = 1e6


def wait(client: Client) -> None:
    virtual_time.run(wait_until_drained(Cluster(client, cast("Credentials", None), "default", ClusterOptions()), HOST))


def test_drain_waits_for_the_condition_and_prints_each_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    moving, held = drained("False", "2 processes are still on this host"), drained("False", "1 process is held")
    wait(ScriptedClient(moving, moving, held, held, drained("True", "no process is left")))
    assert capsys.readouterr().out.splitlines() == ["2 processes are still on this host", "1 process is held"]


def test_condition_of_an_earlier_drain_does_not_end_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    old = drained("True", "no process is left", observed=1)
    bare = {**HOST, "status": {}}
    wait(ScriptedClient(bare, old, drained("False", "1 process is still on this host"), drained("True", "")))
    assert capsys.readouterr().out == "1 process is still on this host\n"


def test_drain_that_is_taken_back_ends_with_an_error() -> None:
    with pytest.raises(click.ClickException, match="the drain of studio-1 was taken back"):
        wait(ScriptedClient(HOST, drained("False", "", drain=False, observed=3), FAR))


@pytest.mark.parametrize("gone", [None, drained("True", "", uid="b")])
def test_host_that_is_removed_is_not_drained(gone: Obj | None) -> None:
    with pytest.raises(click.ClickException, match="MetalHost studio-1 was removed while it was drained"):
        wait(ScriptedClient(HOST, gone, FAR))


def test_cut_of_a_quiet_watch_is_survived() -> None:
    async def work() -> None:
        client = ScriptedClient({"n": 1}, 45.0, Unreachable("reset"), {"n": 2}, 45.0, Unreachable("reset"), {"n": 3})
        seen = []
        async for obj in watch_object(client, METAL_HOSTS, "studio-1"):
            assert obj
            seen.append(obj["n"])
            if obj["n"] == 3:
                break
        assert seen == [1, 1, 2, 2, 3]

    virtual_time.run(work())


def test_outage_of_more_than_half_a_minute_is_raised() -> None:
    async def follow(client: Client) -> None:
        try:
            async for obj in watch_object(client, METAL_HOSTS, "studio-1"):
                assert obj == {"n": 1}
        finally:
            assert asyncio.get_running_loop().time() == pytest.approx(75.0, abs=2.0)

    client = ScriptedClient({"n": 1}, 45.0, Unreachable("reset"), unreachable_from=45.0)
    with pytest.raises(Unreachable, match="refused"):
        virtual_time.run(follow(client))
