"""Placement by speed, as docs/placement.md says: the fastest class gets the replica, and a slow one is no place."""

import re
from pathlib import Path

import msgspec

from crds.meta import CONTROLLER_NAMESPACE
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
from tests.support.shell import Shell
from tests.support.simulated_nodes import SimulatedNodes

DOCUMENT = (CHECKOUT / "docs" / "placement.md").read_text()
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
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
