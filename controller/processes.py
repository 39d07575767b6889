"""The MetalProcesses of an InferenceService: which are to be made, which are to go, and when one may vanish.

A process is fixed once written, so everything is a matter of making and deleting: an edit changes the hash in the name,
and a process whose host is lost, or short of memory, is one that no longer counts. What is superseded stays until what
replaces it answers, and goes earlier only where its own memory is what the successor waits for.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from controller import binder
from controller.parts import Served, runtime_of
from controller.plan import Key, Kind, Patch, Plan, Ref, Snapshot, child
from controller.pods import token_name
from controller.status import find
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE, PROCESS_FINALIZER
from crds.meta import Resource as CrdStruct
from crds.metalhost import MetalHost
from crds.metalprocess import Artifact, FurtherArtifact, MetalProcess, MetalProcessSpec
from crds.model import Model
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, Resource
from kube.store import Store

AVOID_SECONDS: Final = 300.0
"""How long a host that rejected a process is not asked again while the service still misses a replica."""
LEASE_EXPIRED: Final = "LeaseExpired"
"""Reason of a MetalHost's condition Ready while no renewal of its Lease is seen."""


class Steps(NamedTuple):
    """What is to be done about a service's processes."""

    create: tuple[tuple[Resource, Obj], ...] = ()
    delete: tuple[Ref, ...] = ()
    again_seconds: float | None = None


def desired_spec(service: InferenceService, served: Served, memory_bytes: int) -> MetalProcessSpec:
    """Return what a host needs to serve one replica; `memory_bytes` are reserved there."""
    spec, model = service.spec, served.model
    return MetalProcessSpec(
        service_name=service.metadata.name,
        model_name=model.metadata.name,
        runtime=runtime_of(service, model),
        artifact=_artifact(model),
        memory_bytes=memory_bytes,
        token_secret=token_name(service.metadata.name),
        context_length=spec.context_length,
        parallel=spec.parallel,
        mode=spec.mode,
        cache_type_k=spec.cache_type_k,
        cache_type_v=spec.cache_type_v,
        further_artifacts=[
            FurtherArtifact(
                role=part.role, artifact=_artifact(part.model), scale=part.scale, source_secret=_secret(part.model)
            )
            for part in served.parts
            if part.model is not None
        ],
        draft_max_tokens=spec.speculative.max_tokens if spec.speculative else None,
        chat_template=spec.chat_template,
        extra_args=spec.extra_args,
        priority=spec.priority,
        source_secret=_secret(model),
    )


def _artifact(model: Model) -> Artifact:
    return Artifact(
        source=model.spec.source,
        revision=model.status.revision,
        sha256=model.spec.sha256 or model.status.sha256,
        size_bytes=model.status.size_bytes,
    )


def _secret(model: Model) -> str | None:
    return model.spec.source_secret_ref.name if model.spec.source_secret_ref else None


def family(service: str, spec: MetalProcessSpec) -> str:
    """Return the name of a service's processes with this spec, without the number at its end."""
    encoded = msgspec.json.encode(_decided(spec), order="sorted")
    return f"{service}-{hashlib.sha256(encoded).hexdigest()[:8]}"


def _decided(spec: CrdStruct) -> Obj:
    """Return what differs from the defaults, so that a field which a later version adds replaces no process.

    msgspec's own `omit_defaults` compares numbers and strings by identity, so equal specs may look different to it.
    """
    decided: Obj = {}
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        if value not in (field.default, None, "", []):
            decided[field.encode_name] = _plain(value)
    return decided


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return _decided(value) if isinstance(value, CrdStruct) else value


def host_is_lost(name: str, hosts: Mapping[str, MetalHost]) -> bool:
    """Whether what runs on this host must be replaced: it is not registered any more, or its Lease has expired."""
    host = hosts.get(name)
    ready = find(host.status.conditions, "Ready") if host else None
    return host is None or (ready is not None and ready.status == "False" and ready.reason == LEASE_EXPIRED)


class Standing(NamedTuple):
    """A service's processes, sorted by what they are good for. None of them is being deleted but `leaving`."""

    kept: list[MetalProcess]
    """Of the wanted spec and not lost; never more than wanted, the best first."""
    surplus: list[MetalProcess]
    superseded: list[MetalProcess]
    """Of an earlier spec, or on a host that is lost or wants to be rid of them: they may still answer."""
    rejected: list[MetalProcess]
    """Of the wanted spec; while they exist, the host that rejected them is avoided."""
    dead: list[MetalProcess]
    leaving: list[MetalProcess]
    """Being deleted, with memory that their host has not given back."""

    displaced: list[MetalProcess]
    """Those of the superseded that are of the wanted spec and would be kept, had their host the memory."""

    @property
    def ready(self) -> int:
        """How many replicas of the wanted spec answer where they may stay."""
        return sum(process.status.phase == "Ready" for process in self.kept)


def stand(
    name: str | None,
    wanted: int,
    observed: Iterable[MetalProcess],
    hosts: Mapping[str, MetalHost],
    *,
    estimated: MetalProcessSpec | None = None,
) -> Standing:
    """Sort a service's processes.

    Args:
        name: their `family`; None keeps whatever there is, for it is not known.
        wanted: how many.
        observed: all that exist.
        hosts: all that are registered, by name.
        estimated: what each is, where its memory is an estimate: one that a host has, and that differs in its memory
            only, is as wanted too. A better estimate, as a later version has, is no reason to load anything anew.
    """
    standing = Standing([], [], [], [], [], [], [])
    usable = []
    for process in observed:
        phase, host = process.status.phase, process.spec.host_name
        current = (
            name is None
            or process.metadata.name.rpartition("-")[0] == name
            or (estimated is not None and phase != "Rejected" and _serves(process, estimated))
        )
        lost = host is not None and host_is_lost(host, hosts)
        if process.metadata.deletion_timestamp is not None:
            if host is not None and phase not in {"Stopped", "Rejected"} and not lost:
                standing.leaving.append(process)
        elif phase == "Stopped" or (phase == "Rejected" and not current):
            standing.dead.append(process)
        elif phase == "Rejected":
            standing.rejected.append(process)
        elif current and not lost and not binder.is_displaced(process):
            usable.append(process)
        else:
            standing.superseded.append(process)
            if current and not lost:
                standing.displaced.append(process)
    usable.sort(key=_preference)
    standing.superseded.sort(key=_preference)
    standing.kept.extend(usable[:wanted])
    standing.surplus.extend(usable[wanted:])
    return standing


def _serves(process: MetalProcess, spec: MetalProcessSpec) -> bool:
    """Whether a host has it with this spec, whatever the memory that is reserved there."""
    there = msgspec.structs.replace(process.spec, host_name=None, memory_bytes=spec.memory_bytes)
    return process.spec.host_name is not None and _decided(there) == _decided(spec)


def _preference(process: MetalProcess) -> tuple[bool, bool, bool, bool, str, int, str]:
    """Sorts what is most worth keeping to the front."""
    name, phase = process.metadata.name, process.status.phase
    return (
        phase != "Ready",
        process.spec.host_name is None,
        phase == "Failed",
        # One that its host had held back, and whose successor is on its way elsewhere, has nothing that is worth more.
        phase == "Pending",
        process.metadata.creation_timestamp,
        len(name),
        name,
    )


def converge(
    service: InferenceService,
    spec: MetalProcessSpec | None,
    wanted: int,
    standing: Standing,
    *,
    taken: Collection[str],
    rooms: Sequence[binder.Room],
    now: datetime,
) -> Steps:
    """Return the next steps towards `wanted` processes of `spec`; none when that is reached or on its way.

    Args:
        service: the owner.
        spec: what each replica is; None while it cannot be known, and then nothing new is made.
        wanted: how many.
        standing: what there is, as `stand` sorts it for the same spec and number.
        taken: names of all processes of the service, also of those being deleted.
        rooms: what the live hosts can still take.
        now: the wall clock.
    """
    gone = [*standing.surplus, *standing.dead]
    # One of the superseded stays for each replica that does not answer yet.
    spared = max(0, wanted - standing.ready)
    gone += standing.superseded[spared:]
    gone += _in_the_way(standing, standing.superseded[:spared], rooms)
    complete = standing.ready == wanted
    ages = [(process, _age_seconds(process, now)) for process in standing.rejected]
    gone += [process for process, age in ages if complete or age >= AVOID_SECONDS]
    waits = [AVOID_SECONDS - age for _, age in ages if not complete and age < AVOID_SECONDS]
    create: tuple[tuple[Resource, Obj], ...] = ()
    if spec is not None:
        names = _unused_names(family(service.metadata.name, spec), taken, wanted - len(standing.kept))
        create = tuple(_process(service, spec, name) for name in names)
    return Steps(create, tuple(_ref(process) for process in gone), min(waits, default=None))


def _in_the_way(
    standing: Standing, superseded: Sequence[MetalProcess], rooms: Sequence[binder.Room]
) -> list[MetalProcess]:
    """Return superseded processes of one host whose memory a waiting successor needs, because it fits nowhere else."""
    waiting = next((process for process in standing.kept if process.spec.host_name is None), None)
    if waiting is None or standing.leaving:
        return []
    avoid = {process.spec.host_name for process in (*standing.rejected, *standing.displaced)}
    able = binder.able(waiting.spec.runtime, avoid, rooms)
    if any(room.free_bytes >= waiting.spec.memory_bytes for room in able):
        return []
    for room in able:
        free, there = room.free_bytes, []
        for process in reversed(superseded):
            if process.spec.host_name == room.host and free < waiting.spec.memory_bytes:
                there.append(process)
                free += process.spec.memory_bytes
        if free >= waiting.spec.memory_bytes:
            return there
    return []


def _age_seconds(process: MetalProcess, now: datetime) -> float:
    """Since its host last wrote about it: for one that it rejected, since then."""
    written = (entry.time for entry in process.metadata.managed_fields if entry.subresource == "status")
    since = max(written, default=process.metadata.creation_timestamp)
    return (now - datetime.fromisoformat(since)).total_seconds()


def _unused_names(name: str, taken: Collection[str], count: int) -> list[str]:
    unused = (f"{name}-{number}" for number in itertools.count() if f"{name}-{number}" not in taken)
    return list(itertools.islice(unused, max(0, count)))


def _process(service: InferenceService, spec: MetalProcessSpec, name: str) -> tuple[Resource, Obj]:
    owner = service.metadata
    labels = {LABEL_SERVICE: owner.name}
    resource, obj = child(METAL_PROCESSES, name, INFERENCE_SERVICES, owner, labels, spec=_decided(spec))
    obj["metadata"]["finalizers"] = [PROCESS_FINALIZER]
    return resource, obj


def _ref(process: MetalProcess) -> Ref:
    metadata = process.metadata
    return Ref(METAL_PROCESSES, metadata.namespace, metadata.name, metadata.uid)


def release_kind(wait_seconds: Callable[[str], float | None]) -> Kind:
    """Return the reconciler of each MetalProcess itself, which lets go of it once no host can be running it.

    `wait_seconds` tells how long the host with this name has to be gone still before that is so; None: it is alive.
    """

    async def observe(_client: Client, snapshot: Snapshot, key: Key) -> float | None:
        process = snapshot.get(METAL_PROCESSES, key)
        host = process["spec"].get("hostName") if process else None
        return wait_seconds(host) if host else None

    return Kind(resource=METAL_PROCESSES, decide=decide_release, observe=observe, maps={METAL_HOSTS: _leaving_host})


def _leaving_host(store: Store, host: Obj) -> list[Key]:
    name = host["metadata"]["name"]
    return [
        Key(obj["metadata"]["namespace"], obj["metadata"]["name"])
        for obj in store.list(METAL_PROCESSES)
        if "deletionTimestamp" in obj["metadata"] and obj["spec"].get("hostName") == name
    ]


def decide_release(snapshot: Snapshot, key: Key) -> Plan:
    """Decide about one process, which may be gone. The facts are how long its host has to be gone still."""
    process = snapshot.read(METAL_PROCESSES, key, MetalProcess)
    if process is None:
        return Plan()
    host = process.spec.host_name
    host_exists = host is not None and snapshot.get(METAL_HOSTS, Key("", host)) is not None
    return release(process, host_exists=host_exists, wait_seconds=snapshot.facts)


def release(process: MetalProcess, *, host_exists: bool, wait_seconds: float | None) -> Plan:
    """Return the plan for one process: let go of it when it is being deleted and no host can be running it.

    Args:
        process: the process.
        host_exists: whether the host that it is bound to is still registered.
        wait_seconds: how long its host has to be gone still; None when the host is alive.
    """
    metadata = process.metadata
    if metadata.deletion_timestamp is None or PROCESS_FINALIZER not in metadata.finalizers:
        return Plan()
    never_ran = process.spec.host_name is None or process.status.phase == "Stopped"
    if not never_ran and host_exists and (wait_seconds is None or wait_seconds > 0):
        return Plan(again_seconds=wait_seconds)
    operations = (
        {"op": "test", "path": "/metadata/resourceVersion", "value": metadata.resource_version},
        {
            "op": "replace",
            "path": "/metadata/finalizers",
            "value": [each for each in metadata.finalizers if each != PROCESS_FINALIZER],
        },
    )
    return Plan(patch=(Patch(_ref(process), operations),))
