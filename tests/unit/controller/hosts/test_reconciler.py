"""Objects that the controller writes for a host: its Ready condition, its endpoints and the Secret with its tokens."""

import asyncio
import base64
import json
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from itertools import count
from typing import Any

import msgspec
import pytest

from controller.hosts import reconciler
from controller.hosts.address_check import FREE, PAUSE_SECONDS, AddressUse
from controller.hosts.liveness import HostDistrust, Liveness
from controller.hosts.reachability import AskAgent, ReachabilityProber
from controller.hosts.reconciler import HostInputs
from controller.hosts.secrets import HostSecrets, NeededSecret, list_needed_secrets
from controller.models import source_secret
from controller.reconcile.indexes import HOST_INDEX
from controller.reconcile.plan import FIELD_MANAGER, Leading, Plan, Snapshot
from controller.services.token_copies import fit_tokens, keep_previous_tokens
from controller.services.tokens import KnownTokens, token_secret
from crds.meta import HOSTS_NAMESPACE
from kube.client import Client, Obj, ObjectList
from kube.errors import Forbidden, NotFound
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_HOSTS, METAL_PROCESSES, ROLES, SECRETS, ObjectKey, Resource
from tests.support.api_objects import (
    NOW,
    as_service,
    host,
    planned_condition,
    process,
    service,
    slice_of,
    store,
)
from tests.support.background import running
from tests.support.eventually import eventually

KEY = ObjectKey("", "studio-1")
TOKENS = {"team_chat-token_token": base64.b64encode(b"secret").decode()}


def plan(
    liveness: Liveness,
    *slices: Obj,
    observed: Obj | None = None,
    secret: Obj | None = None,
    tokens: dict[str, str] | None = TOKENS,
    address_use: AddressUse | None = None,
) -> Plan:
    stored = store(
        (METAL_HOSTS, observed or host("studio-1", address="10.77.0.21")),
        (METAL_PROCESSES, process("a-b-0", host="studio-1")),
        *((ENDPOINT_SLICES, slice_) for slice_ in slices),
    )
    inputs = HostInputs(liveness, None if liveness == "Expired" else tokens, secret, address_use)
    return reconciler.decide_host(Snapshot(stored, NOW, inputs), KEY)


def planned_secret(done: Plan) -> Obj | None:
    return next((obj for resource, obj in done.apply if resource == SECRETS), None)


def test_alive_host_is_ready_and_keeps_its_endpoints() -> None:
    done = plan("Alive", slice_of("chat", "studio-1"))
    assert planned_condition(done, "Ready")["status"] == "True"
    assert done.delete == ()
    assert done.status is not None
    assert set(done.status) == {"conditions", "controllerVersion"}, "everything else is the agent's"


def test_decision_reads_the_version_from_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata.Distribution, "from_name", None)
    done = plan("Alive")
    assert done.status is not None
    assert done.status["controllerVersion"]


def test_only_endpoints_of_an_expired_host_are_deleted() -> None:
    foreign = slice_of("chat", "studio-1")
    foreign["metadata"] |= {"name": "other.studio-1", "labels": {"kubernetes.io/service-name": "other"}}
    done = plan("Expired", slice_of("chat", "studio-1"), slice_of("chat", "studio-2"), foreign)
    assert [ref.name for ref in done.delete] == ["chat.studio-1"]
    ready = planned_condition(done, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "LeaseExpired")
    assert "studio-1" in ready["message"]
    assert [event.reason for event in done.events] == ["LeaseExpired"]


def test_unproven_liveness_changes_nothing() -> None:
    ready = planned_condition(plan("Unproven", slice_of("chat", "studio-1")), "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "LeaseRenewed")
    new = host("studio-1")
    new["status"]["conditions"] = []
    assert planned_condition(plan("Unproven", observed=new), "Ready")["status"] == "Unknown"


def test_endpoints_of_an_unregistered_host_are_deleted_after_its_lease() -> None:
    stored = store((ENDPOINT_SLICES, slice_of("chat", "studio-1")))
    assert reconciler.decide_host(Snapshot(stored, NOW, HostInputs("Unproven")), KEY) == Plan(effects=(AskAgent(None),))
    done = reconciler.decide_host(Snapshot(stored, NOW, HostInputs("Expired")), KEY)
    assert [ref.name for ref in done.delete] == ["chat.studio-1"]
    assert done.status is None


def test_secret_of_a_host_has_all_tokens_and_is_owned_by_the_host() -> None:
    secret = planned_secret(plan("Alive"))
    assert secret
    assert (secret["metadata"]["namespace"], secret["metadata"]["name"]) == (HOSTS_NAMESPACE, "studio-1")
    assert secret["data"] == TOKENS
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "MetalHost"


def test_host_needs_the_tokens_of_processes_bound_to_it() -> None:
    processes = [
        process("a-b-0", host="studio-1", sourceSecret="hub"),
        process("a-b-1", host="studio-1"),
        process("c-d-0", host="studio-2", tokenSecret="other-token"),
        process("e-f-0", tokenSecret="unbound-token"),
    ]
    stored = store(*((METAL_PROCESSES, assigned) for assigned in processes))
    needed = list_needed_secrets(stored.by_index(METAL_PROCESSES, HOST_INDEX, "studio-1"))
    assert needed == [NeededSecret("team", "chat-token", "uid-chat"), NeededSecret("team", "hub", "")]


def test_expired_host_gets_no_secret_before_its_endpoints_are_gone() -> None:
    assert plan("Expired", slice_of("chat", "studio-1"), tokens=None).apply == ()


def test_unchanged_secret_is_not_written_again() -> None:
    secret = planned_secret(plan("Alive"))
    assert secret
    owned: Obj = {"f:data": {"f:team_chat-token_token": {}}}
    written = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": owned}
    there = secret | {"metadata": secret["metadata"] | {"managedFields": [written]}}
    assert planned_secret(plan("Alive", secret=there)) is None
    changed = there | {"data": {"team_chat-token_token": "b3RoZXI="}}
    assert planned_secret(plan("Alive", secret=changed))


def granted(done: Plan) -> dict[str, list[str]]:
    """Return the granted names by resource."""
    roles = [obj for resource, obj in done.apply if resource == ROLES]
    return {rule["resources"][0]: rule["resourceNames"] for role in roles for rule in role["rules"]}


def test_host_is_granted_its_address_and_what_is_bound_to_it() -> None:
    done = plan("Alive", address_use=FREE)
    assert granted(done) == {
        "metalhosts/address": ["10.77.0.21"],
        "metalhosts/services": ["team.chat"],
        "metalhosts/processes": ["team.a-b-0"],
    }
    assert planned_condition(done, "AddressAccepted")["status"] == "True"
    assert done.events == ()


def test_refused_address_is_reported_and_not_granted() -> None:
    done = plan("Alive", address_use=AddressUse("AddressOfPod", "is the address of pod team/web-0"))
    assert "metalhosts/address" not in granted(done)
    assert "metalhosts/services" in granted(done)
    assert [(event.type, event.reason) for event in done.events] == [("Warning", "AddressOfPod")]


def test_search_that_failed_is_repeated_soon() -> None:
    done = plan("Alive")
    assert planned_condition(done, "AddressAccepted")["reason"] == "NotChecked"
    assert done.again_seconds == PAUSE_SECONDS
    assert done.events == ()


def test_expired_host_keeps_its_grants() -> None:
    assert plan("Expired").apply == ()


async def test_leases_are_read_one_answer_after_the_other() -> None:
    reads = LateLeases()
    leases = reconciler.LeaseReader()
    recorder: Any = None
    leases._leading = Leading(reads, store(), recorder, lambda _resource, _key: None)
    first, second = asyncio.ensure_future(leases.read()), asyncio.ensure_future(leases.read())
    await eventually(lambda: reads.asked)
    assert len(reads.asked) == 1, "a late answer to an earlier request would count as a renewal"
    reads.asked[0].set()
    await eventually(lambda: len(reads.asked) == 2)
    reads.asked[1].set()
    await asyncio.gather(first, second)


class LateLeases(Client):
    """An API whose answers wait until a test lets them go."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Event] = []

    async def list(self, *_: Any, **__: Any) -> ObjectList:
        self.asked.append(asyncio.Event())
        await self.asked[-1].wait()
        return ObjectList([], "1")


class Api(Client):
    """An API with Secrets and without Leases."""

    def __init__(self, **secrets: Obj) -> None:
        self.secrets = secrets

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert resource == SECRETS
        if (secret := self.secrets.get(name)) is None:
            raise NotFound(f"{namespace}/{name}", status=404)
        return secret

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str = "",
        field_selector: str = "",
        read: Callable[[msgspec.Raw], Obj] | None = None,
        part: Callable[[Obj], Obj] | None = None,
        most: int | None = None,
    ) -> ObjectList:
        del read, part, most
        assert (resource, namespace, label_selector, field_selector) == (LEASES, HOSTS_NAMESPACE, "", "")
        return ObjectList([], "1")


def token_of(owner_uid: str) -> Obj:
    owner = {"uid": owner_uid, "controller": True}
    metadata = {"name": "chat-token", "uid": "uid-secret", "resourceVersion": "1", "ownerReferences": [owner]}
    return {"metadata": metadata, "data": {"token": "YQ==", "other": "Yg=="}}


async def test_host_secret_has_tokens_of_its_services_only() -> None:
    bound = (
        process("chat-b-0", host="studio-1", sourceSecret="hub"),
        process("chat-b-3", host="studio-1", sourceSecret="unmarked"),
        process("chat-b-4", host="studio-1", sourceSecret="account"),
        process("chat-b-1", host="studio-1", tokenSecret="foreign-token"),
        process("chat-b-2", host="studio-1", tokenSecret="missing-token"),
    )
    stored = store((METAL_HOSTS, host("studio-1", address="")), *((METAL_PROCESSES, assigned) for assigned in bound))
    secrets = {
        "chat-token": token_of("uid-chat"),
        "foreign-token": token_of("uid-other"),
        "hub": token_of("uid-user") | {"type": source_secret.TYPE},
        "unmarked": token_of("uid-user"),
        "account": token_of("uid-user") | {"type": "kubernetes.io/service-account-token"},
        "studio-1": {"metadata": {"name": "studio-1"}},
    }
    observe = reconciler.host_reconciler(reconciler.LeaseReader(), KnownTokens(), ReachabilityProber()).observe
    assert observe is not None
    facts = await observe(Api(**secrets), Snapshot(stored, NOW), KEY)
    assert facts.tokens == {"team_chat-token_token": "YQ==", "team_hub_token": "YQ=="}
    assert facts.secret == secrets["studio-1"]


async def test_host_removed_together_with_its_lease_expires_while_it_has_endpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciler, "READ_SECONDS", 0)
    stored = store((ENDPOINT_SLICES, slice_of("chat", "studio-1")))
    leases, enqueued = reconciler.LeaseReader(clock=count(step=5).__next__), set[ObjectKey]()
    recorder: Any = None
    leading = Leading(Api(), stored, recorder, lambda _resource, key: enqueued.add(key))
    async with running(leases.run(leading)):
        await eventually(lambda: KEY in enqueued)
    assert leases.liveness.find_liveness("studio-1") == "Expired"


class CountedSecrets(Client):
    """An API of Secrets that counts the reads."""

    def __init__(self, *, exist: bool = True) -> None:
        self.exist = exist
        self.forbidden = ""
        self.reads: list[str] = []

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        del resource
        self.reads.append(f"{namespace}/{name}")
        if namespace == self.forbidden:
            raise Forbidden(name, status=403)
        if not self.exist:
            raise NotFound(name, status=404)
        _, secret = token_secret(as_service(service()), "secret")
        metadata = {**secret["metadata"], "name": name, "uid": name, "resourceVersion": "1"}
        metadata["labels"] = {source_secret.LABEL: "true"}
        return secret | {"metadata": metadata}


async def test_secrets_of_a_host_are_read_once_and_those_of_users_again() -> None:
    api, secrets = CountedSecrets(), HostSecrets(KnownTokens())
    processes = [process("a-b-0", host="studio-1", sourceSecret="hub"), process("a-b-1", host="studio-1")]
    needs = list_needed_secrets(processes)
    for _ in range(3):
        assert len(await secrets.read_tokens(api, "studio-1", needs, NOW)) == 2
        assert await secrets.read_own(api, "studio-1", NOW)
    assert api.reads == ["team/chat-token", "team/hub", f"{HOSTS_NAMESPACE}/studio-1"]
    api.reads.clear()
    await secrets.read_tokens(api, "studio-1", needs, NOW + timedelta(minutes=1))
    assert api.reads == ["team/hub"]
    api.reads.clear()
    replaced = list_needed_secrets(processes, lambda service: f"rotation of {service.name}")
    await secrets.read_tokens(api, "studio-1", replaced, NOW + timedelta(minutes=1))
    assert api.reads == ["team/chat-token"], "at once after the token was replaced"
    await secrets.read_tokens(api, "studio-1", replaced, NOW + timedelta(minutes=1))
    assert api.reads == ["team/chat-token"], "a Secret that does not tell of its replacement is read once a minute"


async def test_token_of_a_service_is_read_until_its_secret_is_there() -> None:
    api, secrets = CountedSecrets(exist=False), HostSecrets(KnownTokens())
    needs = list_needed_secrets([process("a-b-0", host="studio-1")])
    assert await secrets.read_tokens(api, "studio-1", needs, NOW) == {}
    api.exist = True
    assert len(await secrets.read_tokens(api, "studio-1", needs, NOW)) == 1


async def test_host_that_was_expired_gets_the_tokens_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(store((METAL_PROCESSES, process("a-b-0", host="studio-1"))), NOW)
    snapshot.store.put(METAL_HOSTS, host("studio-1", address=""))
    leases, api, tokens = reconciler.LeaseReader(), CountedSecrets(), KnownTokens()
    observe = reconciler.host_reconciler(leases, tokens, ReachabilityProber()).observe
    assert observe is not None
    observed = []
    for state, token in (("Alive", "first"), ("Expired", "anew"), ("Alive", "anew")):
        # Made anew while nothing served: no replacement is noted.
        _, secret = token_secret(as_service(service()), token)
        tokens.remember(SECRETS, secret)
        monkeypatch.setattr(leases.liveness, "find_liveness", lambda _host, state=state: state)
        observed.append((await observe(api, snapshot, KEY)).tokens)
    assert observed == [{"team_chat-token_token": "Zmlyc3Q="}, None, {"team_chat-token_token": "YW5ldw=="}]


async def test_secret_of_a_user_is_read_once_for_all_hosts() -> None:
    api, secrets = CountedSecrets(), HostSecrets(KnownTokens())
    needs = [NeededSecret("team", "hub", "")]
    hosts = [f"studio-{number}" for number in range(20)]
    for minute in range(3):
        for name in hosts:
            tokens = await secrets.read_tokens(api, name, needs, NOW + timedelta(minutes=minute))
            assert tokens == {"team_hub_token": "c2VjcmV0"}
    assert api.reads == ["team/hub"] * 3
    other = NeededSecret("team", "other", "")
    await secrets.read_tokens(api, hosts[0], [other], NOW + timedelta(minutes=3))
    assert secrets._readings.keys() == {other}, "a reading that no host needs any more is dropped"


async def test_secret_of_a_user_that_is_missing_is_read_once_for_all_hosts() -> None:
    api, secrets = CountedSecrets(exist=False), HostSecrets(KnownTokens())
    for name in ("studio-1", "studio-2", "studio-1"):
        assert await secrets.read_tokens(api, name, [NeededSecret("team", "hub", "")], NOW) == {}
    assert api.reads == ["team/hub"]
    api.exist = True
    later = NOW + timedelta(minutes=1)
    assert await secrets.read_tokens(api, "studio-1", [NeededSecret("team", "hub", "")], later)


async def test_secret_that_may_not_be_read_any_more_stays_and_keeps_no_other_from_the_host() -> None:
    api, secrets = CountedSecrets(), HostSecrets(KnownTokens())
    needs = [NeededSecret("closed", "hub", ""), NeededSecret("team", "hub", "")]
    tokens = await secrets.read_tokens(api, "studio-1", needs, NOW)
    assert tokens.keys() == {"closed_hub_token", "team_hub_token"}
    api.forbidden = "closed"
    assert await secrets.read_tokens(api, "studio-1", needs, NOW + timedelta(minutes=1)) == tokens
    later = await secrets.read_tokens(api, "studio-2", [*needs, NeededSecret("closed", "new", "")], NOW)
    assert later == tokens


async def test_secrets_are_read_again_by_a_replica_that_leads_again() -> None:
    api, snapshot = CountedSecrets(), Snapshot(store((METAL_PROCESSES, process("a-b-0", host="studio-1"))), NOW)
    snapshot.store.put(METAL_HOSTS, host("studio-1", address=""))
    leases, tokens = reconciler.LeaseReader(), KnownTokens()
    hosts = reconciler.host_reconciler(leases, tokens, ReachabilityProber())
    assert hosts.observe is not None
    assert hosts.restart is not None
    for _ in range(2):
        hosts.restart()
        tokens.restart()
        api.reads.clear()
        await hosts.observe(api, snapshot, ObjectKey("", "studio-1"))
        assert api.reads == ["team/chat-token", f"{HOSTS_NAMESPACE}/studio-1"], "another leader may have written them"


def tokens_after(seconds: int, existing: dict[str, str], token: str, service_keys: tuple[str, ...] = ("a",)) -> Obj:
    return keep_previous_tokens({"a": token}, service_keys, existing, NOW + timedelta(seconds=seconds))


def previous_of(data: Obj) -> Obj:
    previous: Obj = json.loads(base64.b64decode(data["previous_tokens"])) if "previous_tokens" in data else {}
    return previous


def test_token_that_was_replaced_is_valid_for_ten_minutes() -> None:
    end = int(NOW.timestamp()) + 600
    assert tokens_after(0, {}, "old") == {"a": "old"}
    replaced = tokens_after(0, {"a": "old"}, "new")
    assert (replaced["a"], previous_of(replaced)) == ("new", {"a": {"token": "old", "validUntil": end}})
    assert tokens_after(599, replaced, "new") == replaced, "nothing is written while nothing changes"
    assert tokens_after(600, replaced, "new") == {"a": "new"}
    again = tokens_after(10, replaced, "newest")
    assert previous_of(again) == {"a": {"token": "new", "validUntil": end + 10}}
    assert previous_of(tokens_after(10, again, "new"))["a"]["token"] == "newest", "one that returns is not its own"


def test_only_tokens_of_services_stay_valid() -> None:
    assert tokens_after(0, {"a": "old"}, "new", ()) == {"a": "new"}
    left = keep_previous_tokens({}, (), {"a": "old"}, NOW)
    assert left == {}
    assert keep_previous_tokens({"a": "new"}, (), {"previous_tokens": "odd"}, NOW) == {"a": "new"}


async def test_processes_to_be_released_are_decided_again_when_their_host_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconciler, "READ_SECONDS", 0)
    expired = host("studio-1", ready="False")
    deleted = process("chat-b-0", host="studio-1", deletionTimestamp="2026-11-21T12:00:00Z")
    stored = store(
        (METAL_HOSTS, expired), (METAL_PROCESSES, deleted), (METAL_PROCESSES, process("chat-b-1", host="studio-1"))
    )
    leases, enqueued = reconciler.LeaseReader(clock=count(step=5).__next__), set[tuple[Resource, ObjectKey]]()
    recorder: Any = None
    leading = Leading(Api(), stored, recorder, lambda resource, key: enqueued.add((resource, key)))
    async with running(leases.run(leading)):
        await eventually(lambda: (METAL_HOSTS, KEY) in enqueued)
    assert enqueued == {(METAL_HOSTS, KEY), (METAL_PROCESSES, ObjectKey("team", "chat-b-0"))}


def test_huge_token_of_one_tenant_keeps_no_other_token_from_a_host() -> None:
    """A Secret has room for 1 MiB, and one that is larger would be refused as a whole."""
    huge = {f"thieves_{number}_token": "A" * (200 << 10) for number in range(9)}
    fitting = fit_tokens(TOKENS | huge)
    assert fitting == TOKENS | {"thieves_0_token": huge["thieves_0_token"]}
    kept = keep_previous_tokens({key: "B" + token[1:] for key, token in fitting.items()}, fitting.keys(), fitting, NOW)
    assert sum(len(base64.b64decode(token)) for token in kept.values()) < 1 << 20


def test_expiries_are_kept_in_the_status_and_the_host_is_looked_at_when_it_is_trusted() -> None:
    expiries = ("2026-11-21T11:30:00Z", "2026-11-21T11:50:00Z")
    stored = store((METAL_HOSTS, host("studio-1")))
    inputs = HostInputs("Alive", {}, None, None, None, HostDistrust(2, 60.0, 5.0), expiries)
    plan = reconciler.decide_host(Snapshot(stored, NOW, inputs), KEY)
    assert plan.status is not None
    assert plan.status["leaseExpiries"] == list(expiries)
    assert planned_condition(plan, "Stable")["reason"] == "Flapping"
    assert plan.again_seconds == 5.0


@pytest.mark.parametrize(("expiries", "kept"), [(None, True), ((), False)])
def test_new_leader_keeps_the_expiries_until_it_has_read_them(expiries: tuple[str, ...] | None, kept: bool) -> None:
    stored = store((METAL_HOSTS, host("studio-1", leaseExpiries=["2026-11-21T11:50:00Z"])))
    plan = reconciler.decide_host(Snapshot(stored, NOW, HostInputs("Unproven", expiries=expiries)), KEY)
    assert plan.status is not None
    assert ("leaseExpiries" in plan.status) == kept
