"""The controller dies, or an answer is lost, at any write of a Model's life: it ends in the same state.

`make crash` tries each write, `make test` some of them.
"""

import contextlib
import functools
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from controller.models.reconciler import model_reconciler
from controller.pod_settings import PodSettings
from controller.reconcile.executor import Executor
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.plan import Reconciler
from crds.model import Model
from kube import credentials
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.events import EventRecorder
from kube.resources import EVENTS, INFERENCE_SERVICES, JOBS, MODELS, PODS, PVCS, ObjectKey
from kube.store import Store
from kube.transport import AiohttpTransport
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane
from tests.support.api_faults import Crash, Fault, FaultyTransport, Plan, nth, sample_writes
from tests.support.eventually import eventually

pytestmark = pytest.mark.long

ANSWERS = {
    "inspect": {"file": "tiny.gguf", "revision": "v1", "sizeBytes": 1000, "gguf": {"architecture": "llama"}},
    "fetch": {"file": "tiny.gguf", "sizeBytes": 1000},
}
KIND = model_reconciler(PodSettings("pomona:test"))


class ControllerLife:
    """The controller's executor for one Model, restarted after each crash; results of Jobs are put into its store."""

    def __init__(self, transport: FaultyTransport, namespace: str, name: str, kind: Reconciler = KIND) -> None:
        self.transport = transport
        self.key = ObjectKey(namespace, name)
        self.kind = kind
        self.ahead = timedelta()
        """Simulated time that has passed in addition to real time."""

    async def settle(self) -> None:
        """Reconcile until nothing is written any more and no later reconcile is scheduled."""
        for _ in range(30):
            store = await self._load()
            before = len(self.transport.sent)
            executor = Executor(
                client := Client(self.transport),
                store,
                EventRecorder(client, "test", "test"),
                lambda: datetime.now(UTC) + self.ahead,
                lambda: None,
            )
            try:
                again_seconds = await executor.reconcile(self.kind, self.key)
            except (Crash, ApiError, Unreachable):
                continue
            if again_seconds is not None:
                self.ahead += timedelta(seconds=again_seconds)
            elif not any(request.method != "GET" for request in self.transport.sent[before:]):
                return
        raise AssertionError("writes for ever")

    async def _load(self) -> Store:
        store = Store()
        declare_indexes(store)
        client = Client(self.transport)
        for resource in (MODELS, INFERENCE_SERVICES, JOBS, PVCS):
            store.replace(resource, (await client.list(resource, self.key.namespace)).items)
        for job in store.list(JOBS):
            store.put(PODS, _ended_pod(job))
        return store


def _ended_pod(job: Obj) -> Obj:
    """Return the pod of a Job that has succeeded at once, on a node that differs from claim to claim."""
    metadata, template = job["metadata"], job["spec"]["template"]["spec"]
    verb = template["containers"][0]["name"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in template.get("volumes", ())]
    ended = {"exitCode": 0, "message": json.dumps(ANSWERS[verb]), "finishedAt": "2026-11-21T12:00:00Z"}
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": f"pod-of-{metadata['uid']}",
            "resourceVersion": "1",
            "creationTimestamp": "2026-11-21T12:00:00Z",
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": f"node-of-{''.join(claims)}", "volumes": template.get("volumes", [])},
        "status": {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": ended}}]},
    }


async def outcome(client: Client, key: ObjectKey) -> dict[str, Any]:
    """Return the part of the result that must be the same after every fault."""
    status = msgspec.convert(await client.get(MODELS, key.name, key.namespace), Model).status
    owned = {
        str(resource): sorted(obj["metadata"]["name"] for obj in (await client.list(resource, key.namespace)).items)
        for resource in (JOBS, PVCS)
    }
    return {
        "phase": status.phase,
        "file": status.file,
        "conditions": sorted((condition.type, condition.status, condition.reason) for condition in status.conditions),
        "children": {kind: len([name for name in names if name.startswith(key.name)]) for kind, names in owned.items()},
    }


EXPECTED = {
    "phase": "Ready",
    "file": "tiny.gguf",
    "conditions": [("Cached", "True", "Fetched"), ("Ready", "True", "Inspected")],
    "children": {"jobs.batch": 2, "persistentvolumeclaims": 1},
}


@contextlib.asynccontextmanager
async def faulty(plane: ControlPlane) -> AsyncIterator[FaultyTransport]:
    """The controller's own connection, which can fail."""
    kubeconfig = await plane.service_account_kubeconfig(CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT)
    transport = FaultyTransport(AiohttpTransport(credentials.load(kubeconfig)))
    try:
        yield transport
    finally:
        await transport.close()


@pytest.mark.parametrize("fault", [Fault.CRASH_AFTER, Fault.CUT, Fault.TWICE])
async def test_fault_at_any_write_does_not_change_the_result(
    plane: ControlPlane, client: Client, namespace: str, fault: Fault
) -> None:
    async with faulty(plane) as transport:

        async def live(name: str, plan: Plan) -> int:
            """Live through the life of a Model, and return the number of writes."""
            source = {"source": f"http://models.example/{name}.gguf"}
            await client.create(MODELS, {"metadata": {"name": name, "namespace": namespace}, "spec": source})
            service = {"metadata": {"name": f"c-{name}", "namespace": namespace}, "spec": {"modelRef": name}}
            await client.create(INFERENCE_SERVICES, service)
            transport.sent.clear()
            transport.plan = plan
            life = ControllerLife(transport, namespace, name)
            await life.settle()
            assert await outcome(client, life.key) == EXPECTED, name
            return count_writes(transport)

        writes = await live("undisturbed", lambda _: None)
        assert writes >= 6, "claim, two Jobs, and the status after each"
        for number in sample_writes(writes):
            await live(f"m{number:02}", nth(number, fault))
    events = await client.list(EVENTS, namespace)
    assert {"Inspected", "Fetched"} <= {event["reason"] for event in events.items}


COPIES = model_reconciler(PodSettings("pomona:test", node_cache_bytes=0))
"""Copies that no replica needs are deleted at once."""


# A crash before a write is one after the write before it; other faults are those of the test before.
@pytest.mark.parametrize("fault", [Fault.CRASH_AFTER])
async def test_fault_at_any_write_does_not_change_the_copies_on_nodes(
    plane: ControlPlane, client: Client, namespace: str, fault: Fault
) -> None:
    """Two copies are made, one after the other, and evicted when no replica needs them any more."""
    async with faulty(plane) as transport:

        async def live(name: str, plan: Plan) -> int:
            """Live through the life of a Model, and return the number of writes."""
            cache = {"scope": "node", "storageClassName": "none"}
            source = {"source": f"http://models.example/{name}.gguf", "cache": cache}
            await client.create(MODELS, {"metadata": {"name": name, "namespace": namespace}, "spec": source})
            spec = {"modelRef": name, "replicas": 2, "hardware": {"accelerator": "cpu"}}
            service = {"metadata": {"name": f"c-{name}", "namespace": namespace}, "spec": spec}
            await client.create(INFERENCE_SERVICES, service)
            transport.sent.clear()
            transport.plan = plan
            life = ControllerLife(transport, namespace, name, COPIES)
            await life.settle()
            assert await outcome(client, life.key) == EXPECTED | {
                "children": {"jobs.batch": 3, "persistentvolumeclaims": 2}
            }, name
            copies = msgspec.convert(await client.get(MODELS, name, namespace), Model).status.copies
            assert [copy.node for copy in copies] == sorted(f"node-of-{copy.name}" for copy in copies)

            scaled = [{"op": "replace", "path": "/spec/replicas", "value": 0}]
            await client.patch_json(INFERENCE_SERVICES, f"c-{name}", namespace, scaled)
            await life.settle()
            await eventually(functools.partial(has_no_copies, client, life))
            return count_writes(transport)

        writes = await live("undisturbed", lambda _: None)
        assert writes >= 13, "claim, Job and status of each copy, then the status and deletion of each"
        for number in sample_writes(writes):
            await live(f"n{number:02}", nth(number, fault))


def count_writes(transport: FaultyTransport) -> int:
    """Return the number of writes since `sent` was cleared."""
    return sum(request.method != "GET" for request in transport.sent)


async def has_no_copies(client: Client, life: ControllerLife) -> bool:
    """Decide whether all copies are deleted; the controller may have to look again when a claim has gone."""
    await life.settle()
    result = await outcome(client, life.key)
    assert result["conditions"] == [("Cached", "False", "NoConsumers"), ("Ready", "True", "Inspected")], result
    assert result["children"]["persistentvolumeclaims"] == 0, result
    return True
