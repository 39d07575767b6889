"""Lives of objects during which a controller may crash: a user's steps, each with the state that must follow."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, MODELS
from tests.support.crash_world import DEVICES, GIB, CrashWorld, State

Scenario = Callable[[CrashWorld], Awaitable[None]]

POD: Final = {"accelerator": "nvidia"}
METAL: Final = {"accelerator": "metal"}
LEASE_SECONDS: Final = 10
"""A host of many worlds on a busy machine must not expire by itself: what it serves would be created twice."""


def ready(state: State, *, name: str = "chat", replicas: int = 1, deployments: int = 0, processes: int = 0) -> bool:
    """Decide whether a service serves as the latest spec says, with exactly these objects in the namespace."""
    status = state["inferenceservices"][name]["status"]
    counted = len(state["deployments"]), len(state["metalprocesses"])
    return (
        status.get("phase") == "Ready"
        and status.get("readyReplicas") == replicas
        and counted == (deployments, processes)
    )


def is_collected(state: State, name: str = "chat") -> bool:
    """Decide whether Kubernetes' garbage collector has deleted everything of a service that was deleted."""
    kinds = ("inferenceservices", "metalprocesses", "deployments", "services", "endpointslices", "secrets")
    return not any(key.partition(".")[0].partition("-")[0] == name for kind in kinds for key in state[kind])


async def make_host_model(world: CrashWorld) -> None:
    """Create a Model of one GiB that needs no Job."""
    await world.make(MODELS, "tiny", source="file:///models/tiny.gguf", memoryBytes=GIB)


def _has_another_token(state: State, *, deployments: int = 0, processes: int = 0) -> bool:
    is_replaced = bool(state["inferenceservices"]["chat"]["status"].get("tokenRotation"))
    return is_replaced and ready(state, deployments=deployments, processes=processes)


async def live_in_pods(world: CrashWorld) -> None:
    """A Model is inspected and fetched; a service in pods is created, edited, scaled, suspended, and deleted.

    Its token is replaced meanwhile.
    """
    await world.make(MODELS, "tiny", source="http://models.example/tiny.gguf", memoryBytes=GIB)
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=POD, contextLength=512)
    await world.checkpoint("created", partial(ready, deployments=1))
    await world.edit(contextLength=1024)
    await world.checkpoint("edited", partial(ready, deployments=1))
    await world.replace_token()
    await world.checkpoint("token replaced", partial(_has_another_token, deployments=1))
    await world.edit(replicas=2)
    await world.checkpoint("scaled", partial(ready, replicas=2, deployments=1))
    await world.edit(suspend=True)
    await world.checkpoint("suspended", lambda state: not state["deployments"])
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


def _has_one_claim(state: State, *, deployments: int) -> bool:
    """Decide whether the earlier volume is deleted."""
    return list(state["persistentvolumeclaims"]) != ["tiny-cache"] and (
        len(state["persistentvolumeclaims"]) == 1 and len(state["deployments"]) == deployments
    )


async def replace_a_volume(world: CrashWorld) -> None:
    """An engine of the user's serves from a volume that another one replaces, and is suspended."""
    await world.make(MODELS, "tiny", source="http://models.example/tiny.gguf", memoryBytes=GIB)
    engine = {"runtime": "generic", "image": "registry.example/engine:1", "container": {}, "hardware": POD}
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", resources={"memory": "1Gi"}, **engine)
    await world.checkpoint("created", partial(ready, deployments=1))
    await world.edit("tiny", MODELS, cache={"accessMode": "ReadWriteOnce", "storageClassName": "fast"})
    await world.checkpoint(
        "replaced", lambda state: _has_one_claim(state, deployments=1) and ready(state, deployments=1)
    )
    await world.edit(suspend=True)
    await world.checkpoint("suspended", partial(_has_one_claim, deployments=0))
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


def _has_copies(state: State, *, copies: int, replicas: int) -> bool:
    """Decide whether so many copies of the latest weights exist, and so many of them serve one replica each."""
    model = state["models"]["tiny"]
    claims = {copy["name"] for copy in model["status"].get("copies", ())}
    mounted = {
        volume["persistentVolumeClaim"]["claimName"]
        for deployment in state["deployments"].values()
        for volume in deployment["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    are_there = len(claims) == copies and mounted <= claims == set(state["persistentvolumeclaims"])
    if not replicas:
        return are_there and not state["deployments"]
    return are_there and ready(state, replicas=replicas, deployments=replicas)


async def serve_beside_copies(world: CrashWorld) -> None:
    """A service runs beside copies of weights on two nodes; it is edited, gets other weights, and is suspended."""
    cache = {"scope": "node", "storageClassName": "local"}
    await world.make(MODELS, "tiny", source="http://models.example/tiny.gguf", memoryBytes=GIB, cache=cache)
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=POD, replicas=2, contextLength=512)
    await world.checkpoint("created", partial(_has_copies, copies=2, replicas=2))
    await world.edit(contextLength=1024)
    await world.checkpoint("edited", partial(_has_copies, copies=2, replicas=2))
    await world.edit("tiny", MODELS, source="http://models.example/other.gguf")
    await world.checkpoint("other weights", partial(_has_copies, copies=2, replicas=2))
    await world.edit(suspend=True)
    await world.checkpoint("suspended", partial(_has_copies, copies=2, replicas=0))
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


async def live_on_hosts(world: CrashWorld) -> None:
    """A service on hosts is created, edited, scaled, and deleted; its token is replaced meanwhile.

    The first host has room for an edit, until another service takes it. So the second replica has one place to go, also
    for a leader that does not know of the second host yet.
    """
    await make_host_model(world)
    await world.host(gib=2)
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=METAL)
    await world.checkpoint("created", partial(ready, processes=1))
    await world.edit(contextLength=8192)
    await world.checkpoint("edited", partial(ready, processes=1))
    await world.replace_token()
    await world.checkpoint("token replaced", partial(_has_another_token, processes=1))
    await world.make(INFERENCE_SERVICES, "late", modelRef="tiny", hardware=METAL)
    await world.checkpoint("first host full", partial(ready, name="late", processes=2))
    await world.host(2, gib=1)
    await world.edit(replicas=2)
    await world.checkpoint("scaled", partial(ready, replicas=2, processes=3))
    await world.edit(replicas=1)
    await world.checkpoint("scaled down", partial(ready, processes=2))
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


async def move_from_pods_to_hosts(world: CrashWorld) -> None:
    """A service that pods serve moves to a host and back."""
    await world.make(MODELS, "tiny", source="http://models.example/tiny.gguf", memoryBytes=GIB)
    await world.host()
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=POD, contextLength=512)
    await world.checkpoint("in pods", partial(ready, deployments=1))
    await world.edit(hardware=METAL)
    await world.checkpoint("on a host", partial(ready, processes=1))
    await world.edit(hardware=POD)
    await world.checkpoint("in pods again", partial(ready, deployments=1))
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


async def lose_a_host(world: CrashWorld) -> None:
    """A host expires, and its service moves to another; the host returns."""
    await make_host_model(world)
    first = await world.host(1, lease_seconds=LEASE_SECONDS)
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=METAL)
    await world.checkpoint("on the first", partial(ready, processes=1))
    await world.host(2)
    first.silent = True
    await world.checkpoint("on the second", partial(_serves_on, host="NAMESPACE-2"))
    first.silent = False
    await world.checkpoint("returned", partial(_serves_on, host="NAMESPACE-2"))
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


async def drain_hosts(world: CrashWorld) -> None:
    """A host is drained, and its service moves to another; that one is drained too, until the first is open again."""
    await make_host_model(world)
    await world.host()
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=METAL)
    await world.checkpoint("on the first", partial(_serves_on, host="NAMESPACE-1"))
    await world.host(2)
    await world.drain()
    await world.checkpoint("on the second", partial(_serves_on, host="NAMESPACE-2"))
    await world.await_drain("Drained")
    await world.drain(2)
    await world.checkpoint("has no other place", partial(ready, processes=2))
    await world.await_drain("DrainBlocked", 2)
    await world.drain(is_drained=False)
    await world.checkpoint("on the first again", partial(_serves_on, host="NAMESPACE-1"))
    await world.await_drain("Drained", 2)
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint("deleted", is_collected)


def _serves_on(state: State, host: str) -> bool:
    hosts = [process["spec"].get("hostName") for process in state["metalprocesses"].values()]
    return ready(state, processes=1) and hosts == [host]


async def wait_for_room(world: CrashWorld) -> None:
    """Two services want a host that has room for one: the second is bound when the first is deleted."""
    await make_host_model(world)
    await world.host(gib=1)
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=METAL)
    await world.checkpoint("first serves", partial(ready, processes=1))
    await world.make(INFERENCE_SERVICES, "late", modelRef="tiny", hardware=METAL)
    await world.checkpoint("second waits", partial(_is_pending, name="late"))
    await world.delete(INFERENCE_SERVICES, "chat")
    await world.checkpoint(
        "second serves", lambda state: is_collected(state) and ready(state, name="late", processes=1)
    )
    await world.delete(INFERENCE_SERVICES, "late")
    await world.checkpoint("deleted", partial(is_collected, name="late"))


def _is_served(state: State, **is_ready: bool) -> bool:
    """Decide which services serve, and that all others wait in the queue and know its length."""
    statuses = {name: service["status"] for name, service in state["inferenceservices"].items()}
    phases = {name: status.get("phase") for name, status in statuses.items()}
    lengths = {name: status.get("queue", {}).get("length") for name, status in statuses.items()}
    waiting = sum(not served for served in is_ready.values())
    return (phases, lengths) == (
        {name: "Ready" if served else "WaitingForGPU" for name, served in is_ready.items()},
        {name: None if served else waiting for name, served in is_ready.items()},
    )


def _has_keys(state: State, *, previous: int) -> bool:
    """Decide whether a GatewayKey has a key, and so many that it has replaced."""
    status: dict[str, Any] = state["gatewaykeys"]["app"]["status"]
    (condition,) = status["conditions"]
    return condition["reason"] == "Valid" and len(status.get("previous", ())) == previous


async def replace_keys(world: CrashWorld) -> None:
    """A GatewayKey gets a key, then another one, then one of the user's that is replaced at once, and is deleted.

    No key is lost before its time, so that the number of those that are valid is the same in each world.
    """
    await make_host_model(world)
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", replicas=0)
    await world.make(GATEWAY_KEYS, "app", services=["chat"])
    await world.checkpoint("made", partial(_has_keys, previous=0))
    await world.replace_key("monday")
    await world.checkpoint("replaced", partial(_has_keys, previous=1))
    await world.put_key("k" * 40)
    await world.replace_key("tuesday")
    await world.checkpoint("edited and replaced", partial(_has_keys, previous=3))
    await world.edit("app", GATEWAY_KEYS, overlapSeconds=0)
    await world.checkpoint("ended", partial(_has_keys, previous=0))
    await world.delete(GATEWAY_KEYS, "app")
    await world.checkpoint("deleted", lambda state: "app-key" not in state["secrets"])


async def queue_for_devices(world: CrashWorld) -> None:
    """Two services fill all nodes. The lower one makes way for a critical one, waits, and comes back at its place."""
    await world.make(MODELS, "tiny", source="ollama://tiny:1b", memoryBytes=GIB)
    whole = {"modelRef": "tiny", "hardware": POD | {"count": DEVICES}}
    await world.make(INFERENCE_SERVICES, "low", priority="low", **whole)
    await world.checkpoint("first", partial(_is_served, low=True))
    await world.make(INFERENCE_SERVICES, "batch", priority="batch", **whole)
    await world.checkpoint("full", partial(_is_served, low=True, batch=True))
    await world.make(INFERENCE_SERVICES, "critical", priority="critical", **whole)
    await world.checkpoint("preempted", partial(_is_served, low=True, batch=False, critical=True))
    await world.make(INFERENCE_SERVICES, "late", priority="batch", **whole)
    await world.checkpoint("queued", partial(_is_served, low=True, batch=False, critical=True, late=False))
    await world.delete(INFERENCE_SERVICES, "critical")
    await world.checkpoint("came back", partial(_is_served, low=True, batch=True, late=False))
    await world.edit("low", suspend=True)
    await world.checkpoint("all serve", lambda state: _is_served(_without(state, "low"), batch=True, late=True))
    for name in ("low", "batch", "late"):
        await world.delete(INFERENCE_SERVICES, name)
    await world.checkpoint("deleted", lambda state: all(is_collected(state, name) for name in ("low", "batch", "late")))


def _without(state: State, name: str) -> State:
    services = {key: service for key, service in state["inferenceservices"].items() if key != name}
    return {**state, "inferenceservices": services}


def _is_pending(state: State, name: str) -> bool:
    status: dict[str, Any] = state["inferenceservices"][name]["status"]
    return status.get("phase") == "WaitingForGPU" and "NoHostFits" in str(status["conditions"])


SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        live_in_pods,
        replace_a_volume,
        serve_beside_copies,
        live_on_hosts,
        move_from_pods_to_hosts,
        lose_a_host,
        drain_hosts,
        wait_for_room,
        replace_keys,
        queue_for_devices,
    )
}
