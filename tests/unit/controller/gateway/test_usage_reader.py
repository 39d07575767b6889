"""The reader of the gateway's counts: which pods it asks, which keys it enqueues, and how many at most."""

import asyncio
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from controller.gateway import usage_reader
from controller.gateway.usage_reader import MOST_BYTES, READ_SECONDS, WRITES_PER_SECOND, UsageReader, find_usage_url
from controller.reconcile.plan import Leading
from gateway.cluster.usage import KeyCount, ReplicaUsage
from kube.client import Client, Obj, ObjectList
from kube.errors import Unreachable
from kube.resources import GATEWAY_KEYS, PODS, ObjectKey, Resource
from tests.support import virtual_time
from tests.support.api_objects import NOW, store
from tests.support.background import running
from tests.unit.controller.gateway.key_objects import gateway_key

USED = {"since": "2026-11-20T12:00:00Z", "requests": 1, "tokens": 1, "lastUsedAt": "2026-11-20T12:00:00Z"}


def pod(name: str, **status: Any) -> Obj:
    container = {
        "name": "gateway",
        "ports": [{"name": "api", "containerPort": 1}, {"name": "metrics", "containerPort": 2}],
    }
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container]},
        "status": {"phase": "Running", "podIP": f"{name}.invalid", **status},
    }


def answer(replica: str, **keys: int) -> bytes:
    counted = {f"uid-{name}": KeyCount(requests, requests) for name, requests in keys.items()}
    return msgspec.json.encode(ReplicaUsage(replica * 16, counted))


class UsageWorld(Client):
    """An API with the pods of the gateway, their answers, and a leader.

    Attributes:
        pods: the pods.
        answers: by name of the pod.
        enqueued: the names of keys that were enqueued, with the times.
        fails: pods cannot be listed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *keys: Obj) -> None:
        self.store = store(*((GATEWAY_KEYS, key) for key in keys))
        self.pods = [pod("a")]
        self.answers: dict[str, bytes | None] = {"a": answer("a")}
        self.enqueued: list[tuple[float, str]] = []
        self.fails = False
        self.reader = UsageReader(self.store, self._read_clock)
        monkeypatch.setattr(usage_reader, "read_answer", self._answer)

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.enqueued]

    def _read_clock(self) -> datetime:
        return NOW + timedelta(seconds=asyncio.get_running_loop().time())

    async def list(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", **_: Any
    ) -> ObjectList:
        assert (resource, namespace) == (PODS, "pomona-system")
        assert label_selector == "app.kubernetes.io/name=pomona,app.kubernetes.io/component=gateway"
        if self.fails:
            raise Unreachable("list: try again")
        return ObjectList(self.pods, "1")

    async def _answer(self, _session: object, url: str, most_bytes: int) -> bytes | None:
        assert most_bytes == usage_reader.MOST_BYTES
        return self.answers[url.removeprefix("http://").removesuffix(".invalid:2/usage")]

    def _enqueue(self, resource: Resource, key: ObjectKey) -> None:
        assert resource == GATEWAY_KEYS
        self.enqueued.append((asyncio.get_running_loop().time(), key.name))

    def lead(self, *waits: float, then: Mapping[int, Any] = {}) -> None:
        """Lead for these times, one after the other; `then` has what is called after some of them."""

        async def main() -> None:
            async with running(self.reader.run(Leading(self, self.store, None, self._enqueue))):  # type: ignore[arg-type]
                for number, seconds in enumerate(waits):
                    await asyncio.sleep(seconds)
                    then.get(number, lambda: None)()

        virtual_time.run(main())


def test_only_keys_that_exist_are_enqueued_and_their_counts_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = UsageWorld(
        monkeypatch, gateway_key("app", status={"usage": USED}), gateway_key("idle", status={"usage": USED})
    )
    world.answers["a"] = answer("a", app=5, gone=7)
    world.lead(1)
    assert world.names == ["app"]
    assert world.reader.take_counts("uid-idle") is None
    assert world.reader.take_counts("uid-gone") is None
    counts = world.reader.take_counts("uid-app")
    assert counts is not None
    assert {name: count.requests for name, count in counts.by_replica.items()} == {"a" * 16: 5}
    assert world.reader.take_counts("uid-app") is None


def test_writes_of_all_keys_together_are_bounded_and_keys_in_use_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [gateway_key(f"used-{number}", status={"usage": USED}) for number in range(20)]
    world = UsageWorld(monkeypatch, *(gateway_key(f"new-{number}") for number in range(1000)), *used)
    world.answers["a"] = answer("a", **{f"used-{number}": 2 for number in range(20)})
    world.lead(READ_SECONDS)
    assert len(world.enqueued) == READ_SECONDS * WRITES_PER_SECOND
    assert {name.partition("-")[0] for name in world.names[:20]} == {"used"}


def test_new_keys_of_one_namespace_delay_no_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    new = [gateway_key(f"new-{number}") for number in range(100)]
    others = [gateway_key(f"other-{number}", namespace="team-b", status={"usage": USED}) for number in range(2)]
    others[1]["status"] = {"usage": USED | {"lastUsedAt": "2026-11-19T12:00:00Z"}}
    world = UsageWorld(monkeypatch, *new, *others)
    world.answers["a"] = answer("a", **{f"new-{number}": 1 for number in range(100)}, **{"other-0": 2, "other-1": 2})
    world.lead(READ_SECONDS)
    assert [name for name in world.names[:4] if name.startswith("other")] == ["other-1", "other-0"]


def test_usage_that_cannot_be_decoded_stops_no_other_key(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = gateway_key("odd", status={"usage": USED | {"counted": "later releases may have another form"}})
    world = UsageWorld(monkeypatch, odd, gateway_key("app", status={"usage": USED}))
    world.answers["a"] = answer("a", odd=5, app=5)
    world.lead(1)
    assert set(world.names) == {"odd", "app"}


def test_replica_that_cannot_be_read_leaves_unused_keys_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    world = UsageWorld(monkeypatch, gateway_key("app"), gateway_key("idle"))
    world.pods = [pod("a"), pod("b"), pod("c", phase="Pending", podIP=None), pod("d", phase="Failed")]
    world.answers = {"a": answer("a", app=1), "b": None}
    world.lead(READ_SECONDS - 1, 2, then={0: lambda: world.answers.update(b=answer("b"))})
    assert [name for at, name in world.enqueued if at < READ_SECONDS] == ["app"]
    assert "idle" in world.names


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"[]", b'{"replica": "x", "keys": {}}', b'{"replica": "0000000000000000", "keys": {"uid-app": [-1, 0]}}'],
)
def test_nonsense_counts_nothing(monkeypatch: pytest.MonkeyPatch, nonsense: bytes) -> None:
    world = UsageWorld(monkeypatch, gateway_key("app"))
    world.answers["a"] = nonsense
    world.lead(READ_SECONDS)
    assert world.enqueued == []


def test_no_gateway_and_no_list_of_its_pods_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = UsageWorld(monkeypatch, gateway_key("app"))
    world.pods = []
    world.lead(READ_SECONDS)
    world.pods = [pod("a")]
    new_key = gateway_key("new")

    def fail() -> None:
        world.fails = True
        world.store.put(GATEWAY_KEYS, new_key)

    world.lead(READ_SECONDS - 1, READ_SECONDS, then={0: fail})
    assert world.names == ["app"]


def test_last_counts_of_an_ended_replica_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    world = UsageWorld(monkeypatch, gateway_key("app"))
    world.answers["a"] = answer("a", app=5)

    def replace() -> None:
        world.answers["a"] = answer("b", app=1)

    world.lead(1, READ_SECONDS, then={0: replace})
    counts = world.reader.take_counts("uid-app")
    assert counts is not None
    assert {name[0]: count.requests for name, count in counts.by_replica.items()} == {"a": 5, "b": 1}
    assert counts.replicas == {"a" * 16, "b" * 16}


def test_another_leadership_begins_without_the_counts_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader in between may have dropped an ended replica from the status, which would be counted anew."""
    world = UsageWorld(monkeypatch, gateway_key("app"))
    world.answers["a"] = answer("a", app=5)
    world.lead(1)
    world.reader.restart()
    assert world.reader.take_counts("uid-app") is None
    world.answers["a"] = answer("b", app=1)
    world.lead(1)
    counts = world.reader.take_counts("uid-app")
    assert counts is not None
    assert counts.by_replica.keys() == counts.replicas == {"b" * 16}


def test_answer_with_10_000_keys_is_read() -> None:
    counts = {str(uuid.uuid4()): KeyCount(1 << 53, 1 << 53) for _ in range(10_000)}
    assert len(msgspec.json.encode(ReplicaUsage("a" * 16, counts))) < MOST_BYTES


def test_addresses_of_both_families_are_read() -> None:
    assert find_usage_url(pod("a", podIP="10.0.0.1")) == "http://10.0.0.1:2/usage"
    assert find_usage_url(pod("a", podIP="fd00::1")) == "http://[fd00::1]:2/usage"
    without_port = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "x"}]}, "status": {"podIP": "10.0.0.1"}}
    assert find_usage_url(without_port) is None
