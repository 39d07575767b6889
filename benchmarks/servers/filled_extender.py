"""The extender with nodes, models and measurements that no API server has sent.

`python -m benchmarks.servers.filled_extender NODES SERVICES` prints its port, and ends when its standard input does.
The nodes are of 20 device classes, with 20 utilizations and 5 costs. Each line of standard input names a number of
nodes whose utilization then changes.
"""

import asyncio
import sys

import msgspec
import uvloop

from crds.inferenceservice import InferenceService
from crds.model import Model
from devices.vendors import VENDORS
from extender.answers import Answers
from extender.extender_metrics import ExtenderMetrics
from extender.feed import ExtenderFeed, open_view
from extender.run import keep_lists_out_of_collection
from extender.score import ScoreWeights
from extender.server import list_probe_routes, listen_to_scheduler
from extender.speed_table import SpeedTable
from extender.subject import estimate_served_speed
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import build_config_map, encode_record
from kube.client import Obj
from kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, MODELS, NODES
from tests.support import api_objects

PRODUCTS = tuple(f"NVIDIA-Device-{number}" for number in range(20))
PREFIX = "inference.pomona.dev"


def fill(feed: ExtenderFeed, nodes: int, services: int) -> None:
    """Make nodes, services of one Model each, and the measurements of half of the device classes."""
    for number in range(nodes):
        put_node(feed, number, version=1)
    known = {"runtime": "vllm", "accelerator": "nvidia", "deviceMemoryBytes": 8 << 30}
    for number in range(services):
        name = f"service-{number}"
        model, service = api_objects.model(), api_objects.service(name, status=known, modelRef=name)
        model["spec"]["source"] = f"http://models.example/{name}.gguf"
        model["metadata"] |= {"name": name, "uid": name}
        feed.view.store.put(MODELS, model)
        feed.view.store.put(INFERENCE_SERVICES, service)
        served = msgspec.convert(service, InferenceService)
        model_hash = hash_model(msgspec.convert(model, Model), "vllm", served.spec)
        speeds = {f"nvidia-device-{index}x1": 10.0 + index for index in range(0, len(PRODUCTS), 2)}
        data = {key: encode_record(MeasuredPerformance(tokens_per_second=value)) for key, value in speeds.items()}
        stored = build_config_map(model_hash, data)
        stored["metadata"] |= {"uid": name, "resourceVersion": "1"}
        feed.view.store.put(CONFIG_MAPS, stored)


def name_node(number: int) -> str:
    """Return the name of a node."""
    return f"node-{number:05}.rack-{number % 40}.example.com"


def put_node(feed: ExtenderFeed, number: int, version: int) -> None:
    """Make or change a node."""
    name = name_node(number)
    labels = {"nvidia.com/gpu.product": PRODUCTS[number % len(PRODUCTS)], "nvidia.com/gpu.memory": "81559"}
    kind = number // len(PRODUCTS)
    annotations = {f"{PREFIX}/gpu.util": f"{(kind + version) % 20 / 20}", f"{PREFIX}/cost": f"{kind // 20 % 5}"}
    metadata = {"name": name, "uid": name, "resourceVersion": str(version)}
    node: Obj = {"metadata": metadata | {"labels": labels, "annotations": annotations}}
    feed.view.store.put(NODES, node)


async def main(nodes: int, services: int) -> None:
    """Serve until standard input ends."""
    view = open_view(VENDORS, PREFIX)
    table = SpeedTable(VENDORS, ScoreWeights(), estimate_served_speed, view.measured)
    feed = ExtenderFeed(table, view, PREFIX)
    fill(feed, nodes, services)
    metrics = ExtenderMetrics(table)
    answers = Answers(feed.find_board, ScoreWeights(), metrics)
    keep_lists_out_of_collection()
    version = 1
    async with listen_to_scheduler(answers, list_probe_routes(metrics, lambda: True), "127.0.0.1", 0) as (_, port):
        print(port, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            version += 1
            for number in range(int(line)):
                put_node(feed, number, version)
            print("changed", flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
