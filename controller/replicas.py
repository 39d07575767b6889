"""What there is of a service's replicas, pods and processes alike, and what is to be done about them.

Only a replica that is as wanted counts as ready: while an edit rolls out, what still serves of the earlier spec does
not, and where that cannot be told, the count is the lower one.
"""

from collections.abc import Sequence
from copy import deepcopy

import msgspec

from controller import binder, diagnosis, processes, requirements
from controller.parts import Served
from controller.plan import FIELD_MANAGER, Patch, Snapshot, readable, ref
from controller.pods import Weights, deployment
from controller.processes import Steps
from controller.requirements import Advice, Problem
from controller.weights import cache_path, claim_name
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE, Accelerator
from crds.metalhost import MetalHost
from crds.metalprocess import MetalProcess
from crds.model import Model
from devices.vendors import VENDORS
from kube.apply import is_applied
from kube.client import Obj
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, PODS, Resource


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a service's replicas, of either kind, and what is to be done about them."""

    total: int
    """All that exist, also those that are being replaced."""
    ready: tuple[str, ...] = ()
    """Sorted uids of those as wanted that are ready."""
    problem: Problem | None = None
    """The gravest reason why one is not ready."""
    apply: tuple[tuple[Resource, Obj], ...] = ()
    patch: tuple[Patch, ...] = ()
    steps: Steps = Steps()


def examine(
    snapshot: Snapshot, service: InferenceService, accelerator: Accelerator | None, served: Served | None, wanted: int
) -> Replicas:
    """Look at pods and hosts alike. Without `served` nothing new is made, and what there is counts as wanted."""
    pods = in_pods(snapshot, service, accelerator, served, wanted)
    if served is not None and accelerator is not None and VENDORS[accelerator].in_pods:
        # One of what hosts served before stays for each pod that is not ready yet.
        earlier = on_hosts(snapshot, service, None, max(0, wanted - len(pods.ready)))
        hosts = msgspec.structs.replace(earlier, ready=(), problem=None)
    else:
        hosts = on_hosts(snapshot, service, served, wanted)
    return Replicas(
        total=pods.total + hosts.total,
        ready=(*pods.ready, *hosts.ready),
        problem=diagnosis.gravest((pods.problem, hosts.problem)),
        apply=pods.apply,
        patch=pods.patch,
        steps=hosts.steps,
    )


def in_pods(
    snapshot: Snapshot, service: InferenceService, accelerator: Accelerator | None, served: Served | None, wanted: int
) -> Replicas:
    """Look at what serves in pods. Without `served` it is only scaled down, and what there is counts as wanted."""
    observed = next(iter(snapshot.children(DEPLOYMENTS, service.metadata.uid)), None)
    desired: tuple[tuple[Resource, Obj], ...] = ()
    if wanted and served is not None and accelerator is not None and VENDORS[accelerator].in_pods:
        stated = service.spec.resources.memory
        memory = requirements.memory_bytes(service, served) if stated is None else stated
        parts = [(part, _weights(part.model)) for part in served.parts if part.model is not None]
        if memory is not None:
            weights = _weights(served.model)
            made = deployment(service, accelerator=accelerator, memory=memory, weights=weights, parts=parts)
            is_estimate = stated is None and not requirements.is_memory_stated(served)
            desired = (_with_what_is_requested(made, observed) if is_estimate and observed else made,)
    if observed is None:
        return Replicas(total=0, apply=desired)
    labels = (LABEL_SERVICE, service.metadata.name)
    pods = [
        pod
        for pod in snapshot.store.list(PODS, service.metadata.namespace)
        if labels in pod["metadata"].get("labels", {}).items() and "deletionTimestamp" not in pod["metadata"]
    ]
    ready = sorted(pod["metadata"]["uid"] for pod in pods if _is_ready(pod))
    current = _current_ready(observed, desired, len(ready)) if desired or served is None else 0
    problems = [diagnosis.of_deployment(observed), *(diagnosis.of_pod(pod) for pod in pods if not _is_ready(pod))]
    return Replicas(
        total=observed.get("status", {}).get("replicas", 0),
        ready=tuple(ready[-current:] if current else ()),
        problem=diagnosis.gravest(problems) if desired else None,
        apply=desired,
        patch=_scale_down(observed, wanted) if wanted and served is None else (),
    )


def _with_what_is_requested(made: tuple[Resource, Obj], observed: Obj) -> tuple[Resource, Obj]:
    """Return the Deployment with the memory that its pods request, where its pods would differ in nothing else.

    A better estimate, as a later version has, is no reason to start them anew.
    """
    resource, desired = made
    kept = deepcopy(desired)
    (container,) = kept["spec"]["template"]["spec"]["containers"]
    pod = observed["spec"]["template"]["spec"]
    there: Obj = next((each for each in pod["containers"] if each["name"] == container["name"]), {})
    requested = there.get("resources", {}).get("requests", {}).get("memory")
    container["resources"]["requests"]["memory"] = requested
    compared = kept | {"spec": kept["spec"] | {"replicas": observed["spec"]["replicas"]}}
    is_same = requested is not None and is_applied(resource, compared, observed, FIELD_MANAGER)
    return (resource, kept) if is_same else made


def _weights(model: Model) -> Weights:
    return Weights(claim_name(model.metadata.name), cache_path(model))


def _scale_down(observed: Obj, wanted: int) -> tuple[Patch, ...]:
    """Return the patch of a Deployment whose pods cannot be decided anew now, if they are too many."""
    if observed["spec"]["replicas"] <= wanted:
        return ()
    operations = (
        {"op": "test", "path": "/metadata/uid", "value": observed["metadata"]["uid"]},
        {"op": "replace", "path": "/spec/replicas", "value": wanted},
    )
    return (Patch(ref(DEPLOYMENTS, observed), operations),)


def _is_ready(pod: Obj) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", [])
    )


def _current_ready(observed: Obj, desired: Sequence[tuple[Resource, Obj]], ready: int) -> int:
    """Return how many of the ready pods are surely of the wanted template."""
    status = observed.get("status", {})
    applied = all(is_applied(resource, obj, observed, FIELD_MANAGER) for resource, obj in desired)
    if not applied or status.get("observedGeneration") != observed["metadata"]["generation"]:
        return 0
    earlier: int = status.get("replicas", 0) - status.get("updatedReplicas", 0)
    reported: int = status.get("readyReplicas", 0)
    return max(0, min(ready, reported) - earlier)


def on_hosts(snapshot: Snapshot, service: InferenceService, served: Served | None, wanted: int) -> Replicas:
    """Look at what serves on hosts, and take the next steps. Without `served` nothing new is made."""
    children = snapshot.children(METAL_PROCESSES, service.metadata.uid)
    memory = requirements.memory_bytes(service, served) if served is not None else None
    spec = processes.desired_spec(service, served, memory) if served is not None and memory is not None else None
    if not children and not (spec and wanted):
        return Replicas(total=0)
    hosts = {
        host.metadata.name: host
        for host in readable(snapshot.store.list(METAL_HOSTS), MetalHost)
        if host.metadata.deletion_timestamp is None
    }
    alive = [host for name, host in hosts.items() if not processes.host_is_lost(name, hosts)]
    rooms = binder.rooms(alive, snapshot.store.list(METAL_PROCESSES))
    name = processes.family(service.metadata.name, spec) if spec else None
    estimated = spec if served is not None and not requirements.is_memory_stated(served) else None
    standing = processes.stand(name, wanted, readable(children, MetalProcess), hosts, estimated=estimated)
    taken = {obj["metadata"]["name"] for obj in children}
    steps = processes.converge(service, spec, wanted, standing, taken=taken, rooms=rooms, now=snapshot.now)

    def advise(free_bytes: int) -> Advice:
        return requirements.memory_advice(service, served, free_bytes) if served else Advice()

    problems = [diagnosis.of_process(each, rooms, standing, advise) for each in standing.kept]
    # One that is to move is as wanted as any while it answers.
    answering = [each for each in (*standing.kept, *standing.displaced) if each.status.phase == "Ready"]
    return Replicas(
        total=len(standing.kept) + len(standing.surplus) + len(standing.superseded),
        ready=tuple(sorted(each.metadata.uid for each in answering[:wanted])),
        problem=diagnosis.gravest(problems),
        steps=steps,
    )
