"""Inputs of a decision about a Model: its Jobs, claims and consumers, and the changes after which it is decided."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from controller.models.claims import ObservedClaims, observe_claims
from controller.models.copy_observation import ObservedCopies, Reserve, observe_copies, reserve_nothing
from controller.models.job_pods import NO_PODS, ObservedPods
from controller.models.served import METAL, accelerator_of
from controller.models.source_secret import SecretVerdict
from controller.pod_settings import DEFAULT_SETTINGS, PodSettings
from controller.reconcile.indexes import MODEL_INDEX, companion_names, model_names, namespaced
from controller.reconcile.plan import Snapshot, decode_stored
from controller.reconcile.triggers import all_but_status
from crds.inferenceservice import InferenceService, wanted_replicas
from crds.meta import AUTO_ACCELERATOR, LABEL_MODEL
from crds.model import Model
from devices.vendors import Vendors
from fitness.performance_store import LABEL_BENCHMARK
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, PODS, ObjectKey
from kube.store import Store


class ModelInputs(NamedTuple):
    """Inputs of a decision that are not watched."""

    secret: SecretVerdict | None = None
    classes: Mapping[str, Obj] = {}
    """The result of `read_classes`."""
    refusals: Mapping[str, str] = {}
    """The result of `read_refusals`."""


class ObservedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a Model that a decision reads."""

    jobs: Sequence[Obj] = ()
    pods: ObservedPods = NO_PODS
    """Those of the Jobs."""
    claims: ObservedClaims = ObservedClaims()
    secret: SecretVerdict | None = None
    """Verdict on the Secret of the source; None if it was not read, or the source has none."""
    consumer: InferenceService | None = None
    """The oldest service that serves this Model in pods; the weights are fetched to where its pods can run."""
    undecided: Callable[[], InferenceService | None] = lambda: None
    """Returns the oldest service whose accelerator has not been chosen yet; only an inspection needs it."""
    copies: ObservedCopies = ObservedCopies()
    """Empty unless spec.cache.scope is node."""


def observe_model(
    snapshot: Snapshot,
    key: ObjectKey,
    model: Model,
    settings: PodSettings = DEFAULT_SETTINGS,
    reserve: Reserve = reserve_nothing,
) -> ObservedModel:
    """Gather the inputs of a decision about this Model: its Jobs, its claims, and the services that need its weights.

    All but `snapshot.inputs`, which the reconciler has read, is in the store. `reserve` returns what one replica of a
    service asks of its node, for copies on nodes.
    """
    # 1. Its Jobs, without those of benchmarks.
    children = snapshot.children(JOBS, key.namespace, model.metadata.uid)
    model_jobs = [job for job in children if LABEL_BENCHMARK not in job["metadata"].get("labels", {})]
    inputs: ModelInputs = snapshot.inputs or ModelInputs()

    # 2. Its consumers, the services in pods. They are found one by one, because most Models need only the first. Copies
    # need all: `consumer` and the rest.
    consumers = _find_consumers(snapshot, _list_services(snapshot, key), model, settings.vendors)
    consumer, copies = next(consumers, None), ObservedCopies()
    if model.spec.cache.scope == "node":
        # A copy is for the main Model of a service only.
        copies = observe_copies(
            snapshot,
            model,
            [
                service
                for service in (consumer, *consumers)
                if service is not None and service.spec.model_ref == key.name
            ],
            reserve,
            vendors=settings.vendors,
            limit_bytes=settings.node_cache_bytes,
            classes=inputs.classes,
        )

    return ObservedModel(
        jobs=model_jobs,
        pods=ObservedPods(
            {
                uid: snapshot.children(PODS, key.namespace, uid)
                for uid in (job["metadata"]["uid"] for job in model_jobs)
            },
            inputs.refusals,
        ),
        claims=observe_claims(snapshot, model, inputs.classes),
        consumer=consumer,
        undecided=functools.partial(_find_undecided, snapshot, key),  # a search, which only an inspection needs
        secret=inputs.secret,
        copies=copies,
    )


def _list_services(snapshot: Snapshot, key: ObjectKey) -> Iterator[InferenceService]:
    """Yield the services that serve this Model and are not suspended, the oldest first."""
    objects = snapshot.store.by_index(INFERENCE_SERVICES, MODEL_INDEX, namespaced(key.namespace, key.name))
    # The first one is all that most Models need, and a thousand services may have the same Model.
    for obj in sorted(objects, key=_read_age):
        for service in decode_stored(snapshot.store, INFERENCE_SERVICES, (obj,), InferenceService):
            if service.metadata.deletion_timestamp is None and not service.spec.suspend:
                yield service


def _find_consumers(
    snapshot: Snapshot, services: Iterable[InferenceService], model: Model, vendors: Vendors
) -> Iterator[InferenceService]:
    """Yield the services that serve this Model in pods, each as a copy that states the accelerator it is placed on.

    One that is spread over several accelerators is yielded for each of them.
    """
    for service in services:
        # The main Model decides the accelerator: this one may be a companion, such as the draft model.
        for part in _split_by_accelerator(service, _served_model(snapshot, service) or model):
            vendor = vendors.get(accelerator_of(part, model))
            if vendor is not None and vendor.in_pods:  # not on hosts outside of the cluster
                yield part


def _find_undecided(snapshot: Snapshot, key: ObjectKey) -> InferenceService | None:
    """Return the oldest service that serves this Model and whose accelerator has not been chosen, or None."""
    return next((service for service in _list_services(snapshot, key) if _is_undecided(service)), None)


def _is_undecided(service: InferenceService) -> bool:
    """Return whether Pomona chooses the accelerator, and has not done so."""
    stated, status = service.spec.hardware.accelerator, service.status
    may_be_any = stated == AUTO_ACCELERATOR or (stated is None and bool(service.spec.scheduling.pools))
    return may_be_any and status.choice is None and not status.accelerator


def _read_age(obj: Obj) -> tuple[str, str]:
    return obj["metadata"].get("creationTimestamp", ""), obj["metadata"]["name"]


def _split_by_accelerator(service: InferenceService, model: Model) -> Iterator[InferenceService]:
    """Yield a copy of the service for each accelerator that it states or was given, with its replicas there.

    While no accelerator is chosen, none is yielded of a service with pools; one that states `auto` keeps it, and has no
    pods then.
    """
    hardware, status, spec = service.spec.hardware, service.status, service.spec
    # A choice among several has been made: a copy for each accelerator on which it has replicas.
    if hardware.accelerator in {None, AUTO_ACCELERATOR} and status.choice is not None:
        for share in status.choice.accelerators:
            if share.replicas:
                yield _state_accelerator(service, share.accelerator, share.replicas)
    # Any other: the accelerator that it states, or that of its Model. A service that names only pools is decided once
    # its status has an accelerator: that of the Model may be none of theirs.
    elif hardware.accelerator is not None or not spec.scheduling.pools or status.accelerator:
        yield _state_accelerator(service, accelerator_of(service, model), wanted_replicas(service))


def read_placement(service: Obj) -> object:
    """Return the fields of a service that decisions about Models read: a change of them triggers one.

    These are all but the status, the replicas on each accelerator in pods, and whether its pools are decided: one
    of their accelerators is chosen.
    """
    status = service.get("status") or {}
    shares = (status.get("choice") or {}).get("accelerators", ())
    shares_in_pods = [share for share in shares if share["accelerator"] != METAL and share.get("replicas")]
    replicas = [(share["accelerator"], share["replicas"]) for share in shares_in_pods]
    is_decided = bool((service["spec"].get("scheduling") or {}).get("pools") and status.get("accelerator"))
    return all_but_status(service), replicas, is_decided


def _state_accelerator(service: InferenceService, accelerator: str, replicas: int) -> InferenceService:
    """Return the service with an accelerator stated in its spec, and its replicas there."""
    spec = service.spec
    hardware = msgspec.structs.replace(spec.hardware, accelerator=accelerator)
    return msgspec.structs.replace(service, spec=msgspec.structs.replace(spec, hardware=hardware, replicas=replicas))


def _served_model(snapshot: Snapshot, service: InferenceService) -> Model | None:
    """Return the main Model of a service, on whose hardware its draft, projector and adapters run too."""
    return snapshot.read(MODELS, ObjectKey(service.metadata.namespace, service.spec.model_ref), Model)


def model_of_pod(_store: Store, pod: Obj) -> list[ObjectKey]:
    """Return the Model of a Job's pod."""
    metadata = pod["metadata"]
    model = metadata.get("labels", {}).get(LABEL_MODEL)
    return [ObjectKey(metadata["namespace"], model)] if model else []


def models_of_service(_store: Store, service: Obj) -> list[ObjectKey]:
    """Return the Models that a service serves, with its companions."""
    return [ObjectKey(service["metadata"]["namespace"], name) for name in sorted(model_names(service))]


def models_served_beside(store: Store, model: Obj) -> list[ObjectKey]:
    """Return the companions that are served together with this Model, on the same hardware."""
    namespace, name = model["metadata"]["namespace"], model["metadata"]["name"]
    services = store.by_index(INFERENCE_SERVICES, MODEL_INDEX, namespaced(namespace, name))
    beside = {
        companion_name for obj in services if obj["spec"]["modelRef"] == name for companion_name in companion_names(obj)
    }
    return [ObjectKey(namespace, companion) for companion in sorted(beside)]
