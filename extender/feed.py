"""The watches of the extender: nodes, their fitness, measurements, services and Models; it only reads.

A change of a node or measurement goes into the speed table at once. A service is looked up when a pod of it is
scheduled, so that the thousands of services that change meanwhile cost nothing.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec
import structlog

from crds.inferenceservice import InferenceService
from crds.meta import CONTROLLER_NAMESPACE
from crds.model import Model
from crds.nodefitness import STALE_SECONDS, NodeFitness, NodeFitnessStatus
from devices.vendors import Vendor, Vendors
from extender.node_facts import read_node
from extender.speed_table import ScoreBoard, SpeedTable
from extender.subject import (
    ServedModel,
    describe_subject,
    find_service_name,
    find_stated_hash,
    identify_model,
    read_demand,
)
from extender.wire import PodFacts
from fitness.performance_store import SELECTOR
from kube.client import Client, Obj
from kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, MODELS, NODE_FITNESSES, NODES, Resource
from kube.store import Store
from kube.watch import reflect

log = structlog.get_logger()

_KINDS: Final = (NODES, NODE_FITNESSES, CONFIG_MAPS, INFERENCE_SERVICES, MODELS)
AGING_SECONDS: Final = 10.0
"""Pause between two looks for facts that have become stale."""
_MOST_MESSAGE: Final = 500

T = TypeVar("T")


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _PartialNode(msgspec.Struct):
    metadata: _Metadata


_decode_node = msgspec.json.Decoder(_PartialNode).decode


class _Heartbeat(NamedTuple):
    observed_at: str
    seen_at: float
    """When this process has seen it first, by its own clock: that of the node may be wrong."""


class ExtenderFeed:
    """The cluster as the extender sees it.

    Args:
        table: gets nodes and measurements.
        vendors: the table of vendors.
        annotation_prefix: prefix of the annotations with utilization and cost of nodes.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        table: SpeedTable,
        vendors: Vendors,
        annotation_prefix: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = Store()
        self._table = table
        self._vendors = vendors
        self._annotation_prefix = annotation_prefix
        self._clock = clock
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._silent: set[str] = set()
        """Nodes whose agents sent the last heartbeat too long ago; an edit of their NodeFitness is none."""
        self._ignored: dict[str, tuple[tuple[str, str], ...]] = {}
        """Annotations that could not be read, by node: each is logged once."""
        self._lists = {kind: asyncio.Event() for kind in _KINDS}
        labels = {vendor_label for each in vendors.values() for vendor_label in _list_labels(each)}
        self._kept_labels = frozenset(labels)
        self._kept_annotations = frozenset({f"{annotation_prefix}/gpu.util", f"{annotation_prefix}/cost"})
        self.store.subscribe(self._take_change)

    @property
    def is_complete(self) -> bool:
        """True once everything was listed."""
        return all(each.is_set() for each in self._lists.values())

    async def run(self, client: Client) -> None:
        """Follow the cluster for ever."""
        async with asyncio.TaskGroup() as tasks:
            for kind, listed in self._lists.items():
                is_store = kind is CONFIG_MAPS
                tasks.create_task(
                    reflect(
                        client,
                        self.store,
                        kind,
                        CONTROLLER_NAMESPACE if is_store else None,
                        label_selector=SELECTOR if is_store else "",
                        synced=listed,
                        read=self.read_node_part if kind is NODES else None,
                    )
                )
            tasks.create_task(self._age_for_ever())

    async def wait_complete(self) -> None:
        """Wait until everything was listed."""
        for each in self._lists.values():
            await each.wait()

    def read_node_part(self, raw: msgspec.Raw) -> Obj:
        """Decode the part of a Node by which it is scored."""
        metadata = _decode_node(raw).metadata
        return {
            "metadata": {
                "name": metadata.name,
                "uid": metadata.uid,
                "resourceVersion": metadata.resource_version,
                "labels": _select(metadata.labels, self._kept_labels),
                "annotations": _select(metadata.annotations, self._kept_annotations),
            }
        }

    def find_board(self, pod: PodFacts) -> ScoreBoard | None:
        """Return the answers for the model of a pod; None: it is not known."""
        demand = read_demand(pod, self._vendors)
        if name := find_service_name(pod):
            found = self._find_served(pod.namespace, name)
            if found is None:
                return None
            served, model_hash = found
            return self._table.find_board(describe_subject(model_hash, pod, demand, served), served)
        stated = find_stated_hash(pod)
        return self._table.find_board(describe_subject(stated, pod, demand)) if stated else None

    def age(self) -> None:
        """Drop the facts of node agents that are silent."""
        now = self._clock()
        stale = {name for name, (_, seen_at) in self._heartbeats.items() if now - seen_at > STALE_SECONDS}
        for name in stale - self._silent:
            self._silent.add(name)
            self._update_node(name)

    async def _age_for_ever(self) -> None:
        while True:
            await asyncio.sleep(AGING_SECONDS)
            self.age()

    def _find_served(self, namespace: str, name: str) -> tuple[ServedModel, str] | None:
        """Return the Model that a service serves, and its hash; None: they are not known, or no engine is chosen."""
        found = self.store.get(INFERENCE_SERVICES, name, namespace)
        if found is None:
            return None
        reference = found["spec"].get("modelRef")
        model = self.store.get(MODELS, reference, namespace) if isinstance(reference, str) else None
        if model is None:
            return None
        return self.store.derive(INFERENCE_SERVICES, found, "served", lambda: _decode_served(found, model), model)

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        metadata = (new or old or {})["metadata"]
        if resource is NODES:
            self._update_node(metadata["name"])
        elif resource is NODE_FITNESSES:
            self._take_heartbeat(metadata["name"], new)
            self._update_node(metadata["name"])
        elif resource is CONFIG_MAPS and new is None:
            self._table.remove_measurements(metadata["name"])
        elif resource is CONFIG_MAPS and new is not None:
            for problem in self._table.set_measurements(new):
                log.warning("measurement_ignored", problem=problem[:_MOST_MESSAGE])

    def _take_heartbeat(self, name: str, fitness: Obj | None) -> None:
        status = (fitness or {}).get("status") or {}
        observed_at = status.get("observedAt") or ""
        known = self._heartbeats.get(name)
        if not observed_at:
            self._heartbeats.pop(name, None)
            self._silent.discard(name)
        elif known is None or known.observed_at != observed_at:
            self._heartbeats[name] = _Heartbeat(observed_at, self._clock())
            self._silent.discard(name)

    def _update_node(self, name: str) -> None:
        node = self.store.get(NODES, name)
        if node is None:
            self._ignored.pop(name, None)
            self._table.remove_node(name)
            return
        metadata = node["metadata"]
        reading = read_node(
            *(metadata["labels"], metadata["annotations"], self._find_fitness(name)),
            *(self._vendors, self._annotation_prefix),
        )
        self._table.set_node(name, reading.facts)
        if reading.ignored != self._ignored.get(name, ()):
            self._ignored[name] = reading.ignored
            for annotation, value in reading.ignored:
                log.warning(
                    "annotation_ignored",
                    node=name,
                    annotation=annotation,
                    value=value,
                    way_out="set it to a plain number from 0 (gpu.util: to 1), or remove it",
                )

    def _find_fitness(self, name: str) -> NodeFitnessStatus | None:
        """Return what a node agent reports; None: nothing, or it is stale or cannot be read."""
        found = self.store.get(NODE_FITNESSES, name)
        if found is None or name not in self._heartbeats or name in self._silent:
            return None
        fitness = self.store.derive(NODE_FITNESSES, found, "struct", lambda: _decode(found, NodeFitness))
        return fitness.status if fitness is not None else None


def _list_labels(vendor: Vendor) -> list[str]:
    stated = (vendor.product_label, vendor.memory_label, vendor.shared_label, vendor.replicas_label)
    return [each for each in stated if each]


def _select(values: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: values[name] for name in names if name in values}


def _decode(obj: Obj, struct: type[T]) -> T | None:
    try:
        return msgspec.convert(obj, struct)
    except msgspec.ValidationError as error:
        log.warning("object_not_decoded", kind=struct.__name__, name=obj["metadata"]["name"], error=str(error))
        return None


def _decode_served(service_obj: Obj, model_obj: Obj) -> tuple[ServedModel, str] | None:
    service, model = _decode(service_obj, InferenceService), _decode(model_obj, Model)
    if service is None or model is None:
        return None
    model_hash = identify_model(model, service)
    return (ServedModel(model, service, service.status.runtime), model_hash) if model_hash else None
