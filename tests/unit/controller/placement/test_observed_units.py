"""Units of the queue: what waits, runs and ends by the objects of the store, and what people can do to them."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.placement import observed_units
from controller.placement.observed_units import (
    LATE_SECONDS,
    MOST_GRACE_SECONDS,
    encode_nomination,
    observe_units,
    parse_nomination,
    read_nomination,
)
from controller.placement.process_units import MOST_ENDING_SECONDS
from controller.placement.queue_places import find_own_place, find_place, format_place
from controller.placement.units import HostRequirement, NodeRequirement, Nomination, Unit, UnitKey
from crds.meta import ADMITTED_AT, ENQUEUED_AT, MOVES, NOMINATED, POD_TEMPLATE
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, PODS, ObjectKey, Resource
from kube.store import Store
from tests.support.api_objects import GIB, NAMESPACE, NOW, as_process, condition, host, process, store
from tests.support.queue_objects import BORN, GPU, deployment_of, pinned, queue_pod, queued_service, timestamp
from tests.support.queue_units import node

MINUTE = timedelta(minutes=1)
OLD = "2026-11-21T11:30:00.000000Z"
LATER = NOW + timedelta(seconds=20)


def queue(*pods: Obj, deployed: bool = True, mark: str = "", **spec: Any) -> Store:
    deployments = [(DEPLOYMENTS, deployment_of(mark=mark))] if deployed else []
    return store((INFERENCE_SERVICES, queued_service(**spec)), *deployments, *((PODS, pod) for pod in pods))


def observe(known: Store) -> dict[str, Unit]:
    units = observe_units(known, VENDORS, NOW).units
    assert len({unit.uid for unit in units}) == len(units)
    return {unit.key.name: unit for unit in units}


def test_gated_pod_waits_with_its_requests_and_rules() -> None:
    pod = queue_pod("one", devices=2)
    pod["spec"] |= {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    store = queue(pod, queue_pod("two"), priority="high")
    units = observe(store)
    unit = units["one"]
    assert (unit.key, unit.uid, unit.state) == (UnitKey("pod", NAMESPACE, "one"), "uid-one", "waiting")
    assert (unit.service, unit.service_uid, unit.priority) == (ObjectKey(NAMESPACE, "chat"), "uid-chat", "high")
    assert dict(unit.parts[0]) == {"cpu": 1500, "memory": 4 * GIB, GPU: 2, "pods": 1}
    assert unit.pools == ("nvidia",)
    assert isinstance(unit.requirement, NodeRequirement)
    assert set(unit.requirement.pod_spec) == {"nodeSelector", "tolerations"}
    assert (unit.cells, unit.evictable_since, unit.nomination) == ((), None, None)
    assert unit.requirement.shape != units["two"].requirement.shape != ""


@pytest.mark.parametrize(("terms", "expected"), [(20, ""), (2000, "NodeRules")])
def test_pod_with_thousands_of_rules_matches_no_node(terms: int, expected: str) -> None:
    """Each node is compared with each rule: ten such pods of a tenant took minutes of each round of a large cluster."""
    chosen = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": [f"{number}"]}]} for number in range(terms)
    ]
    pod = queue_pod("one")
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": chosen}}
    pod["spec"]["affinity"] = {"nodeAffinity": required}
    assert observe(queue(pod))["one"].requirement.refuse(node("n", labels={"zone": "7"})) == expected


def test_nodes_of_volumes_are_followed_though_no_object_changes() -> None:
    pod = queue_pod("one")
    pod["spec"]["volumes"] = [{"persistentVolumeClaim": {"claimName": "weights"}}]
    store, asked, nodes = queue(pod, queue_pod("two")), list[str](), frozenset({"n1"})

    def find_nodes(each: Obj) -> frozenset[str] | None:
        asked.append(each["metadata"]["name"])
        return nodes

    def read() -> dict[str, Unit]:
        units = observe_units(store, VENDORS, NOW, find_volume_nodes=find_nodes).units
        return {unit.key.name: unit for unit in units}

    first = read()
    assert isinstance(first["one"].requirement, NodeRequirement)
    assert isinstance(first["two"].requirement, NodeRequirement)
    assert (first["one"].requirement.volume_nodes, first["two"].requirement.volume_nodes) == (nodes, None)
    assert read()["one"] is first["one"], "kept while the nodes stay the same"
    nodes = frozenset({"n2"})
    moved = read()["one"]
    assert isinstance(moved.requirement, NodeRequirement)
    assert (moved.requirement.volume_nodes, moved.requirement.shape) != (
        frozenset({"n1"}),
        first["one"].requirement.shape,
    )
    assert set(asked) == {"one"}, "only pods that mount a claim"


def test_pool_is_that_of_the_devices_that_a_pod_requests() -> None:
    for stated in ("nvidia", "amd", "metal", "unknown"):
        assert observe(queue(queue_pod("one"), hardware={"accelerator": stated}))["one"].pools == ("nvidia",)
    without = queue(queue_pod("one", devices=0), hardware={"accelerator": "amd"})
    assert observe(without)["one"].pools == ("amd",)


def test_pods_with_equal_rules_have_one_shape() -> None:
    units = observe(queue(queue_pod("one"), queue_pod("two", devices=4)))
    assert units["one"].requirement.shape == units["two"].requirement.shape


def test_pod_that_another_gate_holds_is_known() -> None:
    held = queue_pod("held")
    held["spec"]["schedulingGates"].append({"name": "example.com/licence"})
    units = observe(queue(held, queue_pod("free")))
    assert {name: unit.has_other_gate for name, unit in units.items()} == {"held": True, "free": False}


def test_admitted_pod_runs_where_it_is_bound_or_pinned() -> None:
    bound = queue_pod("bound", gated=False, node="n1")
    reserved = pinned(queue_pod("reserved", gated=False), "n2", "n2")
    torn = pinned(queue_pod("torn", gated=False), "n2", "n3")
    units = observe(queue(bound, reserved, torn, queue_pod("free", gated=False)))
    cells = {name: unit.cells for name, unit in units.items()}
    assert cells == {"bound": ("node/n1",), "reserved": ("node/n2",), "torn": (), "free": ()}
    assert {unit.state for unit in units.values()} == {"running"}
    assert units["bound"].evictable_since == (NOW + MINUTE).timestamp()
    assert units["reserved"].evictable_since is None


@pytest.mark.parametrize(
    ("spec", "is_protected"),
    [
        ({}, False),
        ({"scheduling": {"mode": "Native"}}, True),
        ({"scheduling": {"mode": "Queue"}}, False),
        ({"evictionProtection": True}, True),
    ],
)
def test_pod_is_evicted_only_for_a_service_of_the_queue(spec: Obj, is_protected: bool) -> None:
    cluster = queue(queue_pod("one", gated=False, node="n1"), queue_pod("two"), **spec)
    units = observe(cluster)
    assert units["one"].is_protected is is_protected
    assert units["two"].is_protected is bool(spec.get("evictionProtection"))
    other = observe_units(cluster, VENDORS, NOW, is_queued_by_default=False).units
    assert other[0].is_protected is (is_protected or not spec)


def test_pod_without_gate_and_device_is_no_unit() -> None:
    plain = queue_pod("plain", gated=False, devices=0)
    ended = queue_pod("ended", gated=False, node="n1")
    ended["status"]["phase"] = "Failed"
    assert observe(queue(plain, ended, queue_pod("gated", devices=0))).keys() == {"gated"}


def test_pod_that_claims_to_be_of_a_service_is_no_unit() -> None:
    foreign = queue_pod("foreign", template="bbb")
    foreign["metadata"]["ownerReferences"][0]["name"] = "other-bbb"
    lone = queue_pod("lone")
    del lone["metadata"]["ownerReferences"]
    unlabelled = queue_pod("unlabelled")
    del unlabelled["metadata"]["labels"]["pod-template-hash"]
    assert observe(queue(foreign, lone, unlabelled)) == {}
    assert observe(queue(queue_pod("orphan"), deployed=False)) == {}


def test_pod_that_ends_is_a_unit_without_its_service() -> None:
    cluster = store((PODS, queue_pod("one", gated=False, node="n1", deleted=LATER)))
    unit = observe(cluster)["one"]
    assert (unit.state, unit.cells, unit.service_uid) == ("ending", ("node/n1",), "")


def test_unit_that_drains_tells_until_when() -> None:
    """A process has the time that its service states, and then a while to end its engine."""
    stopping = process("one", host="mac", deletionTimestamp=timestamp(NOW), drainSeconds=300)
    cluster = store((PODS, queue_pod("two", gated=False, node="n1", deleted=LATER)), (METAL_PROCESSES, stopping))
    units = observe(cluster)
    assert units["two"].ends_by == LATER.timestamp()
    assert units["one"].ends_by == NOW.timestamp() + 300 + MOST_ENDING_SECONDS


def test_pod_that_does_not_end_in_time_makes_no_room() -> None:
    late = NOW - timedelta(seconds=LATE_SECONDS + 1)
    units = observe(queue(queue_pod("soon", deleted=LATER), queue_pod("late", deleted=late)))
    assert (units["soon"].state, units["late"].state, units["late"].is_protected) == ("ending", "running", True)


def test_pod_that_ends_in_the_distant_future_makes_no_room_before() -> None:
    """Whoever deletes a pod chooses its grace period: others would wait for it, and have nobody else evicted."""
    store = queue(queue_pod("endless", gated=False, node="n1", deleted=NOW + timedelta(days=100)))
    early = observe_units(store, VENDORS, NOW)
    (unit,) = early.units
    assert (unit.state, unit.is_protected, unit.cells) == ("running", True, ("node/n1",))
    assert early.again_seconds is not None
    (later,) = observe_units(store, VENDORS, NOW + timedelta(seconds=early.again_seconds)).units
    assert later.state == "ending"
    assert early.again_seconds == timedelta(days=100).total_seconds() - MOST_GRACE_SECONDS


@pytest.mark.parametrize(
    ("named", "expected"),
    [(["nope", "nvidia"], ("nvidia", "nope")), (["nope"], ("nope",)), (["nope", "amd", "nvidia"], ("nvidia", "nope"))],
)
def test_pool_that_does_not_exist_is_no_home(named: list[str], expected: tuple[str, ...]) -> None:
    """As a home, it had no limit; and a round considers a number of units of each home."""
    assert observe(queue(queue_pod("one"), scheduling={"pools": named}))["one"].pools == expected


def ended(pod: Obj) -> Obj:
    return {**pod, "status": {"phase": "Succeeded"}}


@pytest.mark.parametrize(
    ("pod", "holds"),
    [
        pytest.param(queue_pod("one", gated=False), False, id="never gated, and not bound"),
        pytest.param(queue_pod("one", deleted=BORN), False, id="finalizer of a pod that waited"),
        pytest.param(
            ended(queue_pod("one", gated=False, node="n1", deleted=BORN)), False, id="finalizer of one that ran"
        ),
        pytest.param(
            queue_pod("one", gated=False, deleted=BORN, annotations={ENQUEUED_AT: OLD}),
            False,
            id="finalizer without node",
        ),
        pytest.param(queue_pod("one", gated=False, annotations={ENQUEUED_AT: OLD}), True, id="admitted for a new node"),
        pytest.param(pinned(queue_pod("one", gated=False), "n1"), True, id="admitted"),
        pytest.param(queue_pod("one", gated=False, node="n1"), True, id="bound"),
    ],
)
def test_pod_that_can_take_no_device_uses_up_no_limit_of_others(pod: Obj, holds: bool) -> None:
    """A tenant makes thousands of such pods: each would count in the limits of a pool, for ever."""
    unit = observe(queue(pod))["one"]
    assert (unit.pools, unit.parts[0].get(GPU, 0)) == ((("nvidia",), 1) if holds else ((), 0))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("2026-11-21T11:30:00Z", "2026-11-21T11:30:00.000000Z"),
        ("2026-11-21T12:30:00+01:00", "2026-11-21T11:30:00.000000Z"),
        ("1970-01-01T00:00:00Z", format_place(BORN.timestamp())),
        ("9999-12-31T23:59:59Z", None),
        ("0001-01-01T00:00:00+14:00", None),
        ("2026-11-21T11:30:00", None),
        ("soon", None),
        ("", None),
    ],
)
def test_edited_annotation_moves_no_unit_before_its_service(stated: str, expected: str | None) -> None:
    pod = queue_pod("one", annotations={ENQUEUED_AT: stated})
    place = observe(queue(pod))["one"].enqueued_at
    assert format_place(place) == (expected or format_place(find_own_place(pod)))
    assert NOW.timestamp() <= find_own_place(pod) < NOW.timestamp() + 1


@given(stated=st.text() | st.datetimes().map(lambda moment: moment.isoformat() + "Z"))
def test_place_lies_between_service_and_pod(stated: str) -> None:
    pod = queue_pod("one", annotations={ENQUEUED_AT: stated})
    assert BORN.timestamp() <= find_place(pod, BORN.timestamp()) <= find_own_place(pod)


def test_processes_wait_run_and_end() -> None:
    cluster = store(
        (INFERENCE_SERVICES, queued_service(priority="low")),
        (METAL_PROCESSES, process("chat-1-0", gib=4)),
        (METAL_PROCESSES, process("chat-1-1", host="mac-1", annotations={ADMITTED_AT: timestamp(NOW)})),
        (METAL_PROCESSES, process("chat-1-2", host="mac-2", deletionTimestamp=timestamp(NOW))),
        (METAL_PROCESSES, process("chat-1-3", host="mac-3", phase="Rejected")),
        (METAL_PROCESSES, process("chat-1-4", host="mac-4", phase="Stopped")),
        (METAL_PROCESSES, process("chat-1-5", deletionTimestamp=timestamp(NOW))),
        (METAL_PROCESSES, process("chat-1-6", host="mac-6", phase="Stopped", deletionTimestamp=timestamp(NOW))),
        (METAL_PROCESSES, process("chat-1-7", host="mac-7", creationTimestamp=timestamp(NOW - MINUTE))),
    )
    units = observe(cluster)
    states = {name: (unit.state, unit.cells) for name, unit in units.items()}
    assert states == {
        "chat-1-0": ("waiting", ()),
        "chat-1-1": ("running", ("host/mac-1",)),
        "chat-1-2": ("ending", ("host/mac-2",)),
        "chat-1-7": ("running", ("host/mac-7",)),
    }
    waiting = units["chat-1-0"]
    assert waiting.avoid == {"host/mac-3", "host/mac-4"}, "what its host stopped by itself would be stopped there again"
    assert (waiting.parts, waiting.pools, waiting.priority) == (({"memory": 4 * GIB},), ("metal",), "low")
    assert waiting.requirement == HostRequirement("llama.cpp", NAMESPACE)
    assert units["chat-1-1"].evictable_since == NOW.timestamp()
    bound_by_hand = units["chat-1-7"].evictable_since
    assert bound_by_hand == pytest.approx((NOW - MINUTE).timestamp(), abs=1.0), "nobody noted its admission"


def test_priority_that_this_version_does_not_know_is_that_of_most() -> None:
    assert observe(queue(queue_pod("one"), priority="urgent"))["one"].priority == "normal"


def test_host_that_displaces_a_process_is_avoided_and_its_process_replaced() -> None:
    displaced = process("chat-1-0", host="mac-1", phase="Ready", conditions=[condition("DisruptionTarget", "True")])
    cluster = store(
        (INFERENCE_SERVICES, queued_service()),
        (METAL_PROCESSES, displaced),
        (METAL_PROCESSES, process("chat-1-1")),
        (METAL_PROCESSES, process("chat-2-0", modelName="other")),
    )
    units = observe(cluster)
    assert units["chat-1-1"].avoid == {"host/mac-1"}
    assert units["chat-2-0"].avoid == frozenset()
    cluster = store(
        (INFERENCE_SERVICES, queued_service()),
        *((METAL_PROCESSES, replica) for replica in (displaced, process("chat-1-1"))),
    )
    assert observe(cluster)["chat-1-1"].replaces == {"uid-chat-1-0"}


@pytest.mark.parametrize(
    ("host_spec", "annotations"),
    [
        ({"drain": True}, {}),
        ({"taints": [{"key": "dedicated", "effect": "NoExecute"}]}, {}),
        ({}, {MOVES: "uid-chat-1-0"}),
    ],
)
def test_process_that_is_drained_tainted_or_moved_away_is_replaced_in_the_queue_too(
    host_spec: Obj, annotations: Obj
) -> None:
    cluster = store(
        (INFERENCE_SERVICES, queued_service()),
        (METAL_HOSTS, host("mac-1") | {"spec": host_spec}),
        (METAL_PROCESSES, process("chat-1-0", host="mac-1", phase="Ready")),
        (METAL_PROCESSES, process("chat-1-1", annotations=annotations)),
    )
    unit = observe(cluster)["chat-1-1"]
    assert unit.replaces == {"uid-chat-1-0"}
    assert unit.avoid == {"host/mac-1"}


def test_process_of_a_better_estimate_replaces_none() -> None:
    running = process("chat-1-0", host="mac-1", phase="Ready", creationTimestamp=timestamp(BORN))

    def replaced(**fields: Any) -> frozenset[str]:
        waiting = process("chat-2-0", **fields)
        objects = ((METAL_PROCESSES, replica) for replica in (running, waiting))
        return observe(store((INFERENCE_SERVICES, queued_service()), *objects))["chat-2-0"].replaces

    assert replaced(gib=2) == frozenset()
    assert replaced(artifact=running["spec"]["artifact"] | {"mirrors": ["http://mirror.example/"]}) == frozenset()
    assert replaced(artifact={"source": "http://models.example/new.gguf"}) == {"uid-chat-1-0"}


def test_running_pod_is_replaced_by_one_waiting_pod() -> None:
    running = [queue_pod(f"old-{n}", gated=False, node="n1", created=NOW - MINUTE) for n in range(3)]
    waiting = [queue_pod(f"new-{n}", template="bbb") for n in range(2)]
    units = observe(queue(*running, *waiting))
    first, second = units["new-0"].replaces, units["new-1"].replaces
    assert first | second == {"uid-old-0", "uid-old-1", "uid-old-2"}
    assert not first & second
    assert not any(units[pod["metadata"]["name"]].replaces for pod in running)
    for victim in ("uid-old-0", "uid-old-1", "uid-old-2"):
        promise = {NOMINATED: encode_nomination(Nomination(("node/n1",), frozenset({victim})))}
        nominated = queue_pod("new-1", template="bbb", annotations=promise)
        assert victim in observe(queue(*running, waiting[0], nominated))["new-1"].replaces


def test_nomination_is_read_as_it_was_written() -> None:
    nomination = Nomination(("node/n1", "node/n1"), frozenset({"a", "b"}))
    pod = queue_pod("one", annotations={NOMINATED: encode_nomination(nomination)})
    assert parse_nomination(pod) == nomination
    assert observe(queue(pod))["one"].nomination == nomination
    assert read_nomination(as_process(process("one", annotations={NOMINATED: encode_nomination(nomination)}))) is None
    hosted = Nomination(("host/mac-1",), frozenset())
    assert read_nomination(as_process(process("one", annotations={NOMINATED: encode_nomination(hosted)}))) == hosted


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", "{}", '{"cells": []}', '{"cells": ["n1"]}', '{"cells": ["node/"]}', '{"cells": "node/n1"}',
     '{"cells": ["node/n1", "host/mac-1"]}', '{"cells": ["node/n1"], "victims": [1]}', "\ud800", "[" * 100_000],
)  # fmt: skip
def test_damaged_nomination_is_none(text: str) -> None:
    pod = queue_pod("one", annotations={NOMINATED: text})
    assert parse_nomination(pod) is None
    assert observe(queue(pod))["one"].nomination is None


def count_computations(known: Store, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return how often one round reads an object anew, or a service as a whole."""
    counts = {"build_pod_replica": 0, "build_process_replica": 0, "assign_places": 0}
    with monkeypatch.context() as patched:
        for name in counts:
            real = getattr(observed_units, name)

            def counted(*args: Any, name: str = name, real: Any = real) -> Any:
                counts[name] += 1
                return real(*args)

            patched.setattr(observed_units, name, counted)
        observe_units(known, VENDORS, NOW)
    return counts


def test_round_reads_only_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    objects: list[tuple[Resource, Obj]] = []
    for number in range(50):
        name = f"chat-{number}"
        objects += [(INFERENCE_SERVICES, queued_service(name)), (DEPLOYMENTS, deployment_of(name))]
        objects += [(PODS, queue_pod(f"{name}-{index}", service=name)) for index in range(4)]
        bound = process(f"{name}-1-0", host="mac-1")
        bound["metadata"]["ownerReferences"][0] |= {"name": name, "uid": f"uid-{name}"}
        objects.append((METAL_PROCESSES, bound))
    cluster = store(*objects)
    first = count_computations(cluster, monkeypatch)
    assert first == {"build_pod_replica": 200, "build_process_replica": 50, "assign_places": 50}
    nothing = dict.fromkeys(first, 0)
    assert count_computations(cluster, monkeypatch) == nothing
    cluster.put(PODS, queue_pod("chat-7-1", service="chat-7", gated=False, node="n1", version=2))
    assert count_computations(cluster, monkeypatch) == nothing | {"build_pod_replica": 1, "assign_places": 1}
    # The status of a service changes all the time, and moves nothing in the queue.
    reported = queued_service("chat-7") | {"status": {"observedGeneration": 1, "phase": "WaitingForGPU"}}
    reported["metadata"]["resourceVersion"] = "2"
    cluster.put(INFERENCE_SERVICES, reported)
    assert count_computations(cluster, monkeypatch) == nothing
    raised = queued_service("chat-7", priority="high")
    raised["metadata"]["resourceVersion"] = "3"
    cluster.put(INFERENCE_SERVICES, raised)
    changed = {"build_pod_replica": 4, "build_process_replica": 1, "assign_places": 1}
    assert count_computations(cluster, monkeypatch) == changed
    assert {unit.priority for unit in observe_units(cluster, VENDORS, NOW).units if unit.service.name == "chat-7"} == {
        "high"
    }


def test_pod_of_an_earlier_template_gets_nothing_while_one_of_the_present_template_waits() -> None:
    earlier, later = queue_pod("earlier"), queue_pod("later", template="bbb", created=LATER)
    units = observe(queue(earlier, later))
    assert (units["earlier"].is_superseded, units["later"].is_superseded) == (True, False)
    running = queue_pod("later", template="bbb", created=LATER, gated=False, node="n1")
    units = observe(queue(earlier, running, replicas=2))
    assert not units["earlier"].is_superseded, "it serves until the rollout reaches it"


def test_pod_of_an_earlier_template_gets_nothing_once_all_replicas_have_a_place() -> None:
    """A preemptor that was edited cost another service its place after the pod of its later spec had got one."""
    marks = {POD_TEMPLATE: "later"}
    later = queue_pod("later", template="bbb", created=LATER, gated=False, node="n1", annotations=marks)
    units = observe(queue(queue_pod("earlier"), later, mark="later", replicas=1))
    assert units["earlier"].is_superseded


def test_pod_that_time_alone_calls_earlier_is_not_given_up_for_one_that_runs() -> None:
    """The template of the pod that waits may be the later one of two that were made in one second."""
    runs = queue_pod("runs", template="bbb", created=LATER, gated=False, node="n1")
    assert not observe(queue(queue_pod("waits"), runs, replicas=1))["waits"].is_superseded


def test_pod_finds_its_deployment_among_others_with_like_names() -> None:
    names = ("chat", "chat-1", "chat-10", "chat-2", "chats")
    pods = [queue_pod(f"of-{name}") for name in names]
    for pod, name in zip(pods, names, strict=True):
        pod["metadata"]["ownerReferences"][0]["name"] = f"{name}-aaa"
    for made in (names, names[::2], ("chat-10",)):
        cluster = store(
            (INFERENCE_SERVICES, queued_service()),
            *((DEPLOYMENTS, deployment_of(name=name)) for name in made),
            *((PODS, pod) for pod in pods),
        )
        assert observe(cluster).keys() == {f"of-{name}" for name in made}


def test_replica_that_replaces_a_slow_one_goes_to_a_better_place_and_makes_nobody_end() -> None:
    chat = queued_service(priority="high")
    replacement = {"uid": "uid-old", "fromPlace": "node/gpu-1", "leastTokensPerSecond": "57.1"}
    chat["status"] |= {
        "replacement": replacement,
        "speeds": [{"deviceClass": "nvidia-h100x1", "tokensPerSecond": "140"}],
    }
    pods = [(PODS, queue_pod("old", gated=False, node="gpu-1")), (PODS, queue_pod("new"))]
    units = observe(store((INFERENCE_SERVICES, chat), (DEPLOYMENTS, deployment_of()), *pods))
    new, old = units["new"], units["old"]
    assert (new.priority, old.priority) == ("batch", "high")
    assert (sorted(new.avoid), old.avoid) == (["node/gpu-1"], frozenset())
    assert [new.speeds.refuse(name) for name in ("nvidia-h100x1", "other")] == ["", "NotFaster"]
    assert new.is_last
    assert not new.replaces, "the old one is not ended for it"
    over = {**chat, "status": chat["status"] | {"replacement": replacement | {"endedAt": timestamp(NOW)}}}
    units = observe(store((INFERENCE_SERVICES, over), (DEPLOYMENTS, deployment_of()), *pods))
    assert (units["new"].priority, units["new"].avoid) == ("high", frozenset())
