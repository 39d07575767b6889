"""From applied files to tokens, on both paths; and messages about files that are wrong."""

import asyncio
import functools
import hashlib
import json
import sys

import aiohttp
import pytest

from controller.services.pods.pod_proxy import WITHDRAWAL_SECONDS
from crds.meta import LABEL_SERVICE, ROTATE_TOKEN
from kube.resources import DEPLOYMENTS, METAL_HOSTS, METAL_PROCESSES, MODELS, PODS
from tests.cluster.main_job.cluster import (
    PATHS,
    READY_SECONDS,
    Cluster,
    EndpointObserver,
    FixedAddressClient,
    condition,
)
from tests.controlplane.members import MetalHost
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.live_processes import is_alive
from tests.support.tiny_models import tiny_mlx
from tests.support.wrong_requests import send_wrong_requests

WRONG = "0" * 64


async def test_applied_service_answers_with_its_token_on_both_paths(cluster: Cluster, host: MetalHost) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))
    await cluster.ready("by-pod", "by-host")
    for service in ("by-pod", "by-host"):
        answer = await cluster.ask(service)
        assert answer.status == 200
        assert answer.text.startswith("Hello from a tiny model")
        assert (await cluster.ask(service, token="wrong")).status == 401
        assert (await cluster.ask(service, token="")).status == 401
    assert await cluster.token("by-pod") != await cluster.token("by-host")

    assert [url.startswith(f"http://{host.address}:18") for url in await cluster.urls("by-host")] == [True]
    assert [url.endswith(":8080") for url in await cluster.urls("by-pod")] == [True]
    assert await cluster.names(DEPLOYMENTS) == ["by-pod"]
    assert [process.spec.service_name for process in await cluster.processes()] == ["by-host"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("host")
async def test_replica_that_is_stopped_finishes_its_answer(cluster: Cluster, path: str) -> None:
    """Its engine makes a pause, longer than all that passes before its end but for the answer."""
    chat = functools.partial(cluster.service, "chat", PATHS[path])
    await cluster.apply(cluster.model(file="loop.gguf"), chat())
    await cluster.ready("chat")
    (engine,) = await cluster.engines("chat")
    (url,), token = await cluster.urls("chat"), await cluster.token("chat")
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000, "stream": True}
    headers, timeout = {"Authorization": f"Bearer {token}"}, aiohttp.ClientTimeout(total=READY_SECONDS)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        await response.content.readline()
        engine.suspend()
        await cluster.apply(chat(suspend=True))
        kind = PODS if path == "pod" else METAL_PROCESSES

        async def is_stopped() -> bool:
            objects = (await cluster.client.list(kind, cluster.namespace)).items
            return any("deletionTimestamp" in obj["metadata"] for obj in objects)

        await eventually(is_stopped)
        loop = asyncio.get_running_loop()
        stopped_at = loop.time()
        await eventually(lambda: loop.time() > stopped_at + 2 * WITHDRAWAL_SECONDS)
        engine.resume()
        *_, last = [line async for line in response.content if line.strip()]
        assert last == b"data: [DONE]\n"
    await eventually(lambda: not is_alive(engine))


async def test_wrong_requests_to_a_pod_are_their_clients_mistakes_and_restart_no_engine(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), cluster.service("chat", "cpu", parallel=2, extraArgs=[]))
    await cluster.ready("chat")
    before = await cluster.engines("chat")
    (url,), token = await cluster.urls("chat"), await cluster.token("chat")
    assert await send_wrong_requests(url, "chat", token) == []
    assert await cluster.answers("chat")
    assert await cluster.engines("chat") == before


@pytest.mark.usefixtures("host")
async def test_edit_of_priority_protection_and_drain_restarts_no_engine(cluster: Cluster) -> None:
    services = {f"by-{path}": functools.partial(cluster.service, f"by-{path}", PATHS[path]) for path in PATHS}
    await cluster.apply(cluster.model(), *(make() for make in services.values()))
    await cluster.ready(*services)
    before = [*await cluster.engines("by-pod"), *await cluster.engines("by-host")]
    edit = {"evictionProtection": True, "drainSeconds": 900}
    await cluster.apply(services["by-pod"](**edit), services["by-host"](**edit, priority="high"))

    async def is_edited() -> bool:
        (process,) = await cluster.processes()
        return (process.spec.priority, process.spec.protected, process.spec.drain_seconds) == ("high", True, 900)

    await eventually(is_edited)
    await cluster.ready(*services)
    assert [*await cluster.engines("by-pod"), *await cluster.engines("by-host")] == before


@pytest.mark.usefixtures("host")
async def test_replaced_token_is_valid_beside_the_old_one_on_hosts_and_pods_are_replaced(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))
    await cluster.ready("by-pod", "by-host")
    old = {service: await cluster.token(service) for service in ("by-pod", "by-host")}
    await cluster.kubectl("annotate", "isvc", *old, f"{ROTATE_TOKEN}=monday")

    async def answers_to_new_token(service: str) -> bool:
        assert await cluster.token(service) != old[service]
        return (await cluster.ask(service)).status == 200

    await eventually(functools.partial(answers_to_new_token, "by-host"), READY_SECONDS)
    assert (await cluster.ask("by-host", token=old["by-host"])).status == 200, "for ten minutes"
    assert (await cluster.ask("by-host", token="wrong")).status == 401
    await eventually(functools.partial(answers_to_new_token, "by-pod"), READY_SECONDS)

    async def refuses_old_token() -> bool:
        # The earlier pod may serve for a moment beside the new one.
        return (await cluster.ask("by-pod", token=old["by-pod"])).status == 401

    await eventually(refuses_old_token)
    new = {service: await cluster.token(service) for service in old}
    await cluster.ready("by-pod", "by-host")
    assert {service: await cluster.token(service) for service in old} == new, "replaced once"


@pytest.mark.usefixtures("host")
async def test_token_edited_in_its_secret_is_followed_while_the_old_one_is_never_refused_by_a_host(
    cluster: Cluster,
) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))
    await cluster.ready("by-pod", "by-host")
    old = await cluster.token("by-host")
    caller = FixedAddressClient((await cluster.urls("by-host"))[0], "by-host", old)
    observers = [EndpointObserver(cluster, service) for service in ("by-pod", "by-host")]
    edit = json.dumps({"stringData": {"token": "of-my-own-choice"}})
    async with running(caller.run(), *(each.run() for each in observers)):
        for service, observer in zip(("by-pod", "by-host"), observers, strict=True):
            await observer.started.wait()
            await cluster.kubectl("patch", "secret", f"{service}-token", f"--patch={edit}")
            await cluster.kubectl("annotate", "isvc", service, f"{ROTATE_TOKEN}=edited")

        async def answers_to_new_token(service: str) -> bool:
            assert await cluster.token(service) == "of-my-own-choice"
            return (await cluster.ask(service)).status == 200

        await eventually(functools.partial(answers_to_new_token, "by-host"), READY_SECONDS)
        await eventually(functools.partial(answers_to_new_token, "by-pod"), READY_SECONDS)
        assert (await cluster.ask("by-host", token=old)).status == 200, "for ten minutes"
        answers = caller.answers
        await eventually(lambda: caller.answers > answers)
    assert caller.failures == []
    assert [each.gaps for each in observers] == [0, 0]


@pytest.mark.usefixtures("host")
async def test_edited_token_is_followed_at_once_if_a_probe_meets_it(cluster: Cluster) -> None:
    await cluster.apply(cluster.model(), *(cluster.service(f"by-{path}", PATHS[path]) for path in PATHS))
    await cluster.ready("by-pod", "by-host")
    ready_since = {service: await last_transition(cluster, service) for service in ("by-pod", "by-host")}
    edit = json.dumps({"stringData": {"token": "of-my-own-choice"}})
    for service in ready_since:
        await cluster.kubectl("patch", "secret", f"{service}-token", f"--patch={edit}")
        await cluster.edit(service, runtime="llama.cpp")  # an edit that replaces nothing, but is probed

    async def answers_to_new_token(service: str) -> bool:
        assert (await cluster.get(service)).status.token_rotation, "without an annotation, and not after ten minutes"
        return (await cluster.ask(service, token="of-my-own-choice")).status == 200

    for service, since in ready_since.items():
        await eventually(functools.partial(answers_to_new_token, service), READY_SECONDS)
        await cluster.ready(service)
        assert await last_transition(cluster, service) == since, "it was never called not ready"


async def last_transition(cluster: Cluster, service: str) -> str:
    """Return when Ready changed last."""
    return condition(await cluster.get(service)).last_transition_time


async def test_a_folder_of_mlx_weights_is_served_by_a_host_and_refused_for_pods(
    cluster: Cluster, host: MetalHost
) -> None:
    folder = cluster.files.root / "acme" / "tiny-mlx"
    tiny_mlx.write(folder)
    (folder / "modeling.py").write_text("raise SystemExit('code that came with the weights was run')")
    settings = {"modelRef": "mlx", "extraArgs": []}
    await cluster.apply(
        cluster.model("mlx", source="hf://acme/tiny-mlx"),
        cluster.service("chat", "metal", **settings),
        cluster.service("pods", "cpu", **settings),
    )
    await cluster.ready("chat")

    assert (await cluster.ask("chat")).text.startswith("Hello from a tiny model")
    assert [process.spec.runtime for process in await cluster.processes()] == ["mlx-lm"]
    model = await cluster.client.get(MODELS, "mlx", cluster.namespace)
    assert model["status"]["gguf"]["architecture"] == "llama"
    assert model["status"]["layout"]["layers"]
    assert not cluster.files.seen("modeling.py")
    refused = condition(await cluster.wait_for_phase("pods", "Failed", "InvalidSpec"))
    assert "hardware.accelerator to metal" in refused.message
    fetched = list((host.state_folder / "weights" / "objects").iterdir())
    assert len(fetched) == 1
    assert (fetched[0] / "model.safetensors").exists()


@pytest.mark.usefixtures("gpu_node")
async def test_service_on_nvidia_takes_devices_and_the_next_one_reports_their_lack(cluster: Cluster) -> None:
    native = {"scheduling": {"mode": "Native"}}
    await cluster.apply(cluster.model(), cluster.service("first", "nvidia", resources={"gpu": 2}, **native))
    await cluster.ready("first")
    assert (await cluster.ask("first")).status == 200
    pods = await cluster.client.list(PODS, cluster.namespace, label_selector=f"{LABEL_SERVICE}=first")
    assert [pod["spec"]["nodeName"] for pod in pods.items] == ["gpu-1"]
    assert pods.items[0]["spec"]["initContainers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}

    await cluster.apply(cluster.service("second", "nvidia", **native))
    waiting = await cluster.wait_for_phase("second", "Pending", "Unschedulable")
    assert "Insufficient nvidia.com/gpu" in condition(waiting).message
    await cluster.kubectl("delete", "isvc", "first")
    await cluster.ready("second")


async def test_kubectl_get_shows_the_state(cluster: Cluster, host: MetalHost) -> None:
    await cluster.apply(
        cluster.model(), cluster.service("chat", "metal"), cluster.service("absent", "cpu", modelRef="x")
    )
    await cluster.ready("chat")
    await cluster.wait_for_phase("absent", "Pending", "ModelNotFound")
    shown = await table(cluster, "isvc")
    endpoint = f"http://chat.{cluster.namespace}.svc:8080/v1"
    assert cells(
        shown["chat"],
        *("PHASE", "MODEL", "ACCELERATOR", "ENGINE", "AVAILABLE", "UPDATED", "REPLICAS", "REASON", "ENDPOINT"),
    ) == [
        *("Ready", "tiny", "metal", "llama.cpp", "1", "1", "1", "Serving"),
        endpoint,
    ]
    assert cells(shown["absent"], "PHASE", "MODEL", "AVAILABLE", "REASON") == ["Pending", "x", "0", "ModelNotFound"]
    model = (await table(cluster, "mdl"))["tiny"]
    assert cells(model, "PHASE", "CACHED", "REASON") == ["Ready", "NoConsumers", "Inspected"]
    process = await cluster.process("chat")
    shown = await table(cluster, "mp")
    assert cells(shown[process.metadata.name], "PHASE", "HOST") == ["Ready", host.name]
    assert host.name in await table(cluster, "mh")

    async def reached() -> bool:
        status = (await cluster.client.get(METAL_HOSTS, host.name))["status"]
        reachable = next(condition for condition in status["conditions"] if condition["type"] == "Reachable")
        assert status["controllerVersion"] == status["agentVersion"]
        return bool(reachable["reason"] == "AgentAnswered" and host.address in reachable["message"])

    await eventually(reached)
    assert await run_doctor(host) == {
        *("API server", "clock", "token", "address", "registered", "address accepted", "reached by the cluster"),
        *("versions", "memory", "engine llama.cpp", "agent's connection"),
    }


async def run_doctor(host: MetalHost) -> set[str]:
    """Run the doctor on a host, with the agent's own credentials; return the checks that are well."""
    options = [
        argument for argument in host.agent.argv if argument.startswith(("--name=", "--kubeconfig=", "--state-dir="))
    ]
    argv = [*host.host.exec, sys.executable, "-m", "cli.main", "agent", "doctor", *options, "--output=json"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    findings = json.loads(output)
    assert [finding for finding in findings if finding["verdict"] == "problem"] == []
    return {finding["name"] for finding in findings if finding["verdict"] == "ok"} - {"disk", "engine mlx-lm"}


async def table(cluster: Cluster, kind: str) -> dict[str, dict[str, str]]:
    """Return the output of `kubectl get`, by name and column."""
    header, *rows = (await cluster.kubectl("get", kind)).splitlines()
    columns = header.split()
    starts = [header.index(f"{column}") for column in columns]
    shown = (
        dict(zip(columns, (row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)), strict=True))
        for row in rows
    )
    return {row["NAME"]: row for row in shown}


def cells(row: dict[str, str], *columns: str) -> list[str]:
    return [row[column] for column in columns]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("path", PATHS)
async def test_each_mistake_is_reported_until_it_is_corrected(cluster: Cluster, path: str) -> None:
    digest = hashlib.sha256((cluster.files.root / "tiny.gguf").read_bytes()).hexdigest()
    broken = {
        "wrong-sum": cluster.model("wrong-sum", sha256=WRONG),
        "not-there": cluster.model("not-there", file="absent.gguf"),
        "hostile": cluster.model("hostile", file="hostile.gguf"),
    }
    services = [*broken, "no-model"]
    await cluster.apply(*broken.values(), *(cluster.service(name, PATHS[path], modelRef=name) for name in services))

    # A host fetches the weights itself, so its process fails; pods wait for the Model's volume.
    refused = await cluster.wait_for_phase(
        "wrong-sum", "Failed", "ModelFailed" if path == "pod" else "ChecksumMismatch"
    )
    assert WRONG in condition(refused).message
    assert digest in condition(refused).message, "the file is a GGUF file, so it tells nothing of another one"
    refused = await cluster.wait_for_phase("not-there", "Failed", "ModelFailed")
    assert "absent.gguf" in condition(refused).message
    assert "edit the Model" in condition(refused).message
    refused = await cluster.wait_for_phase("hostile", "Failed", "ModelFailed")
    assert "4611686018427387904" in condition(refused).message
    refused = await cluster.wait_for_phase("no-model", "Pending", "ModelNotFound")
    assert "create it" in condition(refused).message
    for name in services:
        assert await cluster.urls(name) == []
        assert await cluster.engines(name) == []

    corrected = [cluster.model(name) for name in services]
    corrected[0]["spec"]["sha256"] = digest
    await cluster.apply(*corrected)
    await cluster.ready(*services)
    for name in services:
        assert await cluster.answers(name)

    async def replaced() -> bool:
        # A process that failed is gone once its host has said so.
        return len(await cluster.names(METAL_PROCESSES)) == (4 if path == "host" else 0)

    await eventually(replaced)
