"""GPUs, partitions and links as recorded outputs of nvidia-smi state them, also of versions that know less."""

import pytest

from crds.nodefitness import NodeDevice
from crds.size import MIB
from devices.node.nvidia import (
    FIELDS,
    format_architecture,
    parse_gpus,
    parse_links,
    parse_partition_memory,
    read_nvidia,
)
from devices.node.vendor_reading import VendorReading
from tests.unit.devices.node.stand_ins import ToolFolder, recorded

WHOLE = "0, GPU-a, 00000000:18:00.0, NVIDIA H100 80GB HBM3, 81559, 80900, 12, 34, 550.54.15, 9.0, Disabled, None\n"
SECOND = "1, GPU-b, 00000000:2A:00.0, NVIDIA H100 80GB HBM3, 81559, 81000, 0, 30, 550.54.15, 9.0, Disabled, None\n"
# Values of a DGX Spark as its owners print them: memory [N/A], addressing mode ATS.
GB10 = "0, GPU-c, 0000000F:01:00.0, NVIDIA GB10, [N/A], [N/A], 0, 44, 580.173.02, 12.1, [N/A], ATS\n"


def read() -> VendorReading:
    reading = read_nvidia()
    assert reading is not None
    return reading


def test_absent_tool_is_no_reading(tools: ToolFolder) -> None:
    assert tools.folder.exists()
    assert read_nvidia() is None


def test_gpus_are_read_with_their_links(tools: ToolFolder) -> None:
    gpus = "".join(WHOLE.replace("0, GPU-a", f"{n}, GPU-{n}", 1) for n in range(8))
    topology = recorded("nvidia_8_h100_topology.txt")
    tools.add_recorded("nvidia-smi", {"--query-gpu=": gpus, "topo -m": topology})
    reading = read()
    assert reading.problems == ()
    assert reading.driver == "550.54.15"
    assert reading.devices[2] == NodeDevice(
        id="GPU-2",
        product="NVIDIA H100 80GB HBM3",
        architecture="sm_90",
        memory_bytes=81_559 * MIB,
        free_bytes=80_900 * MIB,
        utilization_percent=12,
        temperature_celsius=34,
        links=[f"GPU-{n}" for n in range(8) if n != 2],
    )
    assert read() == reading
    assert [call.split()[0] for call in tools.list_calls("nvidia-smi")] == [
        *(f"--query-gpu={','.join(FIELDS)}", "topo", f"--query-gpu={','.join(FIELDS)}")
    ]


def test_partitions_replace_their_gpu(tools: ToolFolder) -> None:
    tools.add_recorded(
        "nvidia-smi",
        {
            # The recorded driver states no utilization of a partitioned GPU: whatever one states is not a partition's.
            "--query-gpu=": recorded("nvidia_h100_mig_query.csv").replace("[N/A]", "99"),
            "-L": recorded("nvidia_h100_mig_list.txt"),
            "-q": recorded("nvidia_h100_mig_q.txt"),
        },
    )
    reading = read()
    facts = [(device.id[:12], device.partition, device.memory_bytes, device.free_bytes) for device in reading.devices]
    assert facts == [
        ("MIG-00000000", "3g.40gb", 40_448 * MIB, 40_423 * MIB),
        ("MIG-00000001", "2g.20gb", 20_096 * MIB, 20_080 * MIB),
        ("MIG-00000002", "1g.10gb", 9_984 * MIB, 9_976 * MIB),
        ("MIG-00000003", "1g.10gb", 9_984 * MIB, 9_976 * MIB),
    ]
    assert {device.utilization_percent for device in reading.devices} == {None}
    assert {device.temperature_celsius for device in reading.devices} == {42}


def test_gpu_without_partitions_is_explained(tools: ToolFolder) -> None:
    answers = {"--query-gpu=": recorded("nvidia_h100_mig_query.csv"), "-L": "GPU 0: NVIDIA H100 (UUID: GPU-x)\n"}
    tools.add_recorded("nvidia-smi", answers)
    reading = read()
    assert reading.devices == ()
    assert "has MIG on and no partition" in reading.problems[0]


def test_memory_is_of_each_partition_of_each_gpu() -> None:
    one = recorded("nvidia_h100_mig_q.txt")
    other = one[one.index("GPU 0000") :].replace("00:09.0", "00:0A.0").replace("40448 MiB", "40000 MiB")
    memory = parse_partition_memory(one + other)
    assert len(memory) == 8
    assert memory["00000000:00:09.0", 0][0] == 40_448 * MIB
    assert memory["00000000:00:0A.0", 0][0] == 40_000 * MIB


def test_field_that_a_version_does_not_know_loses_nothing_else(tools: ToolFolder) -> None:
    # The text and the exit code of nvidia-smi for a field that it does not know.
    answer = WHOLE.replace(", 9.0, Disabled, None", ", Disabled")
    refuse = 'echo "Field \\"{0}\\" is not a valid field to query."; exit 2'
    tools.add(
        "nvidia-smi",
        f'echo x >> {tools.calls("nvidia-smi")}\ncase "$1" in *compute_cap*) {refuse.format("compute_cap")};;\n'
        f"*addressing_mode*) {refuse.format('addressing_mode')};;\n*) echo '{answer.strip()}';; esac",
    )
    reading = read()
    assert reading.problems == ()
    assert reading.devices[0].memory_bytes == 81_559 * MIB
    assert reading.devices[0].architecture == ""
    assert len(tools.list_calls("nvidia-smi")) == 3
    read()
    assert len(tools.list_calls("nvidia-smi")) == 4, "a refused field is asked for once"


@pytest.mark.parametrize(
    "missing", ["[N/A]", "[Not Supported]", "ERR!", "N/A", "[Unknown Error]", "99999999999999", "-1"]
)
def test_value_that_is_none_is_unknown(missing: str) -> None:
    cells = WHOLE.strip().split(", ")
    cells[4:8] = [missing] * 4
    (gpu,) = parse_gpus(", ".join(cells), FIELDS)
    device = gpu.device
    assert (device.memory_bytes, device.free_bytes, device.utilization_percent) == (None, None, None)
    assert device.temperature_celsius in {None, -1}


def test_gpu_without_memory_of_its_own_shares_that_of_the_machine(tools: ToolFolder) -> None:
    tools.add_recorded("nvidia-smi", {"--query-gpu=": GB10})
    reading = read()
    assert reading.shares_memory
    assert reading.devices[0].architecture == "sm_121"
    # A GH200 addresses the machine's memory as well, and has its own.
    for own in (WHOLE, WHOLE.replace("None", "ATS")):
        (gpu,) = parse_gpus(own, FIELDS)
        assert not gpu.shares_memory


def test_lost_gpu_does_not_lose_the_others(tools: ToolFolder) -> None:
    text = f"Unable to determine the device handle for GPU0: 0000:18:00.0: Unknown Error\n{SECOND}"
    tools.add("nvidia-smi", f"cat << 'END'\n{text}END\nexit 15")
    reading = read()
    assert [device.id for device in reading.devices] == ["GPU-b"]
    assert "nvidia-smi exited with 15 and printed `Unable to determine" in reading.problems[0]


@pytest.mark.parametrize("text", ["No devices were found", "<html>", "0, 1, 2", "a, b, c, d, e, f, g, h, i, j, k, l"])
def test_answer_without_gpus_is_a_problem(tools: ToolFolder, text: str) -> None:
    tools.add("nvidia-smi", f"echo '{text}'")
    reading = read()
    assert reading.devices == ()
    assert reading.problems == (f"nvidia-smi printed `{text}`, which states no GPU",)


def test_topology_that_cannot_be_read_costs_only_links(tools: ToolFolder) -> None:
    tools.add_recorded("nvidia-smi", {"--query-gpu=": WHOLE + SECOND})
    assert [device.links for device in read().devices] == [[], []]


def test_links_are_only_nvlinks() -> None:
    # Two GPUs of a workstation, and a header in the color that newer versions print.
    text = "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tPHB\tNV4\t0-11\nGPU1\tPHB\t X \tSYS\t0-11\n"
    assert parse_links(text) == {0: [2], 1: []}
    assert parse_links("nonsense\tGPU0\n") == {}


@pytest.mark.parametrize(
    ("capability", "name"), [("9.0", "sm_90"), ("12.1", "sm_121"), ("7.5", "sm_75"), ("[N/A]", ""), ("", ""), ("9", "")]
)
def test_architecture_is_named_by_capability(capability: str, name: str) -> None:
    assert format_architecture(capability) == name
