"""The pools that administrators define: which node or host belongs to which pool, and the limits of each.

Each accelerator has a pool with its own name, also if nobody defines one. An AcceleratorPool of that name limits it;
all others take the nodes or hosts that they select.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from controller.placement.pool_limits import PoolQuota, PoolRules, Quotas
from controller.reconcile.plan import decode_stored
from crds.acceleratorpool import WHOLE_PERCENT, AcceleratorPool
from crds.quantity import quantity_bytes
from devices.vendors import Vendors
from kube.client import Obj
from kube.resources import ACCELERATOR_POOLS
from kube.store import Store

METAL: Final = "metal"
"""The accelerator of all hosts."""


class DefinedPool(NamedTuple):
    """An AcceleratorPool without contradiction."""

    name: str
    accelerator: str
    rules: PoolRules
    quotas: tuple[tuple[str, PoolQuota], ...] = ()
    """By namespace."""

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node or host with these labels belongs to it, unless another pool comes first."""
        return all(labels.get(name) == value for name, value in self.rules.node_labels)


class RefusedPool(NamedTuple):
    """An AcceleratorPool that is as good as absent."""

    name: str
    message: str


class PoolTable(NamedTuple):
    """All pools; equal while nothing of any AcceleratorPool has changed but its status."""

    accelerators: tuple[str, ...] = ()
    """Accelerators that have a pool of their own name."""
    defined: tuple[DefinedPool, ...] = ()
    """By name."""
    refused: tuple[RefusedPool, ...] = ()

    def list_selecting(self, accelerator: str, labels: Mapping[str, str]) -> list[str]:
        """Return the pools that select a node or host; it belongs to the first.

        The pool named like its accelerator selects none: it has what all others leave.
        """
        return [
            pool.name
            for pool in self.defined
            if pool.accelerator == accelerator and pool.name != accelerator and pool.selects(labels)
        ]

    def find_pool(self, accelerator: str, labels: Mapping[str, str]) -> str:
        """Return the pool of a node or host: the first that selects it, else that of its accelerator."""
        selecting = self.list_selecting(accelerator, labels)
        return selecting[0] if selecting else accelerator

    def list_pools(self, accelerator: str) -> tuple[str, ...]:
        """Return all pools of an accelerator: first that of its own name, then the others by name."""
        others = (pool.name for pool in self.defined if pool.accelerator == accelerator and pool.name != accelerator)
        return (accelerator, *others)

    def find_accelerator(self, pool: str) -> str:
        """Return the accelerator of a pool; empty if there is no such pool."""
        accelerator = next((defined.accelerator for defined in self.defined if defined.name == pool), "")
        return accelerator or (pool if pool in self.accelerators else "")

    def find_overcommit_percent(self, pool: str) -> int:
        """Return the memory that pods on one time-sliced device of a pool may take together, in percent."""
        return next(
            (defined.rules.overcommit_percent for defined in self.defined if defined.name == pool), WHOLE_PERCENT
        )

    @property
    def rules(self) -> Mapping[str, PoolRules]:
        """The rules of each pool that is defined."""
        return {pool.name: pool.rules for pool in self.defined}

    @property
    def quotas(self) -> Quotas:
        """The quotas by namespace and pool."""
        return {(namespace, pool.name): quota for pool in self.defined for namespace, quota in pool.quotas}


NO_POOLS: Final = PoolTable()


def read_pools(store: Store, vendors: Vendors) -> PoolTable:
    """Return the pools of the store: the same object until one of them changes, its status aside."""

    def compute() -> PoolTable:
        pools = decode_stored(store, ACCELERATOR_POOLS, store.list(ACCELERATOR_POOLS), AcceleratorPool)
        return _share(build_table((pool for pool in pools if pool.metadata.deletion_timestamp is None), vendors))

    return store.summarize((ACCELERATOR_POOLS,), "pool table", compute)


@functools.lru_cache(maxsize=64)
def _share(table: PoolTable) -> PoolTable:
    """Return the object that equal tables share: a pool's status changes all the time."""
    return table


def build_table(pools: Iterable[AcceleratorPool], vendors: Vendors) -> PoolTable:
    """Return the table of these pools."""
    entries = [_read_pool(pool, vendors) for pool in sorted(pools, key=lambda pool: pool.metadata.name)]
    return PoolTable(
        accelerators=tuple(name for name, vendor in vendors.items() if vendor.has_devices),
        defined=tuple(entry for entry in entries if isinstance(entry, DefinedPool)),
        refused=tuple(entry for entry in entries if isinstance(entry, RefusedPool)),
    )


def _read_pool(pool: AcceleratorPool, vendors: Vendors) -> DefinedPool | RefusedPool:
    """Return a pool as its spec defines it, or why it is refused."""
    # 1. Refuse a pool of an accelerator without devices, or with the name of another accelerator.
    name, spec = pool.metadata.name, pool.spec
    vendor = vendors.get(spec.accelerator)
    if vendor is None or not vendor.has_devices:
        choices = ", ".join(sorted(accelerator for accelerator, entry in vendors.items() if entry.has_devices))
        state = "does not exist" if vendor is None else "has no devices"
        return RefusedPool(name, f"accelerator {spec.accelerator} {state}: use one of {choices}")
    # Each accelerator has a pool of its own name, for all that no other pool selects.
    if name in vendors and name != spec.accelerator:
        message = f"{name} is the name of another accelerator, whose pool has it: choose another name for this pool"
        return RefusedPool(name, message)

    # 2. Read its limits.
    rules = PoolRules(
        nominal=_read_quantity(spec.nominal),
        borrowing_limit=_read_quantity(spec.borrowing_limit),
        lending_limit=_read_quantity(spec.lending_limit),
        elastic=spec.elastic.max_waiting if spec.elastic is not None else 0,
        # The selector of a pool named like its accelerator does not count.
        node_labels=tuple(sorted(spec.node_selector.items())) if name != spec.accelerator else (),
        overcommit_percent=spec.memory_overcommit_percent or WHOLE_PERCENT,
    )
    quotas = tuple((quota.namespace, PoolQuota(quota.devices, _read_quantity(quota.memory))) for quota in spec.quotas)
    return DefinedPool(name, spec.accelerator, rules, quotas)


def _read_quantity(quantity: int | str | None) -> int | None:
    """Return a quantity of a spec in bytes, or as a number of devices; None if it is not stated."""
    return None if quantity is None else quantity_bytes(quantity)


def labels_of(obj: Obj) -> Mapping[str, str]:
    """Return the labels of a node or host."""
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return labels
