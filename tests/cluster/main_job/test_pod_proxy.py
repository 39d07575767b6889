"""Pomona's proxy in pods, with Ollama, and with a container that Pomona does not know."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kube.client import Obj
from kube.resources import DEPLOYMENTS, PODS
from runtimes import llama_server, ollama
from tests.cluster.main_job.cluster import CALL_TIMEOUT, GIB, Cluster, ask, condition
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive

LLAMA: dict[str, Any] = {
    "runtime": "generic",
    "image": llama_server.IMAGES["cpu"],
    "resources": {"memory": "64Mi"},
    "extraArgs": [],
    "container": {
        "args": [
            *("-m", "$(MODEL_PATH)", "-a", "$(SERVICE_NAME)", "--host", "127.0.0.1", "--port", "$(PORT)"),
            *("-c", "4096", "-np", "1", "-t", "1", "--offline"),
        ],
        "port": 9000,
        "modelMountPath": "/weights",
    },
}
OLLAMA: dict[str, Any] = {"runtime": "ollama", "extraArgs": []}


async def refuses_connections(url: str, port: int) -> bool:
    """Return whether nothing listens at this port of a pod's own address."""
    try:
        _, writer = await asyncio.open_connection(urlsplit(url).hostname, port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_container_that_pomona_does_not_know_answers_with_the_token_only(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", **LLAMA))
    await cluster.ready("chat")
    assert await cluster.answers("chat")
    for token in ("wrong", ""):
        assert (await cluster.ask("chat", token=token)).status == 401
    (url,) = await cluster.urls("chat")
    assert await refuses_connections(url, 9000)


async def test_ollama_gets_the_weights_of_the_volume_before_its_pod_is_ready(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", **OLLAMA, contextLength=2048))
    await cluster.ready("chat")
    assert await cluster.answers("chat")
    assert (await cluster.ask("chat", token="")).status == 401
    (url,) = await cluster.urls("chat")
    assert await refuses_connections(url, ollama.PORT)


async def test_ollama_pulls_a_model_of_its_library(cluster: Cluster) -> None:
    source: dict[str, Any] = {"source": "ollama://tiny:1b", "memoryBytes": GIB}
    await cluster.apply(cluster.model(**source), cluster.service("chat", "cpu", extraArgs=[]))
    await cluster.ready("chat")
    assert await cluster.answers("chat")


async def test_model_that_the_library_lacks_is_named_in_the_status(cluster: Cluster) -> None:
    source: dict[str, Any] = {"source": "ollama://missing:1b", "memoryBytes": GIB}
    await cluster.apply(cluster.model(**source), cluster.service("chat", "cpu", extraArgs=[]))

    async def names_the_cause() -> bool:
        ready = condition(await cluster.get("chat"))
        return "proxy ended with exit code 1" in ready.message and "file does not exist" in ready.message

    await eventually(names_the_cause)


async def test_deleted_pod_finishes_its_requests_before_its_engine_ends(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(file="loop.gguf"), cluster.service("chat", "cpu", **LLAMA))
    await cluster.ready("chat")
    (url,), token = await cluster.urls("chat"), await cluster.token("chat")
    begun = asyncio.Semaphore(0)

    async def stream() -> str:
        body: Obj = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=CALL_TIMEOUT) as session,
            session.post(f"{url}/v1/chat/completions", json=body | {"stream": True}) as response,
        ):
            assert response.status == 200
            begun.release()
            return (await response.read()).decode()

    streams = [asyncio.create_task(stream()) for _ in range(3)]
    await begun.acquire()
    (pod,) = [name for name in await cluster.names(PODS) if name.startswith("chat-")]
    await cluster.kubectl("delete", "pod", pod, "--wait=false")
    for text in await asyncio.gather(*streams):
        *_, finish, done = (line for line in text.splitlines() if line.startswith("data: "))
        assert done == "data: [DONE]"
        assert json.loads(finish.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    await eventually(lambda: _is_gone(cluster, pod))


async def test_engine_that_hangs_is_restarted_and_answers_again(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", **LLAMA))
    await cluster.ready("chat")
    deployment = await cluster.client.get(DEPLOYMENTS, "chat", cluster.namespace)
    await cluster.apply(_make_impatient_pod(deployment["spec"]["template"]["spec"]))
    url = f"http://{await eventually(lambda: _ready_address(cluster, 'impatient'))}:8080"
    token = await cluster.token("chat")
    (engine,) = [process for process in await cluster.engines("chat") if "4097" in process.cmdline()]
    engine.suspend()
    await eventually(lambda: _restarts(cluster, "impatient", {"engine": 1, "proxy": 0}))

    async def answers() -> bool:
        return (await ask(url, "chat", token)).status == 200

    await eventually(answers)
    await eventually(lambda: not is_alive(engine))


def _make_impatient_pod(spec: Obj) -> Obj:
    """Return the pod of a service with shorter times, and another context by which its engine is recognised."""
    (engine,), (proxy,) = spec["initContainers"], spec["containers"]
    shorter = {"initialDelaySeconds": 0, "periodSeconds": 1, "failureThreshold": 20, "terminationGracePeriodSeconds": 1}
    engine["args"] = ["4097" if argument == "4096" else argument for argument in engine["args"]]
    engine["livenessProbe"] |= shorter
    proxy["args"] += ["--hang-seconds", "1"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "impatient"}, "spec": spec}


async def _ready_address(cluster: Cluster, pod: str) -> str:
    status = (await cluster.client.get(PODS, pod, cluster.namespace))["status"]
    ready = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}.get("Ready")
    address: str = status["podIP"] if ready == "True" else ""
    return address


async def _restarts(cluster: Cluster, pod: str, expected: dict[str, int]) -> bool:
    status = (await cluster.client.get(PODS, pod, cluster.namespace))["status"]
    statuses = [*status["initContainerStatuses"], *status["containerStatuses"]]
    return {container["name"]: container["restartCount"] for container in statuses} == expected


async def _is_gone(cluster: Cluster, pod: str) -> bool:
    return pod not in await cluster.names(PODS)
