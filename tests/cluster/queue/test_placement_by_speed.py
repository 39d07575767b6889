"""Placement by speed, as docs/placement.md says: the fastest class gets the replica, and a slow one is no place."""

import json
import re
import uuid
from pathlib import Path

import msgspec
import yaml

from crds.meta import API_VERSION, CONTROLLER_NAMESPACE
from crds.model import Model
from crds.serving import ServingOptions
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import RecordKey, build_config_map, encode_record
from kube.client import Client, Obj
from kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, MODELS
from tests.cluster.queue.queue_user import RUN_SECONDS, QueueUser
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks
from tests.support.eventually import eventually
from tests.support.file_server import FileServer
from tests.support.pomona_command import Pomona
from tests.support.shell import Shell
from tests.support.simulated_nodes import SimulatedNodes
from tests.support.tiny_models import tiny_gguf

DOCUMENT = (CHECKOUT / "docs" / "placement.md").read_text()
HARDWARE = "nodes,nodefitnesses.inference.pomona.dev"
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
LAYOUT = {
    "tensorBytes": 100_000_000,
    "vocabularySize": 32000,
    "embeddingSize": 1024,
    "attentionSize": 1024,
    "headCount": 16,
    "feedForwardSize": 3072,
    "layers": [{"count": 4, "keyElements": 1024, "valueElements": 1024}],
}
SPEEDS = {"nvidia-h100-80gb-hbm3x1": 140.0, "nvidia-l4x1": 24.5}


async def store_measurements(client: Client, namespace: str) -> str:
    """Store speeds of the Model of the user of the queue, as an administrator; return the name of the ConfigMap."""
    model = msgspec.convert(await client.get(MODELS, "tiny", namespace), Model)
    model_hash = hash_model(model, "ollama", ServingOptions())
    records = {
        RecordKey(name, namespace).encode(): encode_record(MeasuredPerformance(tokens_per_second=speed))
        for name, speed in SPEEDS.items()
    }
    made: Obj = build_config_map(model_hash, records)
    await client.create(CONFIG_MAPS, made)
    return str(made["metadata"]["name"])


async def test_replica_is_placed_on_the_fastest_class_and_never_on_a_slow_one(
    plane: ControlPlane, simulated: SimulatedNodes, user: QueueUser, tmp_path: Path
) -> None:
    client, shell, path = user.client, Shell(plane, tmp_path), tmp_path / "service.yaml"
    await simulated.add("gpu-h100", devices=1)
    await simulated.add("gpu-l4", devices=1, **L4)
    stored = await store_measurements(client, user.namespace)
    (manifest,), examples = list_blocks(DOCUMENT, "yaml"), list_blocks(DOCUMENT, "console")
    path.write_text(manifest)
    await shell.run(f"kubectl apply --namespace {user.namespace} --filename {path}")
    await user.wait_until_on("chat", "gpu-h100")

    async def is_reported() -> bool:
        status = (await client.get(INFERENCE_SERVICES, "chat", user.namespace))["status"]
        return "placement" in status

    await eventually(is_reported, RUN_SECONDS)
    for command, printed in re.findall(r"^\$ (.*)\n(.*)$", examples[0], re.MULTILINE):
        assert (await shell.run(f"{command} --namespace {user.namespace}")).strip() == printed.strip()
    # A second one finds the only fast node taken: it waits, though a slow one is free.
    await user.serve("second", placement={"minTokensPerSecond": 30})
    await user.wait_for_status("second", reason="InsufficientDevices", place="1/1")
    # Without the demand, the slow one does.
    await user.edit("second", placement=None)
    await user.wait_until_on("second", "gpu-l4")
    await client.delete(CONFIG_MAPS, stored, CONTROLLER_NAMESPACE)


async def test_speed_of_each_node_is_reported_while_replicas_are_on_different_hardware(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    await simulated.add("gpu-h100", devices=1)
    await simulated.add("gpu-l4", devices=1, **L4)
    stored = await store_measurements(user.client, user.namespace)

    async def wait_for_speeds(*speeds: tuple[str, str]) -> None:
        async def are_reported() -> bool:
            status = (await user.client.get(INFERENCE_SERVICES, "chat", user.namespace))["status"]
            assert len(status["nodes"]) == (len(speeds) or 1)
            shown = [(speed["node"], speed["tokensPerSecond"]) for speed in status.get("nodeSpeeds", [])]
            assert shown == list(speeds)
            return True

        await eventually(are_reported, RUN_SECONDS)

    await user.serve("chat", replicas=2)
    await wait_for_speeds(("gpu-h100", "140"), ("gpu-l4", "24.5"))
    await user.edit("chat", replicas=1)
    await wait_for_speeds()
    await user.client.delete(CONFIG_MAPS, stored, CONTROLLER_NAMESPACE)


async def test_plan_of_a_model_and_its_service_tells_the_speed_that_the_controller_then_reports(
    plane: ControlPlane, simulated: SimulatedNodes, user: QueueUser, tmp_path: Path
) -> None:
    client, pomona = user.client, Pomona(plane, user.namespace)
    await simulated.add("gpu-h100", devices=1)
    await simulated.add("gpu-l4", devices=1, **L4)
    (tmp_path / "files").mkdir()
    tiny_gguf.write(tmp_path / "files" / "fresh.gguf")
    async with FileServer(tmp_path / "files") as files:
        model = {"kind": "Model", "metadata": {"name": "fresh"}, "spec": {"source": f"{files.url}/fresh.gguf"}}
        spec = {"modelRef": "fresh", "hardware": {"accelerator": "nvidia"}}
        service = {"kind": "InferenceService", "metadata": {"name": "planned"}, "spec": spec}
        path = tmp_path / "both.yaml"
        path.write_text(yaml.safe_dump_all([{"apiVersion": API_VERSION, **manifest} for manifest in (service, model)]))
        words = ("plan", "-f", str(path), "--min-run=1s", "--scheduling-mode=Queue", "-o", "json")
        plan = json.loads(await pomona.succeed(*words, "--allow-private-sources=127.0.0.0/8"))
    (row,) = plan["replicas"]
    assert (row["outcome"], row["to"], row["speedSource"]) == ("starts", ["node/gpu-h100"], "Estimated"), row
    assert row["tokensPerSecondLow"] < row["tokensPerSecond"] < row["tokensPerSecondHigh"]
    assert plan["services"][0]["notes"] == [
        "Model fresh is as its header says",
        "after the weights of Model fresh have been fetched",
        "contextLength 4096: that of the model; parallel 4: so many whole contexts fit",
    ]
    # A service of a Model that the cluster knows: the controller then says the same speed of the same place.
    path.write_text(json.dumps({"apiVersion": API_VERSION, **service, "spec": {**spec, "modelRef": "tiny"}}))
    stored = await store_measurements(client, user.namespace)

    async def plan_replicas() -> list[Obj]:
        made = await pomona.run(*words)
        assert made.code == 0, made  # the Model is inspected first
        replicas: list[Obj] = json.loads(made.output)["replicas"]
        return replicas

    (row,) = await eventually(plan_replicas, RUN_SECONDS)
    assert (row["tokensPerSecond"], row["speedSource"], row["tokensPerSecondLow"]) == (140.0, "Measured", None)
    await pomona.succeed("deploy", "-f", str(path), "--no-wait")
    await user.wait_until_on("planned", row["to"][0].partition("/")[2])

    async def is_reported() -> bool:
        status = (await client.get(INFERENCE_SERVICES, "planned", user.namespace))["status"]
        placed = status.get("placement") or {}
        assert (placed.get("place"), placed.get("tokensPerSecond")) == (row["to"][0], "140"), status
        return True

    await eventually(is_reported, RUN_SECONDS)
    await client.delete(CONFIG_MAPS, stored, CONTROLLER_NAMESPACE)


async def test_simulated_service_goes_where_the_real_one_then_goes_and_evicts_the_same(
    plane: ControlPlane, simulated: SimulatedNodes, user: QueueUser
) -> None:
    client, pomona = user.client, Pomona(plane, user.namespace)
    await simulated.add("gpu-h100", devices=2)
    await simulated.add("gpu-l4", devices=1, **L4)
    stored = await store_measurements(client, user.namespace)
    # It is placed once the controller has seen the measurements.
    await user.serve("low", 1, "low", placement={"minTokensPerSecond": 1})
    await user.wait_until_on("low", "gpu-h100")
    await user.wait_until_run("low")
    await user.wait_until_evictable("low")
    words = ("simulate", f"{user.namespace}/tiny", "--priority=high", "--accelerator=nvidia", "--devices=2")
    options = ("--min-run=1s", "--scheduling-mode=Queue", "-o", "json")
    queue = json.loads(await pomona.succeed(*words, *options))["queue"]
    assert queue["isKnown"], queue
    rows = {row["service"]: row for row in queue["replicas"]}
    assert (rows["what-if"]["outcome"], rows["what-if"]["to"]) == ("starts", ["node/gpu-h100"]), queue
    assert rows["what-if"]["evicts"] == [f"{user.namespace}/low"]
    assert (rows["low"]["outcome"], rows["low"]["to"], rows["low"]["tokensPerSecond"]) == (
        "moves",
        ["node/gpu-l4"],
        24.5,
    ), queue
    assert [(cell["cell"], cell["free"]["nvidia.com/gpu"]) for cell in queue["remaining"]] == [
        ("node/gpu-h100", 0),
        ("node/gpu-l4", 0),
    ]
    await user.serve("actual", 2, "high")
    await user.wait_until_on("actual", "gpu-h100")
    await user.wait_until_on("low", "gpu-l4")
    # A user of one namespace learns which rights are missing, and no name of another namespace.
    tenant = Pomona(plane, user.namespace)
    tenant.kubeconfig = await plane.service_account_kubeconfig(user.namespace, "default")
    await plane.kubectl("create", "clusterrole", "hardware-reader", "--verb=list", f"--resource={HARDWARE}")
    account = f"--serviceaccount={user.namespace}:default"
    await plane.kubectl("create", "clusterrolebinding", "hardware-reader", "--clusterrole=hardware-reader", account)

    async def refuse() -> bool:
        refused = await tenant.run("simulate", "qwen3-8b", *options[:2])
        return "the queue is not simulated: a plan needs the whole cluster" in refused.errors

    try:
        await eventually(refuse)
        seen = await tenant.run("simulate", "qwen3-8b", *options[:2])
        assert "actual" not in seen.output + seen.errors
    finally:
        await plane.kubectl("delete", "clusterrolebinding,clusterrole", "hardware-reader")
    await client.delete(CONFIG_MAPS, stored, CONTROLLER_NAMESPACE)


async def test_benchmark_of_another_model_corrects_the_services_of_its_namespace(
    simulated: SimulatedNodes, user: QueueUser
) -> None:
    client = user.client
    await simulated.add("gpu-l4", devices=1, **L4)
    # A Model that each pod pulls by itself has no layout, without which there is no estimate.
    model = {"metadata": {"name": "tiny", "namespace": user.namespace}, "status": {"layout": LAYOUT}}
    await client.apply(MODELS, model, field_manager="test", subresource="status")
    await user.serve("chat")
    await user.wait_until_on("chat", "gpu-l4")

    async def read_speed() -> Obj:
        status = (await client.get(INFERENCE_SERVICES, "chat", user.namespace))["status"]
        return next((speed for speed in status.get("speeds", ()) if speed["deviceClass"] == "nvidia-l4x1"), {})

    async def is_estimated() -> bool:
        return (await read_speed()).get("source") == "Estimated"

    await eventually(is_estimated, RUN_SECONDS)
    estimated = await read_speed()
    record = MeasuredPerformance(
        tokens_per_second=50, estimated_tokens_per_second=100, accelerator="nvidia", runtime="ollama"
    )
    names = []
    # That of another namespace comes first, so that it would count if it could.
    for namespace in ("another-tenant", user.namespace):
        key = RecordKey("nvidia-l4x1", namespace)
        made = build_config_map(uuid.uuid4().hex[:16], {key.encode(): encode_record(record)})
        await client.create(CONFIG_MAPS, made)
        names.append(made["metadata"]["name"])

    async def is_corrected() -> bool:
        return (await read_speed()).get("source") == "Corrected"

    await eventually(is_corrected, RUN_SECONDS)
    found = await read_speed()
    assert found["measurements"] == 1
    assert float(found["tokensPerSecond"]) < float(estimated["tokensPerSecond"])
    await client.delete(CONFIG_MAPS, names[1], CONTROLLER_NAMESPACE)
    await eventually(is_estimated, RUN_SECONDS)
    await client.delete(CONFIG_MAPS, names[0], CONTROLLER_NAMESPACE)
