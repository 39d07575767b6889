"""Services of a Model with copies on nodes: one Deployment beside each copy, changed one after the other."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.models.served import weights_path
from controller.pod_settings import PodSettings
from controller.services.pods.update_pacer import UpdatePacer
from controller.services.reconciler import service_reconciler
from controller.services.service_view import AWAITS_UPDATE
from crds.meta import LABEL_COPY, LABEL_SERVICE, NOMINATED
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.api_objects import NOW, model, planned_condition, store
from tests.support.service_decisions import KEY, METAL, chat_service, decide_chat, list_applied, plain_sources
from tests.support.simulated_pods import REFUSED, SOURCE, SimulatedPods

NVIDIA: Obj = {"hardware": {"accelerator": "nvidia"}}


def running(rooms: dict[str, int], replicas: int, **spec: object) -> SimulatedPods:
    """Return a service whose replicas run beside a copy on each node."""
    world = SimulatedPods(rooms, replicas=replicas, **spec)
    for node in rooms:
        world.add_copy(node)
    world.settle()
    return world


def test_deployment_is_pinned_to_the_node_of_its_copy() -> None:
    world = SimulatedPods({"a": 1})
    claim = world.add_copy("a")
    (made,) = list_applied(world.decide(), DEPLOYMENTS)
    assert made["metadata"]["name"].startswith("chat-")
    assert len(made["metadata"]["name"]) == len("chat-") + 8
    selected = {LABEL_SERVICE: "chat", LABEL_COPY: claim}
    assert made["spec"]["selector"] == {"matchLabels": selected}
    assert made["metadata"]["labels"].items() >= {LABEL_COPY: claim}.items()
    template = made["spec"]["template"]
    assert template["metadata"]["labels"].items() >= selected.items()
    assert template["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    assert world.replicas_by_node() == {"a": 1}


def test_replicas_are_spread_over_copies() -> None:
    world = running({"a": 2, "b": 2}, 3)
    assert world.replicas_by_node() == {"a": 2, "b": 1}
    assert world.plan.status is not None
    assert (world.plan.status["replicas"], world.plan.status["readyReplicas"]) == (3, 3)
    assert world.plan.status["nodes"] == ["a", "b"]


def test_replica_that_is_refused_runs_beside_the_next_copy() -> None:
    world = SimulatedPods({"a": 1, "b": 1}, replicas=2)
    world.add_copy("a")
    plan = world.settle()
    assert (world.replicas_by_node(), world.count_ready()) == ({"a": 2}, 1)
    assert plan.status is not None
    assert planned_condition(plan, "Ready")["reason"] == "Unschedulable"
    world.add_copy("b")
    plan = world.settle(least_ready=1)
    assert (world.replicas_by_node(), world.count_ready()) == ({"a": 1, "b": 1}, 2)


def test_replica_that_the_queue_lets_wait_is_tried_beside_the_next_copy() -> None:
    world = SimulatedPods({"a": 0, "b": 1}, **NVIDIA)
    world.add_copy("a")
    for work in (world.decide, world.run_deployments, world.schedule, world.decide):
        work()
    world.add_copy("b")
    assert (world.decide().again_seconds or 99) <= 10, "time alone makes the difference"
    assert world.replicas_by_node() == {"a": 1}, "the queue may not have looked at it yet"
    (pod,) = world.pods.values()
    pod["metadata"]["annotations"] = {NOMINATED: "{}"}
    world.pass_queue_time()
    world.decide()
    assert world.replicas_by_node() == {"a": 1}, "it is promised a place"
    del pod["metadata"]["annotations"]
    world.settle()
    assert (world.replicas_by_node(), world.count_ready()) == ({"b": 1}, 1)


def test_refused_pods_beside_several_copies_are_one_replica() -> None:
    world = running({"a": 0, "b": 0}, 1)
    assert world.replicas_by_node() == {"a": 1, "b": 1}
    assert world.plan.status is not None
    assert world.plan.status["replicas"] == 1


def test_replicas_wait_for_their_share_of_a_copy_that_is_being_made() -> None:
    world = SimulatedPods({"a": 2, "b": 2}, replicas=2)
    world.add_copy("a")
    world.make_copy("b")
    plan = world.settle()
    assert world.replicas_by_node() == {"a": 1}
    assert "waiting for a copy of Model tiny" in planned_condition(plan, "Ready")["message"]
    world.make_copy("b", is_refused=True)
    world.settle(least_ready=1)
    assert world.replicas_by_node() == {"a": 2}


@pytest.mark.parametrize("spec", [{}, NVIDIA], ids=["cpu", "nvidia"])
def test_edit_changes_one_node_after_the_other(spec: Obj) -> None:
    world = running({"a": 1, "b": 1, "c": 1}, 3, **spec)
    world.spec["contextLength"] = 8192
    plan = world.decide()
    changed = [obj for obj in world.deployments.values() if obj["metadata"]["generation"] == 2]
    assert len(changed) == 1
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 0, "of the latest spec"
    plan = world.settle(least_ready=2)
    assert {obj["metadata"]["generation"] for obj in world.deployments.values()} == {2}
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 3


def test_update_of_pomona_waits_for_its_turn_and_then_changes_one_node_after_the_other() -> None:
    world = running({"a": 1, "b": 1}, 2)
    cpu = replace(VENDORS["cpu"], images={"llama.cpp": "engine:2"})
    world.settings, world.may_roll_out = PodSettings(vendors={**VENDORS, "cpu": cpu}), False
    plan = world.settle(least_ready=2)
    assert {obj["metadata"]["generation"] for obj in world.deployments.values()} == {1}
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 2, "until then they are as wanted"
    assert AWAITS_UPDATE in planned_condition(plan, "ModelReady")["message"]
    world.may_roll_out = True
    plan = world.decide()
    assert sorted(obj["metadata"]["generation"] for obj in world.deployments.values()) == [1, 2]
    assert plan.status is not None
    assert plan.status["readyReplicas"] == 1
    world.settle(least_ready=1)
    assert {obj["metadata"]["generation"] for obj in world.deployments.values()} == {2}


def test_edit_that_cannot_start_stops_at_the_first_node() -> None:
    world = running({"a": 1, "b": 1}, 2)
    world.spec["contextLength"] = 8192
    for _ in range(3):
        world.decide()
        world.run_deployments()
        world.schedule()
        world.report()
    assert world.count_ready() == 1
    assert sorted(obj["metadata"]["generation"] for obj in world.deployments.values()) == [1, 2]
    world.spec["contextLength"] = 4096
    world.settle(least_ready=1)
    assert world.count_ready() == 2


def test_edit_is_at_once_where_nothing_serves() -> None:
    world = running({"a": 0, "b": 0}, 1)
    world.spec["contextLength"] = 8192
    world.decide()
    assert {obj["metadata"]["generation"] for obj in world.deployments.values()} == {2}


def lose_node(world: SimulatedPods, node: str) -> None:
    """Make a node take no pod any more, with its pods gone."""
    world.rooms[node] = 0
    for pod in world.pods.values():
        if pod["spec"].get("nodeName") == node:
            pod["spec"], pod["status"] = {}, {"conditions": []}


@pytest.mark.parametrize("spec", [{}, NVIDIA], ids=["cpu", "nvidia"])
@pytest.mark.parametrize("cause", ["edit", "update"])
@pytest.mark.parametrize("rooms", [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2}], ids=str)
def test_change_reaches_all_that_serve_though_a_node_takes_no_pod(rooms: dict[str, int], cause: str, spec: Obj) -> None:
    world = running(rooms, sum(rooms.values()), parallel=1, **spec)
    lose_node(world, "b")
    left = sum(world.rooms.values())
    world.settle(least_ready=left)
    if cause == "edit":
        world.spec["contextLength"] = 8192
    else:
        changed = {name: replace(VENDORS[name], images={"llama.cpp": "engine:2"}) for name in ("cpu", "nvidia")}
        world.settings = PodSettings(vendors={**VENDORS, **changed})
    world.settle(least_ready=left - 1)
    wanted = "8192" if cause == "edit" else "engine:2"
    assert all(wanted in str(pod["template"]) for pod in world.pods.values())
    world.rooms["b"] = rooms["b"]
    world.settle(least_ready=left)
    assert world.count_ready() == sum(rooms.values())


def test_edit_for_which_no_node_has_room_stops_at_the_first_one_though_another_takes_no_pod() -> None:
    world = running({"a": 1, "b": 1, "c": 1}, 3)
    lose_node(world, "c")
    world.settle(least_ready=2)
    for length in (8192, 16384):
        world.spec["contextLength"] = length
        world.decide()
        world.run_deployments()
        world.run_pods()
        for node in "ab":
            if node not in world.count_pods():
                world.rooms[node] = 0
        world.settle(least_ready=1)
    assert world.count_ready() == 1


@pytest.mark.parametrize("spec", [{}, NVIDIA], ids=["cpu", "nvidia"])
@pytest.mark.parametrize("room", [1, 2], ids=["full nodes", "free nodes"])
def test_earlier_weights_serve_until_the_wanted_ones_do(spec: Obj, room: int) -> None:
    world = running({"a": room, "b": room}, 2, **spec)
    world.revision = "r2"
    world.settle(least_ready=2)
    assert world.replicas_by_node() == {"a": 1, "b": 1}, "there is no copy of the wanted weights yet"
    world.make_copy("b")
    world.add_copy("a", "r2")
    world.settle(least_ready=room)
    world.add_copy("b", "r2")
    plan = world.settle(least_ready=room)
    claims = {obj["metadata"]["labels"][LABEL_COPY] for obj in world.deployments.values()}
    assert claims == {"tiny-cache-a-r2", "tiny-cache-b-r2"}
    assert plan.status is not None
    assert (plan.status["replicas"], plan.status["readyReplicas"]) == (2, 2)


def test_only_replica_moves_to_wanted_weights_on_its_full_node() -> None:
    world = running({"a": 1}, 1)
    world.revision = "r2"
    world.add_copy("a", "r2")
    world.settle()
    assert [obj["metadata"]["labels"][LABEL_COPY] for obj in world.deployments.values()] == ["tiny-cache-a-r2"]
    assert world.count_ready() == 1


def test_two_kinds_of_earlier_weights_never_serve_together() -> None:
    world = running({"a": 1, "b": 1}, 1)
    world.add_copy("b", "r0")
    world.revision, world.spec["replicas"] = "r2", 3
    world.settle(least_ready=1)
    claims = {obj["metadata"]["labels"][LABEL_COPY] for obj in world.deployments.values()}
    assert claims == {"tiny-cache-a-r1", "tiny-cache-b-r1"}


def test_replicas_leave_a_node_that_is_gone() -> None:
    world = running({"a": 1, "b": 2}, 2)
    del world.rooms["a"]
    world.remove_copies("a")
    for pod in world.pods.values():
        if pod["spec"].get("nodeName") == "a":
            pod["spec"], pod["status"] = {}, {"conditions": []}
    world.settle(least_ready=1)
    assert (world.replicas_by_node(), world.count_ready()) == ({"b": 2}, 2)


def test_fewer_replicas_end_those_that_are_not_ready_first() -> None:
    world = running({"a": 1, "b": 0}, 2)
    world.spec["replicas"] = 1
    world.settle(least_ready=1)
    assert world.replicas_by_node() == {"a": 1}


def test_replicas_stay_while_the_model_is_not_usable() -> None:
    world = running({"a": 1, "b": 1}, 2)
    world.is_cached = False
    plan = world.settle(least_ready=2)
    assert (plan.apply[0][0].kind, plan.delete) == ("Service", ())
    world.spec["replicas"] = 1
    world.settle(least_ready=1)
    assert sorted(world.replicas_by_node().values()) == [0, 1]
    world.is_cached = True
    world.settle(least_ready=1)
    assert sorted(world.replicas_by_node().values()) == [1]


def test_suspended_service_has_no_pods() -> None:
    world = running({"a": 1, "b": 1}, 2)
    world.spec["suspend"] = True
    world.settle()
    assert (world.deployments, world.pods) == ({}, {})


def test_service_moves_between_one_volume_and_copies() -> None:
    world = running({"a": 2, "b": 2}, 2)
    world.cache = {}
    world.settle(least_ready=2)
    assert set(world.deployments) == {"chat"}
    world.cache = {"scope": "node", "storageClassName": "local"}
    world.settle(least_ready=2)
    assert world.replicas_by_node() == {"a": 1, "b": 1}


def test_model_without_a_copy_is_waited_for() -> None:
    world = SimulatedPods({"a": 1})
    plan = world.decide()
    assert list_applied(plan, DEPLOYMENTS) == []
    assert planned_condition(plan, "Ready")["reason"] == "Downloading"


def test_refusal_counts_once_no_pod_gives_room_any_more() -> None:
    """A pod that takes the place of another is refused until that has ended, which is no reason to move."""
    world = running({"a": 2, "b": 1}, 2)
    world.remove_copies("b")
    world.settle()
    world.add_copy("b")
    first, second = world.pods
    world.pods[first]["metadata"]["deletionTimestamp"] = (NOW + timedelta(seconds=30)).isoformat()
    refused = world.pods[second]
    refused["spec"], refused["status"] = {}, {"conditions": [REFUSED]}
    plan = world.decide()
    assert (world.replicas_by_node(), plan.again_seconds) == ({"a": 2}, 31)
    world.pods[first]["metadata"]["deletionTimestamp"] = (NOW - timedelta(seconds=1)).isoformat()
    plan = world.decide()
    assert (world.replicas_by_node(), plan.again_seconds) == ({"a": 2, "b": 1}, None)


COMPANIONS: list[tuple[str, Obj]] = [
    ("speculative.draftModelRef", {"speculative": {"draftModelRef": "other"}}),
    ("projectorModelRef", {"projectorModelRef": "other"}),
    ("adapters", {"adapters": [{"modelRef": "other"}]}),
]


@pytest.mark.parametrize(("field", "spec"), COMPANIONS, ids=[field for field, _spec in COMPANIONS])
def test_companion_with_copies_is_refused(field: str, spec: Obj) -> None:
    other = model(cache={"scope": "node", "storageClassName": "local"})
    other["metadata"] |= {"name": "other", "uid": "uid-other"}
    plan = decide_chat(chat_service(**spec), (MODELS, model()), (MODELS, other))
    ready = planned_condition(plan, "Ready")
    assert (ready["reason"], list_applied(plan, DEPLOYMENTS)) == ("InvalidSpec", [])
    assert ready["message"].startswith(f"{field} other has cache.scope node")
    on_hosts = decide_chat(chat_service(**spec, **METAL), (MODELS, model()), (MODELS, other))
    assert "cache.scope" not in planned_condition(on_hosts, "Ready")["message"], "hosts fetch by themselves"


def test_refused_pod_of_a_fetch_wakes_the_services_of_its_model() -> None:
    world = SimulatedPods({})
    world.make_copy("a")
    cluster = store(*world.list_objects())
    (waiting,) = [pod for pod in cluster.list(PODS) if pod["metadata"]["name"] == "fetch-a"]
    refused = {**waiting, "status": {"conditions": [REFUSED]}}
    pacer = UpdatePacer()
    kind = service_reconciler(plain_sources()._replace(pacer=pacer))
    woken = {
        key
        for trigger in kind.triggers
        if trigger.resource == PODS and trigger.concerns(waiting, refused)
        for key in trigger.keys(cluster, refused)
    }
    assert woken == {KEY}


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["decide", "run_deployments", "report", "schedule", "run_pods"])),
    st.tuples(st.just("room"), st.sampled_from("abc"), st.integers(0, 3)),
    st.tuples(st.just("copy"), st.sampled_from("abc"), st.sampled_from(["r1", "r2"])),
    st.tuples(st.just("edit"), st.sampled_from(["contextLength", "replicas"]), st.integers(1, 4)),
    st.tuples(st.just("revision"), st.sampled_from(["r1", "r2"])),
)


@given(st.lists(EVENTS, max_size=12))
def test_all_that_has_room_serves_in_the_end(events: list[tuple[str, ...]]) -> None:
    world = SimulatedPods({"a": 1, "b": 2, "c": 0}, replicas=2)
    for kind, *arguments in events:
        match kind, arguments:
            case "room", (node, room):
                world.rooms[node] = int(room)
            case "copy", (node, revision):
                world.remove_copies(node, revision)
                world.add_copy(node, revision)
            case "edit", (field, value):
                world.spec[field] = int(value) * (1024 if field == "contextLength" else 1)
            case "revision", (revision,):
                world.revision = revision
            case _:
                getattr(world, kind)()
    world.add_copy("b", world.revision)
    world.settle()
    wanted = {
        copy["node"] for copy in world.copies if copy["path"] == weights_path(SOURCE, world.revision, "tiny.gguf")
    }
    beyond = {node for node, count in world.count_pods().items() if count > world.rooms[node]}
    if not beyond:
        free = sum(world.rooms[node] for node in wanted)
        assert world.count_ready() >= min(world.spec["replicas"], free)
    assert world.count_ready() <= world.spec["replicas"]
