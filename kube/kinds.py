"""Kubernetes' own kinds as typed structs, with the fields that are read; those of Pomona are in `crds/`."""

from typing import Any

from crds.meta import ApiStruct, ObjectMeta


class _Requests(ApiStruct, frozen=True):
    requests: dict[str, str] = {}


class ClaimSpec(ApiStruct, frozen=True):
    """Demands on a volume."""

    access_modes: list[str] = []
    volume_name: str = ""
    """The volume that it is bound to; empty if there is none yet."""
    storage_class_name: str | None = None
    resources: _Requests = _Requests()


class _ClaimCondition(ApiStruct, frozen=True):
    message: str = ""


class ClaimStatus(ApiStruct, frozen=True):
    """State of a claim."""

    phase: str = ""
    capacity: dict[str, str] = {}
    conditions: list[_ClaimCondition] = []


class PersistentVolumeClaim(ApiStruct, frozen=True):
    """`v1.PersistentVolumeClaim`."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()

    @property
    def is_bound(self) -> bool:
        """True if it has a volume."""
        return self.status.phase == "Bound"

    @property
    def requested(self) -> str:
        """The size that it asks for."""
        return self.spec.resources.requests.get("storage", "")

    @property
    def capacity(self) -> str:
        """The size of its volume; empty if it has none yet."""
        return self.status.capacity.get("storage", "")


class _NodeSelector(ApiStruct, frozen=True):
    node_selector_terms: list[dict[str, Any]] = []


class _VolumeNodeAffinity(ApiStruct, frozen=True):
    required: _NodeSelector | None = None


class _VolumeSpec(ApiStruct, frozen=True):
    node_affinity: _VolumeNodeAffinity = _VolumeNodeAffinity()


class PersistentVolume(ApiStruct, frozen=True):
    """`v1.PersistentVolume`."""

    spec: _VolumeSpec = _VolumeSpec()

    @property
    def node_terms(self) -> list[dict[str, Any]] | None:
        """Node selector terms of which a node must meet one to mount the volume; None if every node can mount it."""
        required = self.spec.node_affinity.required
        return required.node_selector_terms if required is not None else None


class _DeviceTaint(ApiStruct, frozen=True):
    effect: str = ""


class _ConsumedCounters(ApiStruct, frozen=True):
    counter_set: str


class Device(ApiStruct, frozen=True):
    """One device of a ResourceSlice."""

    name: str
    node_name: str = ""
    attributes: dict[str, dict[str, Any]] = {}
    capacity: dict[str, dict[str, Any]] = {}
    taints: list[_DeviceTaint] = []
    consumes_counters: list[_ConsumedCounters] = []


class _DevicePool(ApiStruct, frozen=True):
    name: str
    generation: int = 0
    resource_slice_count: int = 0


class SliceSpec(ApiStruct, frozen=True):
    """Devices of a driver, which are a part of a pool."""

    driver: str
    pool: _DevicePool
    node_name: str = ""
    devices: list[Device] = []


class ResourceSlice(ApiStruct, frozen=True):
    """`resource.k8s.io/v1.ResourceSlice`."""

    metadata: ObjectMeta
    spec: SliceSpec


class AllocatedDevice(ApiStruct, frozen=True):
    """A device that a ResourceClaim has."""

    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class _DeviceAllocation(ApiStruct, frozen=True):
    results: list[AllocatedDevice] = []


class _Allocation(ApiStruct, frozen=True):
    devices: _DeviceAllocation = _DeviceAllocation()


class _ResourceClaimStatus(ApiStruct, frozen=True):
    allocation: _Allocation = _Allocation()


class ResourceClaim(ApiStruct, frozen=True):
    """`resource.k8s.io/v1.ResourceClaim`."""

    metadata: ObjectMeta = ObjectMeta()
    status: _ResourceClaimStatus = _ResourceClaimStatus()
