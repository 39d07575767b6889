"""All that the density API answers by: nodes, hosts, models, and what runs where, at one moment."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec

from console.density_models import KnownModel, build_known_model, list_catalog_models
from controller.placement.cluster_view import ClusterView
from controller.placement.machines import ViewedMachine
from controller.placement.pod_requests import count_requests, find_taken_node
from controller.placement.units import MEMORY
from controller.reconcile.plan import decode_stored
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE
from crds.metalhost import MetalHostStatus
from crds.metalprocess import MetalProcess
from crds.model import Model
from crds.nodefitness import NodeDevice
from crds.serving import ServingOptions
from devices.vendors import Vendors
from fitness.machine_facts import MachineFacts, describe_host_machine, describe_node_machine
from fitness.serving_devices import ServingDevices
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_PROCESSES, MODELS, NODES, PODS, Resource

T = TypeVar("T", bound=msgspec.Struct)

CONTEXT_LENGTH: Final = 8192
"""Context of the fits of all models, as by llmfit."""
_OPTIONS: Final = ServingOptions(context_length=CONTEXT_LENGTH, parallel=1)
Visibility = frozenset[str] | None
"""Namespaces whose Models and services the caller may see; None: all."""


class PlacedReplica(NamedTuple):
    """A replica on a node or host."""

    namespace: str
    service: str
    cell: str
    devices: int
    memory_bytes: int | None
    """Bytes that it takes of the memory of the machine; None: unknown."""


class MachineProfile(NamedTuple):
    """Nodes and hosts on which each model fits equally well."""

    accelerator: str
    replicas: tuple[ServingDevices, ...]
    names: tuple[str, ...]
    """In the order of the alphabet."""


@dataclass(frozen=True, eq=False)
class DensitySnapshot:
    """The cluster at one moment."""

    machines: Mapping[str, ViewedMachine]
    """Nodes and hosts by name."""
    models: tuple[KnownModel, ...]
    """All that may be asked about."""
    services: Sequence[InferenceService] = ()
    placed: Sequence[PlacedReplica] = ()
    """The replicas of the services."""
    stored: Sequence[Model] = ()
    """The Models of the cluster, for the weights on disks of nodes."""

    def describe_machine(self, name: str) -> MachineFacts:
        """Return the hardware of a node or host as its agent reports it, or as the labels of a node without one do."""
        machine = self.machines[name]
        report, hardware = machine.report, machine.hardware
        # A host, which is outside of the cluster, reports by its MetalHost; a node by its NodeFitness, which is empty
        # without an agent.
        if isinstance(report, MetalHostStatus):
            return describe_host_machine(report, machine.free_memory)
        # By labels, all devices of a node are of one product; they have no ids.
        labelled = [NodeDevice(id="", product=hardware.product, memory_bytes=size) for size in hardware.memory_bytes]
        return describe_node_machine(hardware.vendor, report, report.devices or labelled, machine.free_memory)

    @functools.cached_property
    def profiles(self) -> tuple[MachineProfile, ...]:
        """Nodes and hosts on which something may be placed; those with equal devices share a profile.

        Most of a cluster's nodes are alike, so that each fit is computed once for a profile.
        """
        names_of: dict[tuple[str, tuple[ServingDevices, ...]], list[str]] = {}
        for name in self.names:
            machine = self.machines[name]
            # No bases: the hardware is unknown. An exclusion: nothing may be placed there. machine.replicas: the
            # devices of a further replica with what is free now, by their number.
            if machine.bases and not machine.exclusion:
                names_of.setdefault((machine.accelerator, machine.replicas), []).append(name)
        return tuple(
            MachineProfile(accelerator, replicas, tuple(names)) for (accelerator, replicas), names in names_of.items()
        )

    @functools.cached_property
    def profile_of(self) -> Mapping[str, MachineProfile]:
        """The profile of each cell; without those on which nothing is placed."""
        return {name: profile for profile in self.profiles for name in profile.names}

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """Names of all cells, in the order of the alphabet."""
        return sorted(self.machines)

    @functools.cached_property
    def replicas_on(self) -> Mapping[str, Sequence[PlacedReplica]]:
        """The replicas on each cell."""
        by_cell: dict[str, list[PlacedReplica]] = {}
        for replica in self.placed:
            by_cell.setdefault(replica.cell, []).append(replica)
        return by_cell

    @functools.cached_property
    def replicas_of(self) -> Mapping[tuple[str, str], Sequence[PlacedReplica]]:
        """The replicas of each service, by namespace and name."""
        by_service: dict[tuple[str, str], list[PlacedReplica]] = {}
        for replica in self.placed:
            by_service.setdefault((replica.namespace, replica.service), []).append(replica)
        return by_service

    @functools.cached_property
    def stored_on(self) -> Mapping[str, Sequence[Model]]:
        """The Models whose weights are on the disk of each node."""
        by_node: dict[str, list[Model]] = {}
        for model in self.stored:
            for node in {copy.node for copy in model.status.copies}:
                by_node.setdefault(node, []).append(model)
        return by_node

    @functools.cached_property
    def service_of(self) -> Mapping[tuple[str, str], InferenceService]:
        """Each service, by namespace and name."""
        return {(service.metadata.namespace, service.metadata.name): service for service in self.services}

    @functools.cached_property
    def namespaces(self) -> frozenset[str]:
        """All namespaces that have a Model or a service."""
        return frozenset(model.namespace for model in self.models if model.namespace) | frozenset(
            service.metadata.namespace for service in self.services
        )

    def flag_models(self, visible: Visibility) -> bytearray:
        """Return a flag for each model: 1 if it is of the catalog, or of a namespace that may be seen."""
        if visible is None:
            return bytearray(b"\x01") * len(self.models)
        return bytearray(not model.namespace or model.namespace in visible for model in self.models)


class SnapshotSource:
    """The snapshots of a view of the cluster."""

    def __init__(self, view: ClusterView) -> None:
        self.view = view
        self._last: tuple[object, DensitySnapshot] | None = None

    def take_snapshot(self) -> DensitySnapshot:
        """Return the cluster as it is now: the same object until something changes."""
        revision = self.view.revision
        # _last: the revision of the view, which each change raises, and the snapshot that was built at it
        if self._last is None or self._last[0] != revision:
            self._last = revision, self._build_snapshot()
        return self._last[1]

    def _build_snapshot(self) -> DensitySnapshot:
        """Return the cluster as the view has it now.

        `summarize` keeps what is computed from all objects of a kind until one of them changes: a snapshot after a
        change of a pod does not decode thousands of services and Models again.
        """
        store = self.view.store  # the objects of the cluster that are watched

        def decode_all(resource: Resource, kind: type[T]) -> tuple[T, ...]:
            """Return all objects of a kind in the `store` as structs, without those that cannot be decoded."""
            return tuple(decode_stored(store, resource, store.list(resource), kind))

        # summarize(kinds, name, compute): the result is kept under the name until an object of these kinds changes.
        services = store.summarize(
            (INFERENCE_SERVICES,), "services", lambda: decode_all(INFERENCE_SERVICES, InferenceService)
        )
        return DensitySnapshot(
            machines=self.view.list_machines(),
            models=store.summarize((MODELS,), "known models", self._list_models),
            services=services,
            placed=tuple(self._list_replicas()),
            stored=store.summarize((MODELS,), "stored models", lambda: decode_all(MODELS, Model)),
        )

    def _list_models(self) -> tuple[KnownModel, ...]:
        """Return all Models of the cluster, and the models of the catalog.

        `derive` keeps what is computed from one object, so that only Models that have changed are built again.
        """
        # _OPTIONS: the context length with which all fits are computed
        store, vendors = self.view.store, self.view.vendors
        models = list[KnownModel]()
        for obj in store.list(MODELS):
            for model in decode_stored(store, MODELS, [obj], Model):
                # derive(kind, object, name, compute): the result is kept under the name until this object changes.
                build = functools.partial(build_known_model, model, vendors, _OPTIONS)
                models.append(store.derive(MODELS, obj, "known model", build))
        return (*models, *list_catalog_models(tuple(vendors)))

    def _list_replicas(self) -> Iterator[PlacedReplica]:
        """Yield the replicas of services: pods on nodes, and MetalProcesses on hosts outside of the cluster."""
        # 1. Pods on nodes.
        store = self.view.store
        for pod in store.list(PODS):
            # derive(kind, object, name, compute): the result is kept under the name until this object changes.
            describe = functools.partial(_describe_replica, pod, self.view.vendors)
            replica = store.derive(PODS, pod, "replica", describe)
            if replica is not None:
                yield replica

        # 2. Processes on hosts. One without a host is not placed yet.
        for process in decode_stored(store, METAL_PROCESSES, store.list(METAL_PROCESSES), MetalProcess):
            host, service = process.spec.host_name, process.spec.service_name
            if host and service:
                # A host with the name of a node has this prefix among the machines, too.
                name = f"host/{host}" if store.get(NODES, host) else host
                namespace, memory_bytes = process.metadata.namespace, process.spec.memory_bytes
                # devices=0: a process uses the processor and GPU of its host, which has no devices to count.
                yield PlacedReplica(namespace, service, cell=name, devices=0, memory_bytes=memory_bytes)


def _describe_replica(pod: Obj, vendors: Vendors) -> PlacedReplica | None:
    """Return a pod as a replica of a service on a node; None if it belongs to no service, or has no node yet.

    Its devices are the resources of any vendor that it requests.
    """
    service, node = (pod["metadata"].get("labels") or {}).get(LABEL_SERVICE), find_taken_node(pod)
    if not service or not node:
        return None
    amounts = count_requests(pod["spec"])
    devices = sum(count for name, count in amounts.items() if any(vendor.offers(name) for vendor in vendors.values()))
    return PlacedReplica(pod["metadata"]["namespace"], service, node, devices, memory_bytes=amounts.get(MEMORY))
