"""Objects that a host's agent writes, as arguments of `Client.apply` and `Client.create`."""

from datetime import UTC, datetime
from typing import Any

from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, EVENTS, LEASES, Resource
from kube.time import micro_time
from tests.support.agent_objects import lease_of_host, slice_of_process

ADDRESSES = {"studio-1": "10.77.150.1", "studio-2": "10.77.150.2"}
"""The hosts and the address that each is granted."""
Written = tuple[Resource, Obj]


def build_process(namespace: str, name: str, host: str | None) -> Obj:
    """Return a MetalProcess; its service is its name without the number."""
    spec = {
        "serviceName": name.rpartition("-")[0],
        "modelName": "tiny",
        "runtime": "llama.cpp",
        "artifact": {"source": "file:///tiny.gguf"},
        "memoryBytes": 1,
        "tokenSecret": "token",
    }
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec | ({"hostName": host} if host else {})}


def build_slice(process: Obj, **changes: Any) -> Written:
    """Return the slice of a process, with which its host publishes it; `changes` replace parts of it."""
    made = slice_of_process(process, ADDRESSES[process["spec"]["hostName"]], 18000)
    of_metadata = {key: value for key, value in changes.items() if key in {*made["metadata"], "finalizers"}}
    of_body = {key: value for key, value in changes.items() if key not in of_metadata}
    return ENDPOINT_SLICES, {**made, **of_body, "metadata": made["metadata"] | of_metadata}


def build_lease(process: Obj, **changes: Any) -> Written:
    """Return the Lease of the host of a process; `changes` replace parts of its metadata."""
    made = lease_of_host(process["spec"]["hostName"])
    return LEASES, {**made, "metadata": made["metadata"] | changes}


def build_event(regarding: Obj, host: str, **changes: Any) -> Written:
    """Return an Event of a host about an object."""
    metadata = regarding["metadata"]
    namespace = metadata.get("namespace", "default")
    about = {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"], "name": metadata["name"]}
    body = {
        "eventTime": micro_time(datetime.now(UTC)),
        "reportingController": "pomona.dev/metal-agent",
        "reportingInstance": host,
        "regarding": about | ({"namespace": namespace} if "namespace" in metadata else {}),
        "type": "Normal",
        "reason": "Ready",
        "action": "Serving",
    }
    name = f"{metadata['name']}.{datetime.now(UTC).timestamp():.6f}".replace(".", "-")
    return EVENTS, {"metadata": {"namespace": namespace, "name": name}, **body, **changes}
