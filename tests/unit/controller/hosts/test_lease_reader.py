"""The Leases of hosts are read all together, and that of a lost host is looked at before it is decided."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from controller.hosts import reconciler
from controller.hosts.reachability import ReachabilityProber
from controller.reconcile.plan import Leading, Snapshot
from controller.services.tokens import KnownTokens
from kube.client import Client, Obj, ObjectList
from kube.errors import NotFound
from kube.resources import METAL_HOSTS, ObjectKey
from tests.support.api_objects import NOW, host, lease, store


class LeaseApi(Client):
    """An API with Leases only, which notes how many it has sent in each answer."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self.renewed = dict.fromkeys(hosts, datetime.now(UTC).isoformat())
        self.sent: list[int] = []

    async def list(self, *_: Any, field_selector: str = "", **__: Any) -> ObjectList:
        selected = field_selector.removeprefix("metadata.name=")
        leases = [lease(name, renewed) for name, renewed in self.renewed.items() if selected in {"", name}]
        self.sent.append(len(leases))
        return ObjectList(leases, "1")

    async def get(self, *_: Any, **__: Any) -> Obj:
        raise NotFound("get", status=404)


async def test_lease_of_a_lost_host_is_looked_at_before_the_host_is_decided() -> None:
    names, now = [f"studio-{number}" for number in range(10)], 0.0
    api, stored = LeaseApi(names), store(*((METAL_HOSTS, host(name, address="")) for name in names))
    leases, enqueued = reconciler.LeaseReader(clock=lambda: now), list[str]()
    recorder: Any = None
    leases._leading = Leading(api, stored, recorder, lambda _resource, key: enqueued.append(key.name))
    told: list[float] = []
    leases.subscribe(lambda: told.append(now))
    observe = reconciler.host_reconciler(leases, KnownTokens(), ReachabilityProber()).observe
    assert observe is not None
    for _ in range(9):
        await leases.read()
        now += 5.0
    assert {leases.liveness.find_liveness(name) for name in names} == {"Expired"}
    api.sent.clear()
    enqueued.clear()
    told.clear()
    for name in names:
        inputs = await observe(api, Snapshot(stored, NOW), ObjectKey("", name))
        assert inputs.liveness == "Expired"
    assert (api.sent, enqueued, told) == ([1] * len(names), [], [])
    api.renewed["studio-3"] = "2030-01-01T00:00:00Z"
    inputs = await observe(api, Snapshot(stored, NOW), ObjectKey("", "studio-3"))
    assert (inputs.liveness, enqueued, len(told)) == ("Alive", ["studio-3"], 1)
