"""Objects that a host's agent writes, as arguments of `Client.apply` and `Client.create`."""

from datetime import UTC, datetime
from typing import Any

from crds.meta import (
    HOSTS_NAMESPACE,
    LABEL_HOST,
    LABEL_MANAGED_BY,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    MANAGED_BY,
    SLICE_MANAGED_BY,
    slice_name,
)
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, EVENTS, LEASES, Resource
from kube.time import micro_time

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
    service, host = process["spec"]["serviceName"], process["spec"]["hostName"]
    metadata = {
        "namespace": process["metadata"]["namespace"],
        "name": slice_name(service, host),
        "labels": {
            LABEL_SERVICE_NAME: service,
            LABEL_SLICE_MANAGED_BY: SLICE_MANAGED_BY,
            LABEL_MANAGED_BY: MANAGED_BY,
            LABEL_HOST: host,
        },
        "ownerReferences": [
            {"apiVersion": process["apiVersion"], "kind": process["kind"]}
            | {key: process["metadata"][key] for key in ("name", "uid")}
        ],
    }
    conditions = {"ready": True, "serving": True, "terminating": False}
    body = {
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 18000, "protocol": "TCP"}],
        "endpoints": [{"addresses": [ADDRESSES[host]], "conditions": conditions}],
    }
    of_metadata = {key: value for key, value in changes.items() if key in {*metadata, "finalizers"}}
    of_body = {key: value for key, value in changes.items() if key not in of_metadata}
    return ENDPOINT_SLICES, {"metadata": metadata | of_metadata, **body, **of_body}


def build_lease(process: Obj, **changes: Any) -> Written:
    """Return the Lease of the host of a process."""
    host = process["spec"]["hostName"]
    spec = {"holderIdentity": host, "leaseDurationSeconds": 40, "renewTime": micro_time(datetime.now(UTC))}
    return LEASES, {"metadata": {"namespace": HOSTS_NAMESPACE, "name": host, **changes}, "spec": spec}


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
