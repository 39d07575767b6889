"""The objects that a metal agent writes, for hosts whose agent is simulated."""

from collections.abc import Iterable
from datetime import UTC, datetime

from crds.meta import HOSTS_NAMESPACE
from kube.client import Obj
from kube.resources import ObjectKey
from kube.time import micro_time
from metal_agent.cluster.endpoint_slices import LEASE_SECONDS, SliceMember, build_slice


def lease_of_host(name: str, duration_seconds: int = LEASE_SECONDS) -> Obj:
    """Return the Lease of a host, renewed just now."""
    spec = {
        "holderIdentity": name,
        "leaseDurationSeconds": duration_seconds,
        "renewTime": micro_time(datetime.now(UTC)),
    }
    return {"metadata": {"name": name, "namespace": HOSTS_NAMESPACE}, "spec": spec}


def status_of_host(
    address: str,
    budget_bytes: int,
    available_bytes: int,
    processes: Iterable[Obj] = (),
    runtimes: Iterable[str] = ("llama.cpp",),
) -> Obj:
    """Return the status of a host with these engines, for which `processes` reserve memory."""
    return {
        "address": address,
        "runtimes": [*runtimes],
        "budgetBytes": budget_bytes,
        "availableBytes": available_bytes,
        "processes": [{"uid": process["metadata"]["uid"]} for process in processes],
    }


def slice_of_process(process: Obj, address: str, port: int) -> Obj:
    """Return the slice of a bound process that is ready and the only one of its service on its host."""
    metadata, spec = process["metadata"], process["spec"]
    service = ObjectKey(metadata["namespace"], spec["serviceName"])
    member = SliceMember(metadata["uid"], metadata["name"], ready=True)
    endpoint_slice = build_slice(service, spec["hostName"], address, port, [member])
    assert endpoint_slice is not None
    return endpoint_slice
