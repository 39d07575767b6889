"""The probe of NVIDIA GPUs, by nvidia-smi.

Its table for scripts (`--query-gpu`) is the one output whose fields are named; MIG partitions and NVLinks are only in
outputs for people, and are asked for only where a GPU is partitioned, or once for a set of GPUs.
"""

from collections.abc import Sequence
from typing import Final

from devices.node.checked_values import clean_text
from devices.node.nvidia_parsers import (
    FIELDS,
    NvidiaGpu,
    Partition,
    PartitionMemory,
    find_refused_field,
    list_devices,
    parse_gpus,
    parse_links,
    parse_partition_memory,
    parse_partitions,
)
from devices.node.vendor_reading import VendorReading
from devices.node.vendor_tool import find_tool, quote_output, run_tool

_refused_fields: Final[set[str]] = set()
"""Fields that the tool of this node does not know: a newer driver is asked for them after a restart of the agent."""
_links: Final[dict[tuple[str, ...], dict[int, list[int]]]] = {}
"""NVLinks by the GPUs of the node, of the last set that was seen: cables change only while a machine is off."""


def read_nvidia() -> VendorReading | None:
    """Read the GPUs; None if the tool is not installed."""
    program = find_tool("nvidia-smi")
    if program is None:
        return None
    gpus, problem = _query_gpus(program)
    problems = [f"nvidia-smi {problem}"] if problem else []
    partitions: dict[str, list[Partition]] = {}
    memory: dict[tuple[str, int], PartitionMemory] = {}
    if any(gpu.is_partitioned for gpu in gpus):
        partitions = parse_partitions(run_tool(program, "-L").text)
        memory = parse_partition_memory(run_tool(program, "-q").text)
        problems += _find_unused_gpus(gpus, partitions)
    links = _find_links(program, gpus)
    return VendorReading(
        vendor="nvidia",
        source="nvidia-smi",
        devices=list_devices(gpus, partitions, memory, links),
        driver=next((gpu.driver for gpu in gpus if gpu.driver), ""),
        problems=tuple(problems),
        shares_memory=bool(gpus) and all(gpu.shares_memory for gpu in gpus),
    )


def _query_gpus(program: str) -> tuple[list[NvidiaGpu], str]:
    """Return the GPUs, and what is wrong if something is."""
    for _ in FIELDS:
        fields = [each for each in FIELDS if each not in _refused_fields]
        answer = run_tool(program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        refused = find_refused_field(answer.text)
        if refused not in fields:
            break
        _refused_fields.add(refused)
    gpus = list(parse_gpus(answer.text, fields))
    if answer.problem or gpus:
        return gpus, answer.problem
    return gpus, f"{quote_output(answer.text)}, which states no GPU"


def _find_links(program: str, gpus: Sequence[NvidiaGpu]) -> dict[int, list[int]]:
    ids = tuple(gpu.device.id for gpu in gpus)
    if len(ids) <= 1:
        return {}
    if ids not in _links:
        answer = run_tool(program, "topo", "-m")
        if answer.problem:
            return {}
        _links.clear()
        _links[ids] = parse_links(answer.text)
    return _links[ids]


def _find_unused_gpus(gpus: Sequence[NvidiaGpu], partitions: dict[str, list[Partition]]) -> list[str]:
    return [
        f"GPU {clean_text(gpu.device.id)} has MIG on and no partition, so nothing can run there: "
        "create partitions (nvidia-smi mig -cgi), or switch MIG off"
        for gpu in gpus
        if gpu.is_partitioned and not partitions.get(gpu.device.id)
    ]
