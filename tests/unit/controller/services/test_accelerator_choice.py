"""Services that may use several accelerators: what is chosen by spec and room, and the objects that follow."""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from controller.placement.candidate_room import CandidateRoom, ProspectiveReplica
from controller.placement.choice import BETTER_SECONDS, SETTLE_SECONDS
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Plan, Snapshot
from controller.services.accelerator_choice import ChosenAccelerators, choose_accelerators
from crds.meta import LABEL_ACCELERATOR
from crds.placement import ClassSpeed
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    ObjectKey,
    Resource,
)
from kube.time import rfc3339
from tests.support.api_objects import (
    GIB,
    NOW,
    as_service,
    host,
    model,
    planned_condition,
    pool,
    process,
    service,
    slice_of,
    store,
)
from tests.support.service_decisions import KEY, SETTINGS, chat_pod, decide_chat, list_applied, manage

Objects = Iterable[tuple[Resource, Obj]]
AUTO: dict[str, Any] = {"hardware": {"accelerator": "auto"}}
NO_NODE = CandidateRoom(0, could_run=False, lack="no node has such a device")
NAME = f"chat-{hashlib.sha256(b'nvidia').hexdigest()[:8]}"
"""Name of the Deployment of a service that may use several accelerators; a readable one could be that of a service."""
FULL = CandidateRoom(0, could_run=True, lack="too little is free")


class StatedRooms:
    """The room that a test states for each accelerator; there is no node of any other one."""

    def __init__(self, free_seconds: float = 0.0, **rooms: CandidateRoom | int | None) -> None:
        self._rooms, self._free_seconds = rooms, free_seconds
        self.prospects: dict[str, ProspectiveReplica] = {}
        self.followed: set[str] = set()

    def count(self, prospect: ProspectiveReplica) -> CandidateRoom | None:
        self.prospects[prospect.unit.pools[0]] = prospect
        room = self._rooms.get(prospect.unit.pools[0], NO_NODE)
        return CandidateRoom(room, could_run=True) if isinstance(room, int) else room

    def follow(self, service: ObjectKey, prospects: Mapping[str, ProspectiveReplica]) -> None:
        assert service == KEY
        self.followed = set(prospects)

    def free_seconds(self, service: ObjectKey, accelerator: str) -> float:
        assert service == KEY
        return self._free_seconds if accelerator in self.followed else 0.0


def choose(
    chat: Obj,
    rooms: StatedRooms | None,
    *objects: tuple[Resource, Obj],
    of: Obj | None = None,
    settings: PodSettings = SETTINGS,
) -> ChosenAccelerators | None:
    """Return the choice for a service; `of` is its Model."""
    cluster = store((INFERENCE_SERVICES, chat), (MODELS, of or model()), *objects)
    return choose_accelerators(Snapshot(cluster, NOW), as_service(chat), settings, rooms)


def replicas(chosen: ChosenAccelerators | None) -> dict[str, int]:
    """Return the replicas of each accelerator that has some."""
    assert chosen is not None
    return {share.accelerator: share.replicas for share in chosen.shares if share.replicas}


def with_choice(chat: Obj, chosen: ChosenAccelerators | None) -> Obj:
    """Return a service with a choice in its status."""
    assert chosen is not None
    return chat | {"status": chat["status"] | {"choice": msgspec.to_builtins(chosen.status)}}


def decide(chosen: ChosenAccelerators | None, *objects: tuple[Resource, Obj], of: Obj | None = None) -> Plan:
    """Return the plan for a service that has a choice."""
    return decide_chat((MODELS, of or model()), *objects, accelerator_choice=chosen)


def test_single_accelerator_is_no_choice() -> None:
    assert choose(service(hardware={"accelerator": "nvidia"}), StatedRooms(nvidia=1)) is None
    assert choose(service(), StatedRooms()) is None
    pools: Obj = {"scheduling": {"pools": ["nvidia"]}}
    assert choose(service(**pools), StatedRooms(), of=model(hardware={"accelerator": "nvidia"})) is None


def test_auto_compares_all_accelerators_and_says_why_others_are_refused() -> None:
    rooms = StatedRooms(nvidia=1, metal=5)
    chosen = choose(service(replicas=3, **AUTO), rooms)
    assert replicas(chosen) == {"nvidia": 1, "metal": 2}
    assert chosen is not None
    assert chosen.accelerator == "nvidia,metal"
    assert chosen.status.message.startswith("1 on nvidia, 2 on metal; amd: no node has such a device; intel-gaudi: ")
    assert [share.accelerator for share in chosen.shares] == ["nvidia", "amd", "intel-gaudi", "intel", "metal"]
    needs = {name: dict(prospect.unit.parts[0]) for name, prospect in rooms.prospects.items()}
    assert needs["nvidia"]["nvidia.com/gpu"] == 1
    assert needs["metal"]["memory"] > GIB


def room(replicas: int, tokens_per_second: float) -> CandidateRoom:
    return CandidateRoom(replicas, could_run=True, tokens_per_second=tokens_per_second)


def test_auto_takes_the_fastest_accelerator_with_room_and_says_the_speed_of_others() -> None:
    rooms = StatedRooms(nvidia=room(5, 24.4), amd=room(0, 0.0), metal=room(1, 51.0))
    chosen = choose(service(replicas=2, **AUTO), rooms)
    assert replicas(chosen) == {"metal": 1, "nvidia": 1}
    assert chosen is not None
    assert chosen.status.message.startswith("1 on metal (51.0 tokens/s), 1 on nvidia (24.4 tokens/s)")
    alone = choose(service(**AUTO), rooms)
    assert alone is not None
    assert alone.status.message.startswith("1 on metal (51.0 tokens/s); nvidia: 24.4 tokens/s there; ")
    assert [share.accelerator for share in alone.shares][:2] == ["metal", "nvidia"]


def test_faster_accelerator_moves_no_replica_that_runs() -> None:
    slow, fast = room(5, 24.0), room(5, 90.0)
    chosen = choose(service(**AUTO), StatedRooms(nvidia=slow))
    later = choose(with_choice(service(**AUTO), chosen), StatedRooms(nvidia=slow, metal=fast))
    assert replicas(later) == {"nvidia": 1}


def test_pools_outrank_speed() -> None:
    chat = service(scheduling={"pools": ["nvidia", "metal"]})
    assert replicas(choose(chat, StatedRooms(nvidia=room(1, 5.0), metal=room(1, 90.0)))) == {"nvidia": 1}


def test_speeds_of_all_accelerators_are_listed_and_decide_about_places() -> None:
    rooms = StatedRooms(nvidia=1, metal=1)
    cluster = store((INFERENCE_SERVICES, chat := service(**AUTO)), (MODELS, model()))

    def find_speeds(
        _key: ObjectKey, _service: object, accelerator: str | None, _served: object
    ) -> tuple[ClassSpeed, ...]:
        speed = ClassSpeed(device_class=f"{accelerator}-x1", tokens_per_second="20")
        return (msgspec.structs.replace(speed, refusal="TooSlow") if accelerator == "metal" else speed,)

    accelerators = choose_accelerators(
        Snapshot(cluster, NOW), as_service(chat), SETTINGS, rooms, find_speeds=find_speeds
    )
    assert accelerators is not None
    assert {speed.device_class for speed in accelerators.speeds} >= {"nvidia-x1", "metal-x1"}
    assert rooms.prospects["metal"].unit.speeds.refusals == {"metal-x1": "TooSlow"}
    assert rooms.prospects["nvidia"].unit.speeds.tokens_per_second == {"nvidia-x1": 20.0}


def test_pools_of_several_accelerators_are_used_in_their_order() -> None:
    chat = service(replicas=3, scheduling={"pools": ["metal", "team-a", "nvidia"]})
    team_a = (ACCELERATOR_POOLS, pool("team-a", nodeSelector={"team": "a"}))
    rooms = StatedRooms(metal=1, **{"team-a": 5})
    assert replicas(choose(chat, rooms, team_a)) == {"metal": 1, "nvidia": 2}
    assert rooms.prospects["team-a"].unit.pools == ("team-a", "nvidia")


def test_accelerator_that_the_spec_contradicts_is_refused_with_the_reason() -> None:
    chat = service(hardware={"accelerator": "auto", "count": 2}, scheduling={"pools": ["metal", "nvidia"]})
    chosen = choose(chat, StatedRooms(metal=9, nvidia=FULL))
    assert chosen is not None
    assert replicas(chosen) == {"nvidia": 1}
    assert "metal: hardware.count is 2, but accelerator metal has no devices: remove it" in chosen.status.message


def test_nodes_are_refused_if_pods_go_by_the_scheduler() -> None:
    native = PodSettings("pomona:test", scheduling_mode="Native")
    chosen = choose(service(**AUTO), StatedRooms(nvidia=1, metal=1), settings=native)
    assert replicas(chosen) == {"metal": 1}, "hosts always go by the queue"
    assert chosen is not None
    assert "nvidia: its pods do not go by the queue, which alone knows the room: set" in chosen.status.message


def test_spec_that_no_accelerator_can_hold_names_all_reasons() -> None:
    chat = service(
        hardware={"accelerator": "auto", "resource": "amd.com/gpu"}, scheduling={"pools": ["metal", "nvidia"]}
    )
    chosen = choose(chat, StatedRooms())
    reason, message = ready_of(decide(chosen, (INFERENCE_SERVICES, chat)))
    assert reason == "NoAccelerator"
    assert "metal: hardware.resource is amd.com/gpu, but accelerator metal has no devices" in message
    assert "nvidia: hardware.resource amd.com/gpu is none of accelerator nvidia" in message


def ready_of(plan: Plan) -> tuple[str, str]:
    condition = planned_condition(plan, "Ready")
    return condition["reason"], condition["message"]


def test_problem_of_the_model_is_reported_once() -> None:
    chat = service(modelRef="other", **AUTO)
    chosen = choose(chat, StatedRooms())
    plan = decide(chosen, (INFERENCE_SERVICES, chat))
    assert ready_of(plan)[0] == planned_condition(plan, "ModelReady")["reason"] == "ModelNotFound"


def test_unknown_pool_stops_nothing_that_was_chosen() -> None:
    chat = service(replicas=2, scheduling={"pools": ["metal", "nvidia"]})
    before = choose(chat, StatedRooms(metal=2))
    chat["spec"]["scheduling"] = {"pools": ["metal", "nvidia", "team-b"]}
    chosen = choose(with_choice(chat, before), StatedRooms(metal=2))
    assert chosen is not None
    assert chosen.problem is not None
    assert (replicas(chosen), chosen.problem.reason) == ({"metal": 2}, "UnknownPool")


def test_controller_without_the_queue_chooses_nothing() -> None:
    chosen = choose(service(**AUTO), None)
    assert chosen is not None
    assert chosen.problem is not None
    assert chosen.problem.reason == "QueueOutOfScope"


def test_last_choice_stays_until_the_first_round_of_a_new_leader() -> None:
    chat = service(replicas=3, **AUTO)
    chosen = choose(chat, StatedRooms(nvidia=None, metal=None))
    assert chosen is not None
    assert chosen.problem is not None
    assert (chosen.problem.reason, chosen.shares) == ("Choosing", [])
    before = choose(chat, StatedRooms(nvidia=1, metal=2))
    assert replicas(choose(with_choice(chat, before), StatedRooms(nvidia=None, metal=None))) == replicas(before)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"priority": "high"}, {"metal": 1}),
        ({"evictionProtection": True}, {"metal": 1}),
        ({"replicas": 2}, {"metal": 1, "nvidia": 1}),
        ({"suspend": True}, {}),
        ({"contextLength": 2048}, {"nvidia": 1}),
    ],
    ids=str,
)
def test_choice_is_kept_until_the_spec_changes(edit: Obj, expected: dict[str, int]) -> None:
    chat = service(replicas=1, **AUTO)
    before = choose(chat, StatedRooms(metal=1))
    chat = with_choice(chat, before)
    chat["spec"] |= edit
    chosen = choose(chat, StatedRooms(nvidia=1, metal=0))
    assert replicas(chosen) == expected
    assert before is not None
    assert chosen is not None
    assert (chosen.inputs == before.inputs) == ("contextLength" not in edit), "a replica returns to where it was"


@pytest.mark.parametrize(
    ("spec", "expected"), [({"scheduling": {"pools": ["nvidia", "metal"]}}, "nvidia"), (AUTO, "metal")], ids=str
)
def test_replica_moves_to_an_earlier_accelerator_only_if_the_service_orders_them(spec: Obj, expected: str) -> None:
    chat = service(**spec)
    chosen = choose(chat, StatedRooms(metal=1))
    name = decide(chosen, (INFERENCE_SERVICES, chat), (METAL_HOSTS, host())).create[0][1]["metadata"]["name"]
    serving = (METAL_PROCESSES, process(name, host="studio-1", phase="Ready")), (METAL_HOSTS, host())
    rooms = StatedRooms(BETTER_SECONDS, nvidia=1, metal=FULL)
    rooms.followed = {"nvidia"}
    moved = choose(with_choice(chat, chosen), rooms, *serving, (ENDPOINT_SLICES, slice_of("chat", "studio-1")))
    assert replicas(moved) == {expected: 1}


def test_one_service_makes_a_deployment_and_processes_behind_one_service() -> None:
    chat = service(replicas=3, **AUTO)
    plan = decide(choose(chat, StatedRooms(nvidia=1, metal=2)), (INFERENCE_SERVICES, chat), (METAL_HOSTS, host()))
    (made,) = list_applied(plan, DEPLOYMENTS)
    assert (made["metadata"]["name"], made["spec"]["replicas"]) == (NAME, 1)
    assert made["metadata"]["labels"][LABEL_ACCELERATOR] == "nvidia"
    assert made["spec"]["selector"]["matchLabels"][LABEL_ACCELERATOR] == "nvidia"
    assert made["spec"]["template"]["metadata"]["labels"][LABEL_ACCELERATOR] == "nvidia"
    assert len(plan.create) == 2
    assert plan.status is not None
    assert plan.status["accelerator"] == "nvidia,metal"


def nvidia_deployment(replicas: int = 1) -> tuple[Resource, Obj]:
    """Return the Deployment of a service for NVIDIA alone, without a label."""
    chat = service(replicas=replicas, hardware={"accelerator": "nvidia"})
    (made,) = list_applied(decide_chat((INFERENCE_SERVICES, chat), (MODELS, model())), DEPLOYMENTS)
    assert LABEL_ACCELERATOR not in made["spec"]["template"]["metadata"]["labels"]
    return DEPLOYMENTS, manage(made) | {"status": {"observedGeneration": 1, "replicas": replicas}}


def placed_pod(name: str = "chat-1", age_seconds: float = 0.0, *, node: str = "gpu-1") -> tuple[Resource, Obj]:
    """Return a pod on a node, or one that waits."""
    pod = chat_pod(name, ready=bool(node))
    pod["metadata"]["creationTimestamp"] = rfc3339(NOW - timedelta(seconds=age_seconds))
    return PODS, pod | {"spec": {"nodeName": node} if node else {}}


def test_edit_to_auto_keeps_the_pods_that_run() -> None:
    chat, objects = service(**AUTO), [nvidia_deployment(), placed_pod()]
    chosen = choose(chat, StatedRooms(nvidia=FULL), *objects)
    assert replicas(chosen) == {"nvidia": 1}
    plan = decide(chosen, (INFERENCE_SERVICES, chat), *objects)
    assert [deployment["metadata"]["name"] for deployment in list_applied(plan, DEPLOYMENTS)] == ["chat"]
    assert plan.delete == ()


def test_edit_from_auto_to_its_accelerator_keeps_the_label() -> None:
    auto = service(**AUTO)
    chosen = choose(auto, StatedRooms(nvidia=1))
    (made,) = list_applied(decide(chosen, (INFERENCE_SERVICES, auto)), DEPLOYMENTS)
    chat = service(hardware={"accelerator": "nvidia"})
    plan = decide_chat((INFERENCE_SERVICES, chat), (MODELS, model()), (DEPLOYMENTS, manage(made)))
    assert [deployment["metadata"]["name"] for deployment in list_applied(plan, DEPLOYMENTS)] == [NAME]
    assert plan.delete == ()


@pytest.mark.parametrize(("age_seconds", "moves"), [(SETTLE_SECONDS - 1, False), (SETTLE_SECONDS + 1, True)])
def test_evicted_replica_goes_to_a_host_with_room_after_a_while(age_seconds: float, *, moves: bool) -> None:
    chat = service(**AUTO)
    chat = with_choice(chat, choose(chat, StatedRooms(nvidia=1)))
    rooms, objects = StatedRooms(nvidia=FULL, metal=1), [nvidia_deployment(), placed_pod("new", age_seconds, node="")]
    chosen = choose(chat, rooms, *objects)
    assert replicas(chosen) == ({"metal": 1} if moves else {"nvidia": 1})
    assert chosen is not None
    assert set(chosen.watched) == {"nvidia", "amd", "intel", "metal"} & {*rooms.prospects}
    plan = decide(chosen, (INFERENCE_SERVICES, chat), *objects)
    assert [deletion.name for deletion in plan.delete] == (["chat"] if moves else []), "what waits goes at once"
    if not moves:
        assert chosen.again_seconds == pytest.approx(SETTLE_SECONDS - age_seconds)


def test_replica_on_a_node_serves_until_the_one_in_a_better_pool_does() -> None:
    chat = service(scheduling={"pools": ["metal", "nvidia"]})
    chat = with_choice(chat, choose(chat, StatedRooms(nvidia=1)))
    objects = [nvidia_deployment(), placed_pod()]
    rooms = StatedRooms(BETTER_SECONDS - 1, metal=1, nvidia=FULL)
    first = choose(chat, rooms, *objects)
    assert first is not None
    assert (replicas(first), first.again_seconds) == ({"nvidia": 1}, BETTER_SECONDS)
    rooms.follow(KEY, first.watched)
    young = choose(chat, rooms, *objects)
    assert young is not None
    assert (replicas(young), young.again_seconds) == ({"nvidia": 1}, 1.0)
    rooms = StatedRooms(BETTER_SECONDS, metal=1, nvidia=FULL)
    rooms.followed = {"metal"}
    chosen = choose(chat, rooms, *objects)
    assert replicas(chosen) == {"metal": 1}
    plan = decide(chosen, (INFERENCE_SERVICES, chat), *objects, (METAL_HOSTS, host()))
    assert (len(plan.create), plan.delete, plan.patch) == (1, (), ()), "the pod stays"
    name = plan.create[0][1]["metadata"]["name"]
    arrived = [(METAL_PROCESSES, process(name, host="studio-1", phase="Ready")), (METAL_HOSTS, host())]
    slices = [(ENDPOINT_SLICES, slice_of("chat", "studio-1"))]
    plan = decide(chosen, (INFERENCE_SERVICES, chat), *objects, *arrived, *slices)
    assert [ref.name for ref in plan.delete] == ["chat"], "the host serves in its place"


def test_https_of_hosts_beside_http_of_pods_is_named_only_if_both_are_there_for_good() -> None:
    chat = service(replicas=2, scheduling={"pools": ["metal", "nvidia"]})
    chosen = choose(chat, StatedRooms(metal=1, nvidia=1))
    assert replicas(chosen) == {"metal": 1, "nvidia": 1}
    plan = decide(chosen, (INFERENCE_SERVICES, chat), (METAL_HOSTS, host()))
    name, (made,) = plan.create[0][1]["metadata"]["name"], list_applied(plan, DEPLOYMENTS)
    status = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
    secured, plain = slice_of("chat", "studio-1"), slice_of("chat", "x")
    secured["ports"] = [port | {"appProtocol": "https"} for port in secured["ports"]]
    plain["metadata"]["name"] = "chat-5x7qk"
    pod = placed_pod()
    pod[1]["metadata"]["labels"][LABEL_ACCELERATOR] = "nvidia"
    there = [
        (METAL_HOSTS, host()),
        (METAL_PROCESSES, process(name, host="studio-1", phase="Ready")),
        (DEPLOYMENTS, manage(made) | {"status": status}),
        pod,
        (ENDPOINT_SLICES, secured),
        (ENDPOINT_SLICES, plain),
    ]
    mixed = decide(chosen, (INFERENCE_SERVICES, chat), *there)
    assert "hosts serve https and pods http" in planned_condition(mixed, "Ready")["message"]
    metal = (INFERENCE_SERVICES, service(hardware={"accelerator": "metal"}))
    ((_, made),) = decide_chat(metal, (MODELS, model()), (METAL_HOSTS, host())).create
    there[1] = METAL_PROCESSES, process(made["metadata"]["name"], host="studio-1", phase="Ready")
    moved = decide_chat(metal, (MODELS, model()), *there)
    assert "https" not in planned_condition(moved, "Ready")["message"]


def test_weights_are_fetched_only_after_pods_are_chosen() -> None:
    chat = service(**AUTO)
    chosen = choose(chat, StatedRooms(nvidia=1), of=model(cached=False))
    assert replicas(chosen) == {"nvidia": 1}
    plan = decide(chosen, (INFERENCE_SERVICES, chat), of=model(cached=False))
    assert ready_of(plan)[0] == "Downloading"
    assert list_applied(plan, DEPLOYMENTS) == []
