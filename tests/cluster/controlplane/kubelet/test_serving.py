"""The pods of the product: llama.cpp's real server with mounted weights, and the image that Jobs run."""

import json
from pathlib import Path

import aiohttp

from crds.serving import ServingOptions
from kube.client import Client
from kube.resources import SECRETS
from runtimes import llama_server
from runtimes.serving import Listen, build_serving
from tests.cluster.controlplane.kubelet.conftest import Pods
from tests.support.tiny_models import tiny_gguf


async def test_a_pod_of_llama_cpps_image_answers_with_tokens(pods: Pods, client: Client, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", text="the pod answers")
    metadata = {"name": "key", "namespace": pods.namespace}
    await client.create(
        SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": "t"}}
    )
    options = ServingOptions(context_length=512, extra_args=["-t", "1"])
    serving = build_serving("tiny", "/models/tiny.gguf", options)
    arguments = llama_server.arguments(serving, Listen("$(POD_IP)", 8080, "/key/key"))
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


async def test_our_own_image_runs_the_command_line_of_this_checkout(pods: Pods) -> None:
    main = {"image": "ghcr.io/pomona-dev/pomona:0.1.0", "command": None, "args": ["--version"]}
    name = await pods.run("", main=main | {"terminationMessagePolicy": "FallbackToLogsOnError"})
    assert (await pods.ended(name))["exitCode"] == 0, json.dumps(await pods.status(name))
