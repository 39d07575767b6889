"""The main job from the user's side: kubectl applies files, clients send requests to addresses in EndpointSlices."""

import asyncio
import functools
import json
import time
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import psutil

from controller.reconcile.conditions import find
from crds.inferenceservice import InferenceService
from crds.meta import API_VERSION, LABEL_SERVICE, Condition
from crds.metalhost import MetalHost as MetalHostObject
from crds.metalprocess import MetalProcess
from crds.model import Model
from kube.client import Client, Obj
from kube.resources import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    PODS,
    PVCS,
    SECRETS,
    SERVICES,
    Resource,
)
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.live_processes import find_processes
from tests.support.watched_states import watch_states

GIB = 2**30
READY_SECONDS = 120.0
"""Limit for a new service: Jobs, weights, placement, start of an engine, a token. No claim about speed."""
CALL_TIMEOUT = aiohttp.ClientTimeout(total=20)
OUTDATED_SECONDS = 1.0
"""Age of endpoints after which a client reads them anew: one that is withdrawn answers for two seconds, in which a busy
machine may not have run the client."""
OWNED = (DEPLOYMENTS, SERVICES, SECRETS, METAL_PROCESSES, PODS, ENDPOINT_SLICES)
"""Kinds of the objects that belong to a service."""
WRITTEN = (*OWNED, INFERENCE_SERVICES, MODELS, JOBS, PVCS)
PATHS = {"pod": "cpu", "host": "metal"}
"""The two ways to serve, and the accelerator that selects each."""


class Answer(NamedTuple):
    """A service's answer to a request."""

    status: int
    text: str


class Cluster:
    """One namespace, as a user handles it; `files` serves the weights of the Models."""

    def __init__(self, plane: ControlPlane, client: Client, namespace: str, files: FileServer, folder: Path) -> None:
        self.client = client
        self.namespace = namespace
        self.files = files
        self._plane = plane
        self._folder = folder

    async def kubectl(self, *arguments: str) -> str:
        return await self._plane.kubectl(f"--namespace={self.namespace}", *arguments)

    async def apply(self, *objects: Obj) -> None:
        """Apply the objects with `kubectl apply`, as one file."""
        path = self._folder / "applied.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        await self.kubectl("apply", f"--filename={path}")

    async def edit(self, service: str, **spec: object) -> None:
        await self.kubectl("patch", "isvc", service, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def model(self, name: str = "tiny", *, file: str = "tiny.gguf", **spec: Any) -> Obj:
        source = {"source": f"{self.files.url}/{file}"}
        return {
            "apiVersion": API_VERSION,
            "kind": "Model",
            "metadata": {"name": name},
            "spec": source | spec,
        }

    def service(self, name: str, accelerator: str, **spec: Any) -> Obj:
        # One thread per engine: the machine of the tests has few cores and runs many engines.
        defaults = {"modelRef": "tiny", "hardware": {"accelerator": accelerator}, "extraArgs": ["-t", "1"]}
        return {
            "apiVersion": API_VERSION,
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": defaults | spec,
        }

    async def gateway_key(self, name: str, **spec: Any) -> str:
        """Apply a GatewayKey, and return the key that the controller has made for it."""
        metadata = {"name": name}
        await self.apply({"apiVersion": API_VERSION, "kind": "GatewayKey", "metadata": metadata, "spec": spec})

        async def made() -> Obj:
            key = await self.client.get(GATEWAY_KEYS, name, self.namespace)
            assert key["status"]["digest"]
            return await self.client.get(SECRETS, f"{name}-key", self.namespace)

        return b64decode((await eventually(made))["data"]["key"]).decode()

    async def services(self) -> list[str]:
        return [obj["metadata"]["name"] for obj in (await self.client.list(INFERENCE_SERVICES, self.namespace)).items]

    async def get(self, service: str) -> InferenceService:
        return msgspec.convert(await self.client.get(INFERENCE_SERVICES, service, self.namespace), InferenceService)

    async def wait_for_phase(
        self, service: str, phase: str, reason: str, seconds: float = READY_SECONDS
    ) -> InferenceService:
        """Wait until the service is in this phase for this reason, decided for its present spec."""

        async def reached() -> InferenceService:
            inference_service = await self.get(service)
            assert inference_service.status.observed_generation == inference_service.metadata.generation
            ready = condition(inference_service)
            assert (inference_service.status.phase, ready.reason) == (phase, reason), inference_service.status
            assert ready.observed_generation == inference_service.metadata.generation
            return inference_service

        return await eventually(reached, seconds)

    async def wait_for_model(self, name: str, kind: str, reason: str) -> Model:
        """Wait until a condition of the Model has this reason."""

        async def reached() -> Model:
            model = msgspec.convert(await self.client.get(MODELS, name, self.namespace), Model)
            condition = find(model.status.conditions, kind)
            assert condition is not None, model.status
            assert condition.reason == reason, model.status
            return model

        return await eventually(reached, READY_SECONDS)

    async def ready(self, *services: str) -> None:
        for service in services:
            inference_service = await self.wait_for_phase(service, "Ready", "Serving")
            assert condition(inference_service).status == "True"

    async def urls(self, service: str) -> list[str]:
        """Return the ready addresses in the service's EndpointSlices."""
        slices = await self.client.list(ENDPOINT_SLICES, self.namespace, label_selector=slices_of(service))
        return ready_urls(slices.items)

    async def token(self, service: str) -> str:
        secret = await self.client.get(SECRETS, f"{service}-token", self.namespace)
        return b64decode(secret["data"]["token"]).decode()

    async def ask(self, service: str, *, token: str | None = None) -> Answer:
        """Send a request to a ready address, with the service's token unless another is given; "" sends none."""
        token = await self.token(service) if token is None else token
        return await ask((await self.urls(service))[0], service, token)

    async def answers(self, service: str) -> bool:
        """Return whether the service has ready addresses and each of them answers."""
        token = await self.token(service)
        urls = await self.urls(service)
        said = [await ask(url, service, token) for url in urls]
        return bool(said) and all(answer.status == 200 and "Hello" in answer.text for answer in said)

    async def replicas(self, service: str) -> list[str]:
        """Return the uids of the service's pods and processes that are not being deleted."""
        selector = f"{LABEL_SERVICE}={service}"
        children = [
            obj["metadata"]
            for resource in (PODS, METAL_PROCESSES)
            for obj in (await self.client.list(resource, self.namespace, label_selector=selector)).items
        ]
        return sorted(child["uid"] for child in children if "deletionTimestamp" not in child)

    async def processes(self) -> list[MetalProcess]:
        listed = await self.client.list(METAL_PROCESSES, self.namespace)
        return [msgspec.convert(obj, MetalProcess) for obj in listed.items]

    async def process(self, service: str) -> MetalProcess:
        """Return the only process of a service; AssertionError if there are none or several."""
        processes = [
            metal_process for metal_process in await self.processes() if metal_process.spec.service_name == service
        ]
        assert len(processes) == 1, [metal_process.metadata.name for metal_process in processes]
        return processes[0]

    async def engines(self, service: str) -> list[psutil.Process]:
        """Return the engines of the service, in pods or on hosts: each has the service's name as its alias."""
        return await asyncio.to_thread(find_processes, "-a", service)

    async def wait_for_hosts(self, *names: str) -> None:
        """Wait until processes may be bound to each of the hosts, for a choice among them."""

        async def live() -> bool:
            conditions = [find((await self.host(name)).status.conditions, "Ready") for name in names]
            return all(condition is not None and condition.status == "True" for condition in conditions)

        await eventually(live)

    async def host(self, name: str) -> MetalHostObject:
        return msgspec.convert(await self.client.get(METAL_HOSTS, name), MetalHostObject)

    async def versions(self, *resources: Resource) -> dict[str, str]:
        """Return the resourceVersion of each object, of these kinds or of every kind that Pomona writes."""
        return {
            f"{resource} {obj['metadata']['name']}": obj["metadata"]["resourceVersion"]
            for resource in resources or WRITTEN
            for obj in (await self.client.list(resource, self.namespace)).items
        }

    async def names(self, resource: Resource) -> list[str]:
        """Return the names of all objects of a kind in the namespace."""
        listed = await self.client.list(resource, self.namespace)
        return sorted(obj["metadata"]["name"] for obj in listed.items)


def slices_of(service: str) -> str:
    return f"kubernetes.io/service-name={service}"


def ready_urls(slices: Iterable[Obj]) -> list[str]:
    return [
        f"http://{address}:{port['port']}"
        for endpoint_slice in slices
        for port in endpoint_slice.get("ports") or []
        for endpoint in endpoint_slice.get("endpoints") or []
        if endpoint["conditions"].get("ready")
        for address in endpoint["addresses"]
    ]


def condition(service: InferenceService, kind: str = "Ready") -> Condition:
    reported = find(service.status.conditions, kind)
    assert reported is not None, service.status
    return reported


async def ask(url: str, service: str, token: str) -> Answer:
    body = {"model": service, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=CALL_TIMEOUT) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        said = await response.json()
        text = said["choices"][0]["message"]["content"] if response.status == 200 else json.dumps(said)
        return Answer(response.status, text)


class FixedAddressClient:
    """A client that sends requests to one address, one after the other, and records the failed ones."""

    def __init__(self, url: str, service: str, token: str, pause_seconds: float = 0.1) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._ask = functools.partial(ask, url, service, token)
        self._pause_seconds = pause_seconds

    async def run(self) -> None:
        while True:
            try:
                answer = await self._ask()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(f"after {self.answers} answers: {error!r}")
            else:
                self.answers += 1
                if answer.status != 200:
                    self.failures.append(f"answer {self.answers}: {answer}")
            await asyncio.sleep(self._pause_seconds)


class EndlessStream:
    """One answer of `tokens` tokens, read as it arrives; the test fails if it breaks off or ends too early."""

    def __init__(self, url: str, token: str, tokens: int = 45000) -> None:
        self.lines = 0
        self.has_ended = False
        self._tokens = tokens
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    async def run(self) -> None:
        body = {"stream": True, "max_tokens": self._tokens, "messages": [{"role": "user", "content": "Hi"}]}
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(f"{self._url}/v1/chat/completions", json=body) as response,
        ):
            async for line in response.content:
                assert not line.startswith(b'data: {"error"'), line
                self.lines += line.startswith(b"data: {")
        self.has_ended = True

    async def flows(self) -> bool:
        """Wait for one more line, and return True."""
        before = self.lines
        await eventually(lambda: self.lines > before)
        return True


class RoutedClient:
    """A client that sends each request to an address that was ready a moment ago, as clients in a cluster do."""

    def __init__(self, cluster: Cluster, service: str) -> None:
        self.answers = 0
        self.failures: list[str] = []
        self._cluster = cluster
        self._service = service

    async def run(self) -> None:
        token = await self._cluster.token(self._service)
        while True:
            read_at = time.monotonic()
            (url, *_) = await self._cluster.urls(self._service)
            # The endpoints that a node has are always slightly outdated.
            await asyncio.sleep(0.2)
            if time.monotonic() - read_at > OUTDATED_SECONDS:
                continue
            try:
                answer = await ask(url, self._service, token)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failures.append(f"after {self.answers} answers, from {url}: {error!r}")
            else:
                self.answers += 1
                if answer.status != 200:
                    self.failures.append(f"answer {self.answers}, from {url}: {answer}")


class EndpointObserver:
    """An observer that counts how often a service has no ready address."""

    def __init__(self, cluster: Cluster, service: str) -> None:
        self.started = asyncio.Event()
        """No later state is missed."""
        self.observations = 0
        self.gaps = 0
        self._cluster = cluster
        self._service = service

    async def run(self) -> None:
        client, namespace = self._cluster.client, self._cluster.namespace
        async for slices in watch_states(client, ENDPOINT_SLICES, namespace, label_selector=slices_of(self._service)):
            self.gaps += not ready_urls(slices)
            self.observations += 1
            self.started.set()
