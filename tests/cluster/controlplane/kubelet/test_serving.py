"""The pods of the product: llama.cpp's real server, stand-ins of other engines, and the image that Jobs run."""

import json
from pathlib import Path

import aiohttp
import pytest

from crds.serving import ServingOptions
from devices.vendors import VENDORS
from kube.client import Client
from kube.resources import SECRETS
from runtimes import llama_server
from runtimes.pod import PodServing
from runtimes.registry import RUNTIMES
from runtimes.serving import Listen, build_serving
from tests.cluster.controlplane.kubelet.conftest import Pods
from tests.support.pod_engines.stand_in import SENTENCE
from tests.support.tiny_models import tiny_gguf, tiny_mlx


async def test_a_pod_of_llama_cpps_image_answers_with_tokens(pods: Pods, client: Client, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", text="the pod answers")
    metadata = {"name": "key", "namespace": pods.namespace}
    await client.create(
        SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": "t"}}
    )
    options = ServingOptions(context_length=512, extra_args=["-t", "1"])
    serving = build_serving("tiny", "/models/tiny.gguf", options)
    arguments = llama_server.render_arguments(serving, Listen("$(POD_IP)", 8080, "/key/key"))
    mounts = [{"name": "models", "mountPath": "/models", "readOnly": True}, {"name": "key", "mountPath": "/key"}]
    main = {
        "image": llama_server.IMAGES["nvidia"],
        "command": None,
        "args": arguments,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"port": "http", "path": "/health"}, "periodSeconds": 1},
        "volumeMounts": mounts,
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    volumes = [
        {"name": "models", "hostPath": {"path": str(tmp_path)}},
        {"name": "key", "secret": {"secretName": "key"}},
    ]
    name = await pods.run("", main=main, volumes=volumes, restartPolicy="Always")
    status = await pods.until(name, lambda status: status["containerStatuses"][0]["ready"], 60)
    url = f"http://{status['podIP']}:8080/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body) as response:
            assert response.status == 401
        async with session.post(url, json=body, headers={"Authorization": "Bearer t"}) as response:
            answer = await response.json()
    assert "pod" in answer["choices"][0]["message"]["content"], answer


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi"])
async def test_a_pod_of_an_engine_that_needs_a_gpu_answers_by_its_stand_in(
    engine: str, pods: Pods, tmp_path: Path
) -> None:
    tiny_mlx.write(tmp_path)
    described = RUNTIMES[engine].pod
    assert described is not None
    serving = build_serving("tiny", "/models", ServingOptions(context_length=512))
    pod = PodServing(serving, Listen("$(POD_IP)", 8080), VENDORS["nvidia"], 2)
    main = {
        "image": described.images["nvidia"],
        "command": list(described.command),
        "args": described.arguments(pod),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": value} for name, value in described.environment(pod).items()),
        ],
        "ports": [{"name": "http", "containerPort": 8080}],
        "readinessProbe": {"httpGet": {"port": "http", "path": described.health_path}, "periodSeconds": 1},
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "securityContext": {"runAsNonRoot": True, "readOnlyRootFilesystem": described.read_only_root},
    }
    volumes = [{"name": "models", "hostPath": {"path": str(tmp_path)}}]
    name = await pods.run("", main=main, volumes=volumes, restartPolicy="Always")
    status = await pods.until(name, lambda status: status["containerStatuses"][0]["ready"], 60)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    url = f"http://{status['podIP']}:8080/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        answer = await response.json()
    assert SENTENCE.startswith(answer["choices"][0]["message"]["content"]), answer


async def test_our_own_image_runs_the_command_line_of_this_checkout(pods: Pods) -> None:
    main = {"image": "ghcr.io/pomona-dev/pomona:0.1.0", "command": None, "args": ["--version"]}
    name = await pods.run("", main=main | {"terminationMessagePolicy": "FallbackToLogsOnError"})
    assert (await pods.ended(name))["exitCode"] == 0, json.dumps(await pods.status(name))
