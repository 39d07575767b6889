"""The probe of NVIDIA GPUs, by nvidia-smi.

Its table for scripts (`--query-gpu`) is the one output whose fields are named; MIG partitions and NVLinks are only in
outputs for people, and are asked for only where a GPU is partitioned, or once for a set of GPUs.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from crds.nodefitness import NodeDevice
from crds.size import MIB
from devices.node.checked_values import (
    clean_text,
    parse_celsius,
    parse_number,
    parse_percent,
    parse_rest_bytes,
    parse_size_bytes,
)
from devices.node.vendor_reading import VendorReading
from devices.node.vendor_tool import quote_output, run_tool
from devices.tools import find_program

FIELDS: Final = (
    *("index", "uuid", "pci.bus_id", "name", "memory.total", "memory.free", "utilization.gpu", "temperature.gpu"),
    *("driver_version", "compute_cap", "mig.mode.current", "addressing_mode"),
)
"""Fields that are asked for; versions before 510 know no `compute_cap`, and those before 530 no `addressing_mode`."""
_REFUSED: Final = re.compile(r'Field "([a-z0-9_.]{1,64})" is not a valid field to query')
_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
_LISTED_GPU: Final = re.compile(r"GPU [0-9]+: .*\(UUID: (?P<uuid>\S+)\)")
_LISTED_PARTITION: Final = re.compile(
    r"\s*MIG (?P<profile>\S+)\s+Device\s+(?P<number>[0-9]{1,3}): \(UUID: (?P<uuid>\S+)\)"
)
_MOST_LINKS: Final = 32
_MOST_GPUS: Final = 1024


class NvidiaGpu(NamedTuple):
    """One GPU as nvidia-smi states it."""

    number: int
    """Index by which nvidia-smi counts it."""
    bus_id: str
    """For example 00000000:83:00.0."""
    device: NodeDevice
    driver: str
    is_partitioned: bool
    """True if MIG is on, with which nothing runs on the GPU but on its partitions."""
    shares_memory: bool
    """True if the GPU has no memory of its own and computes in that of the machine, as in a GB10."""


class Partition(NamedTuple):
    """One MIG partition of a GPU."""

    number: int
    """Index in its GPU."""
    profile: str
    """For example 1g.10gb."""
    id: str


PartitionMemory = tuple[int | None, int | None]
"""Memory of a partition and its free part, in bytes: it depends on the product as well as on the profile."""


def find_refused_field(text: str) -> str | None:
    """Return the field that this version of nvidia-smi does not know; it refuses the whole query then."""
    match = _REFUSED.search(text)
    return match[1] if match else None


def parse_gpus(text: str, fields: Sequence[str]) -> Iterator[NvidiaGpu]:
    """Read the answer to a query of these fields; a line that is no GPU is ignored."""
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(cells) == len(fields) and (gpu := _parse_gpu(dict(zip(fields, cells, strict=True)))):
            yield gpu


def parse_partitions(text: str) -> dict[str, list[Partition]]:
    """Read the partitions in the output of `nvidia-smi -L`, by the UUID of their GPU."""
    partitions: dict[str, list[Partition]] = {}
    # A line with a GPU comes before the lines with its partitions; `gpu` is the UUID of the last one.
    gpu = ""
    for line in text.splitlines():
        if listed := _LISTED_GPU.match(line):
            gpu = clean_text(listed["uuid"])
        elif gpu and (listed := _LISTED_PARTITION.match(line)):
            partition = Partition(int(listed["number"]), clean_text(listed["profile"]), clean_text(listed["uuid"]))
            partitions.setdefault(gpu, []).append(partition)
    return partitions


def parse_partition_memory(text: str) -> dict[tuple[str, int], PartitionMemory]:
    """Read the memory of MIG partitions in the output of `nvidia-smi -q`, by bus id of the GPU and index in it.

    The output has a section for each GPU, which begins with `GPU 00000000:17:00.0`. In it, each partition is a block
    that begins with `    MIG Device`, with its index, and its memory under `Shared FB Memory Usage`, or else under
    `FB Memory Usage`.
    """
    memories: dict[tuple[str, int], PartitionMemory] = {}
    for section in re.split(r"^(?=GPU \S)", text, flags=re.MULTILINE):
        bus_id = re.match(r"GPU (\S{1,32})", section)
        if bus_id is None:
            continue  # the lines before the first GPU
        # A line that is indented by four begins a block: that of a partition, or of what follows the last one.
        for block in re.split(r"^ {4}(?=\S)", section, flags=re.MULTILINE):
            index = re.search(r"\A *MIG Device\s+Index +: ([0-9]{1,3})$", block, re.MULTILINE)

            # Lines indented by twelve below the title state its figures.
            memory = re.search(r"^ +Shared FB Memory Usage\n((?: {12}.*\n?)+)", block, re.MULTILINE)
            memory = memory or re.search(r"^ +FB Memory Usage\n((?: {12}.*\n?)+)", block, re.MULTILINE)

            if index and memory:
                values = dict(re.findall(r"^ +(Total|Free) +: (.{1,32})$", memory[1], re.MULTILINE))
                sizes = parse_size_bytes(values.get("Total", ""), MIB), parse_rest_bytes(values.get("Free", ""), MIB)
                memories[bus_id[1], int(index[1])] = sizes
    return memories


def parse_links(text: str) -> dict[int, list[int]]:
    """Return the indices of the GPUs that each GPU reaches by NVLink, by its index, from `nvidia-smi topo -m`.

    The output is a matrix with a row and a column for each GPU; NV4 in a cell means four NVLinks between the two.
    """
    lines = [_COLOR.sub("", line).split("\t") for line in text.splitlines()]
    # The header begins with an empty cell, each other row with the name of its GPU. _COLOR: codes that colour the text.
    header = next((cells for cells in lines if len(cells) > 1 and cells[1].strip() == "GPU0"), None)
    if header is None:
        return {}

    links: dict[int, list[int]] = {}
    for cells in lines:
        # None: the row is of something else, such as a network card, or a legend
        source = _parse_gpu_index(cells[0])
        if source is None or cells is header:
            continue

        # The GPUs in whose column the row says NV and a number.
        targets = [
            target
            for name, link in zip(header[1:], cells[1:], strict=False)
            if re.fullmatch(r"NV[0-9]+", link.strip()) and (target := _parse_gpu_index(name)) is not None
        ]
        links[source] = targets[:_MOST_LINKS]
    return links


def list_devices(
    gpus: Sequence[NvidiaGpu],
    partitions: Mapping[str, Sequence[Partition]],
    memory: Mapping[tuple[str, int], PartitionMemory],
    links: Mapping[int, Sequence[int]],
) -> tuple[NodeDevice, ...]:
    """Return the devices on which something can run: a GPU, or its partitions if MIG is on.

    Args:
        gpus: the GPUs of the node.
        partitions: the partitions, by the id of their GPU.
        memory: the memory of each partition, by the bus id of its GPU and its index there.
        links: the indices of the GPUs that a GPU reaches by NVLink, by its own index.
    """
    # The id of each GPU, by the index that links name.
    ids = {gpu.number: gpu.device.id for gpu in gpus}
    devices: list[NodeDevice] = []
    for gpu in gpus:
        # With MIG on, nothing runs on the GPU itself: its partitions are the devices.
        if gpu.is_partitioned:
            for partition in partitions.get(gpu.device.id, ()):
                memory_bytes, free_bytes = memory.get((gpu.bus_id, partition.number), (None, None))
                device = replace(
                    gpu.device,
                    id=partition.id,
                    partition=partition.profile,
                    memory_bytes=memory_bytes,
                    free_bytes=free_bytes,
                    # A GPU with MIG states none, and its temperature is that of all partitions.
                    utilization_percent=None,
                )
                devices.append(device)
            continue

        # Without MIG, the GPU is the device.
        reached = [ids[link] for link in links.get(gpu.number, ()) if link in ids and link != gpu.number]
        devices.append(replace(gpu.device, links=reached[:_MOST_LINKS]))
    return tuple(devices)


def format_architecture(capability: str) -> str:
    """Return a compute capability as the name of an architecture: 9.0 is sm_90."""
    match = re.fullmatch(r"\s*([0-9]{1,2})\.([0-9])\s*", capability, re.ASCII)
    return f"sm_{int(match[1])}{match[2]}" if match else ""


def _parse_gpu(cells: Mapping[str, str]) -> NvidiaGpu | None:
    """Return the GPU of a row of nvidia-smi; None if it has no index, id or name.

    A GPU without memory of its own, whose addressing mode is ATS (address translation services), computes in the
    memory of the machine.
    """
    number, bus_id = parse_number(cells.get("index", "")), clean_text(cells.get("pci.bus_id", ""))
    # Without a UUID, the address on the bus is the id.
    device_id = clean_text(cells.get("uuid", "")) or bus_id
    name = clean_text(cells.get("name", ""))
    if number is None or not 0 <= number < _MOST_GPUS or not device_id or not name:
        return None

    memory_bytes = parse_size_bytes(cells.get("memory.total", ""), MIB)
    device = NodeDevice(
        id=device_id,
        product=name,
        architecture=format_architecture(cells.get("compute_cap", "")),
        memory_bytes=memory_bytes,
        free_bytes=parse_rest_bytes(cells.get("memory.free", ""), MIB),
        utilization_percent=parse_percent(cells.get("utilization.gpu", "")),
        temperature_celsius=parse_celsius(cells.get("temperature.gpu", "")),
    )

    return NvidiaGpu(
        number,
        bus_id,
        device,
        driver=clean_text(cells.get("driver_version", "")),
        is_partitioned=cells.get("mig.mode.current", "").strip() == "Enabled",
        shares_memory=memory_bytes is None and cells.get("addressing_mode", "").strip() == "ATS",
    )


def _parse_gpu_index(text: str) -> int | None:
    """Return the index of a GPU that is named like GPU3, or None."""
    match = re.fullmatch(r"GPU([0-9]{1,3})", text.strip())
    return int(match[1]) if match else None


_refused_fields: Final[set[str]] = set()
"""Fields that the tool of this node does not know: a newer driver is asked for them after a restart of the agent."""
_links: Final[dict[tuple[str, ...], dict[int, list[int]]]] = {}
"""NVLinks by the GPUs of the node, of the last set that was seen: cables change only while a machine is off."""


def read_nvidia() -> VendorReading | None:
    """Read NVIDIA's GPUs and their MIG partitions by nvidia-smi; None if the tool is not installed.

    Partitions and their memory take a further run of the tool each, only if MIG is on; the links between GPUs take one,
    only if there are several GPUs, and once for the same ones.
    """
    program = find_program("nvidia-smi")
    if program is None:
        return None
    gpus, problem = _query_gpus(program)
    problems = [f"nvidia-smi {problem}"] if problem else []

    # Partitions by the id of their GPU, and memory by the bus id of the GPU and the index in it.
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
    """Return the GPUs, and the problem; "" if there is none.

    nvidia-smi refuses a query with a field that it does not know: such fields are left out from then on.
    """
    for _ in FIELDS:  # each answer names one unknown field at most
        # _refused_fields: fields that an earlier answer has refused. The loop ends with the first answer that refuses
        # none.
        fields = [field for field in FIELDS if field not in _refused_fields]
        answer = run_tool(program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        refused = find_refused_field(answer.text)
        if refused not in fields:
            break
        _refused_fields.add(refused)

    # Output without GPUs is a problem, too.
    gpus = list(parse_gpus(answer.text, fields))
    if answer.problem or gpus:
        return gpus, answer.problem
    return gpus, f"{quote_output(answer.text)}, which states no GPU"


def _find_links(program: str, gpus: Sequence[NvidiaGpu]) -> dict[int, list[int]]:
    """Return the NVLinks of these GPUs; nvidia-smi is asked once, and the answer is kept for the same set of GPUs."""
    ids = tuple(gpu.device.id for gpu in gpus)
    if len(ids) <= 1:
        return {}
    # _links: the answer for the set of GPUs that was seen last
    if ids not in _links:
        answer = run_tool(program, "topo", "-m")
        if answer.problem:
            return {}
        _links.clear()  # the answer for the GPUs before is not kept
        _links[ids] = parse_links(answer.text)
    return _links[ids]


def _find_unused_gpus(gpus: Sequence[NvidiaGpu], partitions: dict[str, list[Partition]]) -> list[str]:
    """Return a problem for each GPU with MIG on and no partition."""
    return [
        f"GPU {clean_text(gpu.device.id)} has MIG on and no partition, so nothing can run there: "
        "create partitions (nvidia-smi mig -cgi), or switch MIG off"
        for gpu in gpus
        if gpu.is_partitioned and not partitions.get(gpu.device.id)
    ]
