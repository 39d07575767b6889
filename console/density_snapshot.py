"""All that the density API answers by: cells, models, and what runs where, at one moment."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from console.density_cells import CellProfile, DensityCell, group_cells
from console.density_models import KnownModel
from crds.inferenceservice import InferenceService
from crds.model import Model

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


class DensitySnapshot:
    """The cluster at one moment.

    Args:
        cells: by name.
        models: all that may be asked about.
        services: the services.
        placed: their replicas.
        stored: the Models of the cluster, for the weights on disks of nodes.
    """

    def __init__(
        self,
        cells: Mapping[str, DensityCell],
        models: tuple[KnownModel, ...],
        services: Sequence[InferenceService] = (),
        placed: Sequence[PlacedReplica] = (),
        stored: Sequence[Model] = (),
    ) -> None:
        self.cells = cells
        self.models = models
        self.services = services
        self.placed = placed
        self.stored = stored

    def with_models(self, models: tuple[KnownModel, ...]) -> "DensitySnapshot":
        """Return the same cells, services and replicas with other models to ask about."""
        return DensitySnapshot(self.cells, models, self.services, self.placed, self.stored)

    @functools.cached_property
    def profiles(self) -> tuple[CellProfile, ...]:
        """Cells on which something may be placed, those that are alike together."""
        return group_cells(self.cells)

    @functools.cached_property
    def profile_of(self) -> Mapping[str, CellProfile]:
        """The profile of each cell; without those on which nothing is placed."""
        return {name: profile for profile in self.profiles for name in profile.names}

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """Names of all cells, in the order of the alphabet."""
        return sorted(self.cells)

    @functools.cached_property
    def replicas_on(self) -> Mapping[str, Sequence[PlacedReplica]]:
        """The replicas on each cell."""
        found: dict[str, list[PlacedReplica]] = {}
        for each in self.placed:
            found.setdefault(each.cell, []).append(each)
        return found

    @functools.cached_property
    def replicas_of(self) -> Mapping[tuple[str, str], Sequence[PlacedReplica]]:
        """The replicas of each service, by namespace and name."""
        found: dict[tuple[str, str], list[PlacedReplica]] = {}
        for each in self.placed:
            found.setdefault((each.namespace, each.service), []).append(each)
        return found

    @functools.cached_property
    def stored_on(self) -> Mapping[str, Sequence[Model]]:
        """The Models whose weights are on the disk of each node."""
        found: dict[str, list[Model]] = {}
        for each in self.stored:
            for node in {copy.node for copy in each.status.copies}:
                found.setdefault(node, []).append(each)
        return found

    @functools.cached_property
    def service_of(self) -> Mapping[tuple[str, str], InferenceService]:
        """Each service, by namespace and name."""
        return {(each.metadata.namespace, each.metadata.name): each for each in self.services}

    @functools.cached_property
    def namespaces(self) -> frozenset[str]:
        """All namespaces that have a Model or a service."""
        return frozenset(each.namespace for each in self.models if each.namespace) | frozenset(
            each.metadata.namespace for each in self.services
        )

    def flag_models(self, visible: Visibility) -> bytearray:
        """Return a flag for each model: 1 if it is of the catalog, or of a namespace that may be seen."""
        if visible is None:
            return bytearray(b"\x01") * len(self.models)
        return bytearray(not each.namespace or each.namespace in visible for each in self.models)
