"""The cluster as the extender sees it: nodes, their fitness, measurements, services and Models; it only reads.

A change of a node or measurement goes into the speed table at once. A service is looked up when a pod of it is
scheduled, so that the thousands of services that change meanwhile cost nothing.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import structlog

from controller.placement.cluster_view import MEASUREMENTS, ClusterView
from controller.reconcile.plan import decode_stored
from controller.services.serving_choice import apply_choice
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE
from crds.model import Model
from devices.vendors import Vendor, Vendors
from extender.node_facts import read_node
from extender.speed_table import ScoreBoard, SpeedTable
from extender.subject import ServedModel, describe_subject, find_stated_hash, read_demand
from extender.wire import PodFacts
from fitness.performance import hash_model
from kube.client import Client, Obj
from kube.resources import INFERENCE_SERVICES, MODELS, NODE_FITNESSES, NODES, Resource
from kube.watch import Selection

log = structlog.get_logger()

AGING_SECONDS: Final = 10.0
"""Pause between two looks for facts that have become stale."""


KINDS: Final = (MEASUREMENTS, *map(Selection, (NODES, NODE_FITNESSES, INFERENCE_SERVICES, MODELS)))
"""The kinds that the extender may list."""


def open_view(vendors: Vendors, annotation_prefix: str, **clocks: Any) -> ClusterView:
    """Return an empty view of the cluster for the extender, which keeps only the parts of nodes that scores depend on.

    A Node has many KB, and a cluster thousands of them. `clocks` are those of the view, for tests.
    """
    # Scores depend on the labels in the table of vendors, such as that of the product, and on two annotations.
    labels = frozenset(label for vendor in vendors.values() for label in _list_labels(vendor))
    annotations = frozenset({f"{annotation_prefix}/gpu.util", f"{annotation_prefix}/cost"})

    def keep_part(node: Obj) -> Obj:
        """Return the identity of a node, and those of its labels and annotations by which it is scored.

        `labels` and `annotations` are the names to keep. The view calls this function for each Node that it reads.
        """
        metadata = node["metadata"]
        kept = {name: metadata.get(name, "") for name in ("name", "uid", "resourceVersion")}
        kept["labels"] = _select(metadata.get("labels") or {}, labels)
        kept["annotations"] = _select(metadata.get("annotations") or {}, annotations)
        return {"metadata": kept}

    return ClusterView(vendors, KINDS, parts={NODES: keep_part}, **clocks)


class ExtenderFeed:
    """Finds score boards for pods, and keeps the speed table equal to the nodes of the cluster.

    Args:
        table: gets nodes; its measurements are those of the view.
        view: the cluster, by `open_view`.
        annotation_prefix: prefix of the annotations with utilization and cost of nodes.
    """

    def __init__(self, table: SpeedTable, view: ClusterView, annotation_prefix: str) -> None:
        """Follow the view from now on: each change of a node or of a measurement goes into the table."""
        self.view = view
        self._table = table
        self._annotation_prefix = annotation_prefix
        self._last_stale: frozenset[str] = frozenset()
        """Nodes whose agents were silent when `update_stale` ran last."""
        self._logged_annotations: dict[str, tuple[tuple[str, str], ...]] = {}
        """Annotations that could not be read, by node: each is logged once."""
        view.store.subscribe(self._take_change)
        view.measured.subscribe(lambda _model_hash: table.forget_speeds())

    async def run(self, client: Client) -> None:
        """Follow the cluster for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.view.follow(client))
            tasks.create_task(self._update_stale_for_ever())

    def find_board(self, pod: PodFacts) -> ScoreBoard | None:
        """Return the scores of all nodes for a pod; None if its model is unknown.

        A pod of a service names the service by a label, which leads to the Model. Any other pod may state the hash of a
        model by a label; its scores come from measurements alone.
        """
        demand = read_demand(pod, self.view.vendors)
        if name := pod.labels.get(LABEL_SERVICE):
            served_and_hash = self._find_served_model(pod.namespace, name)
            if served_and_hash is None:
                return None
            served, model_hash = served_and_hash
            # A subject is what is scored: the model and the devices of a replica.
            return self._table.find_board(describe_subject(model_hash, pod, demand, served), served)
        stated_hash = find_stated_hash(pod)
        return self._table.find_board(describe_subject(stated_hash, pod, demand)) if stated_hash else None

    def update_stale(self) -> None:
        """Update the nodes whose agents fell silent or report again: the facts of silent ones are dropped."""
        last, self._last_stale = self._last_stale, self.view.freshness.list_stale()
        for name in last ^ self._last_stale:
            self._update_node(name)

    async def _update_stale_for_ever(self) -> None:
        while True:
            await asyncio.sleep(AGING_SECONDS)
            self.update_stale()

    def _find_served_model(self, namespace: str, name: str) -> tuple[ServedModel, str] | None:
        """Return the Model that a service serves, and the hash by which its measurements are found.

        None: the service or its Model does not exist or cannot be decoded, or no engine is chosen for the service yet.
        The result is kept until one of the two objects changes.
        """
        # service, model: the two objects as the API server sends them, not decoded
        store = self.view.store
        service = store.get(INFERENCE_SERVICES, name, namespace)
        reference = service["spec"].get("modelRef") if service is not None else None
        model = store.get(MODELS, reference, namespace) if isinstance(reference, str) else None
        if service is None or model is None:
            return None

        def decode() -> tuple[ServedModel, str] | None:
            """Return both decoded; None: one cannot be decoded, or no engine is chosen.

            `service` and `model` are the objects that the outer function has found.
            """
            # `decode_stored` returns a list: each loop runs once, or not at all if the object cannot be decoded.
            for decoded in decode_stored(store, INFERENCE_SERVICES, [service], InferenceService):
                for served in decode_stored(store, MODELS, [model], Model):
                    runtime = decoded.status.runtime
                    if not runtime:
                        return None
                    options = apply_choice(decoded).spec
                    return ServedModel(served, decoded, runtime), hash_model(served, runtime, options)
            return None

        # Kept under the name "served" until the service changes, or `model` is another object.
        return store.derive(INFERENCE_SERVICES, service, "served", decode, model)

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        if resource in {NODES, NODE_FITNESSES}:
            self._update_node((new or old or {})["metadata"]["name"])

    def _update_node(self, name: str) -> None:
        """Put a node into the table as the view has it now, or remove it if it is gone.

        The report of an agent that is silent does not count. Annotations that cannot be read are logged once.
        """
        node = self.view.store.get(NODES, name)
        if node is None:
            self._logged_annotations.pop(name, None)
            self._table.remove_node(name)
            return

        # 1. Put its facts into the table.
        metadata = node["metadata"]
        # report: the NodeFitness of the node's agent; a stale one counts as none
        report = None if self.view.freshness.is_stale(name) else self.view.find_report(name)
        reading = read_node(
            metadata["labels"], metadata["annotations"], report, self.view.vendors, self._annotation_prefix
        )
        self._table.set_node(name, reading.facts)

        # 2. Log the annotations that state no valid number, once: reading.ignored has their names and values.
        if reading.ignored != self._logged_annotations.get(name, ()):
            self._logged_annotations[name] = reading.ignored
            for annotation, value in reading.ignored:
                log.warning(
                    "annotation_ignored",
                    node=name,
                    annotation=annotation,
                    value=value,
                    way_out="set it to a plain number from 0 (gpu.util: to 1), or remove it",
                )


def _list_labels(vendor: Vendor) -> list[str]:
    stated = (vendor.product_label, vendor.memory_label, vendor.family_label)
    return [label for label in (*stated, vendor.shared_label, vendor.replicas_label) if label]


def _select(values: Mapping[str, str], names: frozenset[str]) -> dict[str, str]:
    return {name: values[name] for name in names if name in values}
