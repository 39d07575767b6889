"""ResourceSlices and ResourceClaims as a DRA driver and the scheduler write them."""

from typing import Any, Final

from kube.client import Obj

DRIVER: Final = "gpu.nvidia.com"
H100: Final = ("NVIDIA H100 80GB HBM3", "81559Mi", "9.0.0")
L4: Final = ("NVIDIA L4", "23034Mi", "8.9.0")


def gpu(name: str, model: tuple[str, str, str] = H100, **fields: Any) -> Obj:
    """Return a whole GPU as NVIDIA's driver reports it."""
    product, memory, capability = model
    return {
        "name": name,
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": product},
            "cudaComputeCapability": {"version": capability},
        },
        "capacity": {"memory": {"value": memory}},
        **fields,
    }


def device_slice(node: str, *devices: Obj, name: str = "", generation: int = 1, count: int = 1) -> Obj:
    """Return a ResourceSlice of a node."""
    return {
        "metadata": {"name": name or f"{node}-gpus", "uid": f"uid-{name or node}", "resourceVersion": str(generation)},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
            "devices": [*devices],
        },
    }


def claim(name: str, node: str, *devices: str, pod: str = "", labels: Obj | None = None, version: int = 1) -> Obj:
    """Return a ResourceClaim with devices of a node, made for the pod with a uid."""
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod, "controller": True}] if pod else []
    results = [{"driver": DRIVER, "pool": node, "device": device, "request": "devices"} for device in devices]
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels or {},
            "ownerReferences": owners,
        },
        "status": {"allocation": {"devices": {"results": results}}} if results else {},
    }
