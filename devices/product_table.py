"""Accelerator products: memory, architecture, memory bandwidth and arithmetic speed, by vendor, with their sources.

Memory as labels and the vendor's tool state it. Bandwidth and dense 16-bit matrix operations (without sparsity) by the
maker; where a data sheet gives no bandwidth, it is the width of the interface in bits times the data rate, which
`source` shows and a test computes. A figure that its maker does not state is absent.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from crds.size import MIB

_GIB: Final = 1024
"""In MiB."""


class Product(NamedTuple):
    """One product of a vendor."""

    name: str
    family: str
    """Architecture, in lower case: for NVIDIA as in the label `nvidia.com/gpu.family`."""
    capability: str
    """Compute capability of NVIDIA, or the target of AMD's compiler; empty if the vendor has none."""
    memory_mib: int | None = None
    """Memory as labels and the vendor's tool state it; None if products of this name differ in it, or error correction
    takes a part of it when it is switched on."""
    gb_per_second: float | None = None
    """Memory bandwidth in 10^9 bytes a second; None if products of this name differ in it."""
    source: str = ""
    """Where the bandwidth is stated, or how it is computed."""
    tflops: float | None = None
    """Dense 16-bit matrix operations in 10^12 a second; None: not stated."""
    ids: tuple[str, ...] = ()
    """Values of the label `amd.com/gpu.device-id`."""

    @property
    def memory_bytes(self) -> int | None:
        """The memory in bytes."""
        return None if self.memory_mib is None else self.memory_mib * MIB


_PASCAL: Final = (
    Product("P100-16GB", "pascal", "6.0", None, 732, "Tesla P100 data sheet", 18.7),
    Product("P100-12GB", "pascal", "6.0", None, 549, "Tesla P100 data sheet", 18.7),
    Product("P100", "pascal", "6.0"),
    Product("P40", "pascal", "6.1", None, 346, "Tesla P40 data sheet"),
    Product("P4", "pascal", "6.1", None, 192, "Tesla P4 data sheet"),
    Product("GTX-1050", "pascal", "6.1", None, 112, "128 bit x 7 Gb/s"),
    Product("GTX-1050-Ti", "pascal", "6.1", 4096, 112, "128 bit x 7 Gb/s"),
    Product("GTX-1060", "pascal", "6.1", None, 192, "192 bit x 8 Gb/s"),
    Product("GTX-1070", "pascal", "6.1", 8192, 256, "256 bit x 8 Gb/s"),
    Product("GTX-1070-Ti", "pascal", "6.1", 8192, 256, "256 bit x 8 Gb/s"),
    Product("GTX-1080", "pascal", "6.1", 8192, 320, "256 bit x 10 Gb/s"),
    Product("GTX-1080-Ti", "pascal", "6.1", 11_264, 484, "352 bit x 11 Gb/s"),
)
_VOLTA: Final = (
    Product("V100-16GB", "volta", "7.0", 16_384, 900, "V100 data sheet", 112),
    Product("V100-32GB", "volta", "7.0", 32_768, 900, "V100 data sheet", 112),
    Product("V100S", "volta", "7.0", 32_768, 1134, "V100 data sheet", 130),
    Product("V100", "volta", "7.0", None, 900, "V100 data sheet", 112),
    Product("TITAN-V", "volta", "7.0", None, 652.8, "3072 bit x 1.7 Gb/s", 110),
)
_TURING: Final = (
    Product("T4", "turing", "7.5", 15_360, 320, "T4 data sheet", 65),
    Product("T400", "turing", "7.5", None, 80, "T400 data sheet"),
    Product("T600", "turing", "7.5", 4096, 160, "T600 data sheet"),
    Product("T1000", "turing", "7.5", None, 160, "T1000 data sheet"),
    Product("GTX-1650", "turing", "7.5", 4096, 128, "128 bit x 8 Gb/s, as sold first; with GDDR6 it is 192"),
    Product("GTX-1650-Max-Q", "turing", "7.5", 4096, 112, "128 bit x 7 Gb/s, as sold first; with GDDR6 it is 160"),
    Product("GTX-1650-SUPER", "turing", "7.5", 4096, 192, "128 bit x 12 Gb/s"),
    Product("GTX-1660", "turing", "7.5", 6144, 192, "192 bit x 8 Gb/s"),
    Product("GTX-1660-Ti", "turing", "7.5", 6144, 288, "192 bit x 12 Gb/s"),
    Product("GTX-1660-SUPER", "turing", "7.5", 6144, 336, "192 bit x 14 Gb/s"),
    Product("RTX-2060", "turing", "7.5", None, 336, "192 bit x 14 Gb/s"),
    Product("RTX-2060-SUPER", "turing", "7.5", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-2070", "turing", "7.5", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-2070-SUPER", "turing", "7.5", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-2080", "turing", "7.5", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-2080-SUPER", "turing", "7.5", 8192, 496, "256 bit x 15.5 Gb/s"),
    Product("RTX-2080-Ti", "turing", "7.5", 11_264, 616, "352 bit x 14 Gb/s"),
    Product("TITAN-RTX", "turing", "7.5", None, 672, "384 bit x 14 Gb/s"),
    Product("Quadro-RTX-4000", "turing", "7.5", None, 416, "256 bit x 13 Gb/s"),
    Product("Quadro-RTX-5000", "turing", "7.5", None, 448, "256 bit x 14 Gb/s"),
    Product("Quadro-RTX-6000", "turing", "7.5", None, 672, "384 bit x 14 Gb/s"),
    Product("Quadro-RTX-8000", "turing", "7.5", None, 672, "384 bit x 14 Gb/s"),
)
_AMPERE: Final = (
    Product("A100-40GB", "ampere", "8.0", 40_960, 1555, "A100 data sheet", 312),
    Product("A100-40GB-PCIe", "ampere", "8.0", 40_960, 1555, "A100 data sheet", 312),
    Product("A100-80GB", "ampere", "8.0", 81_920, 2039, "A100 data sheet", 312),
    Product("A100-80GB-PCIe", "ampere", "8.0", 81_920, 1935, "A100 data sheet", 312),
    Product("A800-80GB", "ampere", "8.0", 81_920, 2039, "A800 data sheet", 312),
    Product("A800-80GB-PCIe", "ampere", "8.0", 81_920, 1935, "A800 data sheet", 312),
    Product("A30", "ampere", "8.0", 24_576, 933, "A30 data sheet", 165),
    Product("A2", "ampere", "8.6", 15_356, 200, "A2 data sheet", 18),
    Product("A10", "ampere", "8.6", 23_028, 600, "A10 data sheet", 125),
    Product("A10G", "ampere", "8.6", 23_028, 600, "Amazon EC2 G5: 24 GB at 600 GB/s", 70),
    Product("A16", "ampere", "8.6", 15_356, 200, "A16 data sheet: 4 devices of 200 GB/s", 17.9),
    Product("A40", "ampere", "8.6", 46_068, 696, "A40 data sheet", 149.7),
    Product("RTX-A400", "ampere", "8.6", 4096, 96, "RTX A400 data sheet"),
    Product("RTX-A1000", "ampere", "8.6", None, 192, "RTX A1000 data sheet"),
    Product("RTX-A2000", "ampere", "8.6", None, 288, "RTX A2000 data sheet"),
    Product("RTX-A4000", "ampere", "8.6", 16_376, 448, "RTX A4000 data sheet"),
    Product("RTX-A4500", "ampere", "8.6", 20_470, 640, "RTX A4500 data sheet"),
    Product("RTX-A5000", "ampere", "8.6", 24_564, 768, "RTX A5000 data sheet"),
    Product("RTX-A5500", "ampere", "8.6", 24_564, 768, "RTX A5500 data sheet"),
    Product("RTX-A6000", "ampere", "8.6", 49_140, 768, "RTX A6000 data sheet", 154.8),
    Product("RTX-3050", "ampere", "8.6", 8192, 224, "128 bit x 14 Gb/s"),
    Product("RTX-3050-6GB", "ampere", "8.6", 6144, 168, "96 bit x 14 Gb/s"),
    Product("RTX-3060", "ampere", "8.6"),
    Product("RTX-3060-8GB", "ampere", "8.6", 8192, 240, "128 bit x 15 Gb/s"),
    Product("RTX-3060-12GB", "ampere", "8.6", 12_288, 360, "192 bit x 15 Gb/s"),
    Product("RTX-3060-Ti", "ampere", "8.6", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-3070", "ampere", "8.6", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-3070-Ti", "ampere", "8.6", 8192, 608, "256 bit x 19 Gb/s"),
    Product("RTX-3080", "ampere", "8.6"),
    Product("RTX-3080-10GB", "ampere", "8.6", 10_240, 760, "320 bit x 19 Gb/s", 119),
    Product("RTX-3080-12GB", "ampere", "8.6", 12_288, 912, "384 bit x 19 Gb/s"),
    Product("RTX-3080-Ti", "ampere", "8.6", 12_288, 912, "384 bit x 19 Gb/s"),
    Product("RTX-3090", "ampere", "8.6", 24_576, 936, "384 bit x 19.5 Gb/s", 142),
    Product("RTX-3090-Ti", "ampere", "8.6", 24_564, 1008, "384 bit x 21 Gb/s"),
    Product("RTX-3050-Ti-Laptop", "ampere", "8.6", 4096, 192, "128 bit x 12 Gb/s"),
    Product("RTX-3060-Laptop", "ampere", "8.6", 6144, 336, "192 bit x 14 Gb/s"),
    Product("RTX-3070-Laptop", "ampere", "8.6", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-3070-Ti-Laptop", "ampere", "8.6", 8192, 448, "256 bit x 14 Gb/s"),
    Product("RTX-3080-Laptop", "ampere", "8.6", None, 448, "256 bit x 14 Gb/s"),
    Product("RTX-3080-Ti-Laptop", "ampere", "8.6", 16_384, 512, "256 bit x 16 Gb/s"),
    # Products of this name differ in memory and bandwidth.
    Product("A100", "ampere", "8.0", None, None, "", 312),
)
_ADA: Final = (
    Product("L4", "ada", "8.9", 23_034, 300, "L4 data sheet", 121),
    Product("L20", "ada", "8.9", 46_068, 864, "L20 data sheet", 119.5),
    Product("L40", "ada", "8.9", 46_068, 864, "L40 data sheet", 181),
    Product("L40S", "ada", "8.9", 46_068, 864, "L40S data sheet", 362),
    Product("RTX-2000-Ada", "ada", "8.9", 16_380, 224, "RTX 2000 Ada data sheet"),
    Product("RTX-4000-SFF-Ada", "ada", "8.9", 20_475, 280, "RTX 4000 SFF Ada data sheet"),
    Product("RTX-4000-Ada", "ada", "8.9", 20_475, 360, "RTX 4000 Ada data sheet"),
    Product("RTX-4500-Ada", "ada", "8.9", 24_570, 432, "RTX 4500 Ada data sheet"),
    Product("RTX-5000-Ada", "ada", "8.9", 32_760, 576, "RTX 5000 Ada data sheet"),
    Product("RTX-5880-Ada", "ada", "8.9", None, 960, "RTX 5880 Ada data sheet"),
    Product("RTX-6000-Ada", "ada", "8.9", 49_140, 960, "RTX 6000 Ada data sheet", 364.2),
    Product("RTX-4060", "ada", "8.9", 8188, 272, "128 bit x 17 Gb/s"),
    Product("RTX-4060-Ti", "ada", "8.9", None, 288, "128 bit x 18 Gb/s"),
    Product("RTX-4070", "ada", "8.9", 12_282, 504, "192 bit x 21 Gb/s"),
    Product("RTX-4070-SUPER", "ada", "8.9", 12_282, 504, "192 bit x 21 Gb/s"),
    Product("RTX-4070-Ti", "ada", "8.9", 12_282, 504, "192 bit x 21 Gb/s"),
    Product("RTX-4070-Ti-SUPER", "ada", "8.9", 16_376, 672, "256 bit x 21 Gb/s"),
    Product("RTX-4080", "ada", "8.9", 16_376, 716.8, "256 bit x 22.4 Gb/s"),
    Product("RTX-4080-SUPER", "ada", "8.9", 16_376, 736, "256 bit x 23 Gb/s"),
    Product("RTX-4090", "ada", "8.9", 24_564, 1008, "384 bit x 21 Gb/s", 330.3),
    Product("RTX-4090-D", "ada", "8.9", 24_564, 1008, "384 bit x 21 Gb/s"),
    Product("RTX-4050-Laptop", "ada", "8.9", 6141, 192, "96 bit x 16 Gb/s"),
    Product("RTX-4060-Laptop", "ada", "8.9", 8188, 256, "128 bit x 16 Gb/s"),
    Product("RTX-4070-Laptop", "ada", "8.9", 8188, 256, "128 bit x 16 Gb/s"),
    Product("RTX-4080-Laptop", "ada", "8.9", 12_282, 432, "192 bit x 18 Gb/s"),
    Product("RTX-4090-Laptop", "ada", "8.9", 16_376, 576, "256 bit x 18 Gb/s"),
)
_HOPPER: Final = (
    # An H100 or H800 of 80 GB without PCIe in its name is the SXM one.
    Product("H100-80GB", "hopper", "9.0", 81_559, 3350, "H100 data sheet, SXM", 989),
    Product("H100-PCIe", "hopper", "9.0", 81_559, 2000, "H100 data sheet, PCIe", 756),
    Product("H100-NVL", "hopper", "9.0", 95_830, 3900, "H100 data sheet, NVL", 835),
    Product("H800", "hopper", "9.0", 81_559, 3350, "H800 data sheet, SXM", 989),
    Product("H800-PCIe", "hopper", "9.0", 81_559, 2000, "H800 data sheet, PCIe", 756),
    Product("H20", "hopper", "9.0", 97_871, 4000, "H20 data sheet", 148),
    Product("H200", "hopper", "9.0", 143_771, 4800, "H200 data sheet, SXM", 989),
    Product("H200-NVL", "hopper", "9.0", 143_771, 4800, "H200 data sheet, NVL", 835),
    # With HBM3 of 96 GB it has 4000 GB/s, with HBM3e of 144 GB 4900.
    Product("GH200", "hopper", "9.0", None, None, "", 989),
    Product("GH200-480GB", "hopper", "9.0", 97_871, 4000, "GH200 data sheet, HBM3", 989),
    Product("GH200-144G", "hopper", "9.0", None, 4900, "GH200 data sheet, HBM3e", 989),
    Product("H100", "hopper", "9.0"),
)
_BLACKWELL: Final = (
    Product("B200", "blackwell", "10.0", 183_359, 8000, "DGX B200 data sheet: 64 TB/s of 8 devices", 2250),
    Product("GB200", "blackwell", "10.0", None, 8000, "GB200 NVL72 data sheet: 16 TB/s of 2 devices", 2500),
    Product("B300", "blackwell", "10.3", None, 8000, "DGX B300 data sheet"),
    Product("GB300", "blackwell", "10.3", None, 8000, "GB300 NVL72 data sheet", 2500),
    Product("GB10", "blackwell", "12.1", None, 273, "DGX Spark data sheet"),
    Product("RTX-5050", "blackwell", "12.0", 8151, 320, "128 bit x 20 Gb/s"),
    Product("RTX-5060", "blackwell", "12.0", 8151, 448, "128 bit x 28 Gb/s"),
    Product("RTX-5060-Ti", "blackwell", "12.0", None, 448, "128 bit x 28 Gb/s"),
    Product("RTX-5070", "blackwell", "12.0", 12_227, 672, "192 bit x 28 Gb/s", 123.5),
    Product("RTX-5070-Ti", "blackwell", "12.0", 16_303, 896, "256 bit x 28 Gb/s"),
    Product("RTX-5080", "blackwell", "12.0", 16_303, 960, "256 bit x 30 Gb/s", 225.1),
    Product("RTX-5090", "blackwell", "12.0", 32_607, 1792, "512 bit x 28 Gb/s", 419),
    Product("RTX-5090-D", "blackwell", "12.0", 32_607, 1792, "512 bit x 28 Gb/s"),
    Product("RTX-5060-Laptop", "blackwell", "12.0", 8151, 384, "128 bit x 24 Gb/s"),
    Product("RTX-5070-Laptop", "blackwell", "12.0", 8151, 384, "128 bit x 24 Gb/s"),
    Product("RTX-5070-Ti-Laptop", "blackwell", "12.0", 12_227, 672, "192 bit x 28 Gb/s"),
    Product("RTX-5080-Laptop", "blackwell", "12.0", 16_303, 896, "256 bit x 28 Gb/s"),
    Product("RTX-5090-Laptop", "blackwell", "12.0", 24_463, 896, "256 bit x 28 Gb/s"),
    Product("RTX-PRO-2000", "blackwell", "12.0", None, 288, "RTX PRO 2000 Blackwell data sheet"),
    Product("RTX-PRO-4000", "blackwell", "12.0", None, 672, "RTX PRO 4000 Blackwell data sheet"),
    Product("RTX-PRO-4500", "blackwell", "12.0", None, 896, "RTX PRO 4500 Blackwell data sheet"),
    Product("RTX-PRO-5000", "blackwell", "12.0", None, 1344, "RTX PRO 5000 Blackwell data sheet"),
    # Its editions differ in bandwidth.
    Product("RTX-PRO-6000", "blackwell", "12.0", 97_887),
    Product("RTX-PRO-6000-Server", "blackwell", "12.0", 97_887, 1597, "RTX PRO 6000 Server Edition data sheet"),
    Product("RTX-PRO-6000-Workstation", "blackwell", "12.0", 97_887, 1792, "RTX PRO 6000 Workstation data sheet"),
    Product("RTX-PRO-6000-Max-Q", "blackwell", "12.0", 97_887, 1792, "RTX PRO 6000 Max-Q Workstation data sheet"),
)
_INSTINCT: Final = (
    Product("MI50", "gcn5", "gfx906", None, 1024, "Radeon Instinct MI50 data sheet", 26.5, ("66a1",)),
    Product("MI60", "gcn5", "gfx906", 32 * _GIB, 1024, "Radeon Instinct MI60 data sheet", 29.5),
    Product("MI100", "cdna1", "gfx908", 32 * _GIB, 1228.8, "MI100 data sheet", 184.6, ("738c", "738e")),
    Product("MI210", "cdna2", "gfx90a", 64 * _GIB, 1638, "MI210 data sheet", 181, ("740f", "7410")),
    # Ids as AMD's GPU operator and metrics exporter map them; one of the two chips of an MI250X is one device.
    Product("MI250", "cdna2", "gfx90a", 64 * _GIB, 1638, "MI250 data sheet: 3277 of 2 devices", 181),
    Product("MI250X", "cdna2", "gfx90a", 64 * _GIB, 1638, "MI250X data sheet: 3277 of 2", 191.5, ("7408", "740c")),
    Product("MI300A", "cdna3", "gfx942", 128 * _GIB, 5300, "MI300A data sheet", 980.6, ("74a0",)),
    Product(
        "MI300X", "cdna3", "gfx942", 192 * _GIB, 5300, "MI300X data sheet", 1307.4, ("74a1", "74a9", "74b5", "74bd")
    ),
    Product("MI308X", "cdna3", "gfx942", 192 * _GIB, 5300, "MI308X data sheet", None, ("74a2", "74a8", "74b6", "74bc")),
    Product("MI325X", "cdna3", "gfx942", 256 * _GIB, 6000, "MI325X data sheet", 1307.4, ("74a5", "74b9")),
    Product("MI350X", "cdna4", "gfx950", 288 * _GIB, 8000, "MI350X data sheet", 2300, ("75a0", "75b0")),
    Product("MI355X", "cdna4", "gfx950", 288 * _GIB, 8000, "MI355X data sheet", 2500, ("75a3", "75b3")),
)
_RADEON: Final = (
    Product("V620", "rdna2", "gfx1030", 32 * _GIB, 512, "256 bit x 16 Gb/s", None, ("73a1", "73ae")),
    Product("W6800", "rdna2", "gfx1030", 32 * _GIB, 512, "256 bit x 16 Gb/s", None, ("73a3",)),
    Product("RX-6600", "rdna2", "gfx1032", 8 * _GIB, 224, "128 bit x 14 Gb/s"),
    Product("RX-6600-XT", "rdna2", "gfx1032", 8 * _GIB, 256, "128 bit x 16 Gb/s"),
    Product("RX-6700-XT", "rdna2", "gfx1031", 12 * _GIB, 384, "192 bit x 16 Gb/s"),
    Product("RX-6800", "rdna2", "gfx1030", 16 * _GIB, 512, "256 bit x 16 Gb/s"),
    Product("RX-6800-XT", "rdna2", "gfx1030", 16 * _GIB, 512, "256 bit x 16 Gb/s"),
    Product("RX-6900-XT", "rdna2", "gfx1030", 16 * _GIB, 512, "256 bit x 16 Gb/s"),
    Product("RX-6950-XT", "rdna2", "gfx1030", 16 * _GIB, 576, "256 bit x 18 Gb/s"),
    Product("W7800", "rdna3", "gfx1100", None, 576, "256 bit x 18 Gb/s"),
    Product("W7900", "rdna3", "gfx1100", 48 * _GIB, 864, "384 bit x 18 Gb/s", None, ("7448", "744a")),
    # One device id for cards that differ.
    Product("RX-7900", "rdna3", "gfx1100", ids=("744c",)),
    Product("RX-7600", "rdna3", "gfx1102", 8 * _GIB, 288, "128 bit x 18 Gb/s"),
    Product("RX-7600-XT", "rdna3", "gfx1102", 16 * _GIB, 288, "128 bit x 18 Gb/s"),
    Product("RX-7700-XT", "rdna3", "gfx1101", 12 * _GIB, 432, "192 bit x 18 Gb/s"),
    Product("RX-7800-XT", "rdna3", "gfx1101", 16 * _GIB, 624, "256 bit x 19.5 Gb/s"),
    Product("RX-7900-GRE", "rdna3", "gfx1100", 16 * _GIB, 576, "256 bit x 18 Gb/s"),
    Product("RX-7900-XT", "rdna3", "gfx1100", 20 * _GIB, 800, "320 bit x 20 Gb/s", 103),
    Product("RX-7900-XTX", "rdna3", "gfx1100", 24 * _GIB, 960, "384 bit x 20 Gb/s", 123),
    # The processors Ryzen AI Max, whose graphics have the memory of the machine.
    Product("Radeon-8050S", "rdna3.5", "gfx1151", None, 256, "256 bit x 8 Gb/s"),
    Product("Radeon-8060S", "rdna3.5", "gfx1151", None, 256, "256 bit x 8 Gb/s"),
    Product("RX-9060-XT", "rdna4", "gfx1200", None, 320, "128 bit x 20 Gb/s"),
    # One device id for cards that differ in speed only.
    Product("RX-9070", "rdna4", "gfx1201", 16 * _GIB, 640, "256 bit x 20 Gb/s", None, ("7550",)),
    Product("RX-9070-XT", "rdna4", "gfx1201", 16 * _GIB, 640, "256 bit x 20 Gb/s", 195),
    Product("R9700", "rdna4", "gfx1201", 32 * _GIB, 640, "256 bit x 20 Gb/s", 191),
)
_INTEL: Final = (
    Product("Arc-A380", "xe-hpg", "", 6 * _GIB, 186, "96 bit x 15.5 Gb/s"),
    Product("Arc-A580", "xe-hpg", "", 8 * _GIB, 512, "256 bit x 16 Gb/s"),
    Product("Arc-A750", "xe-hpg", "", 8 * _GIB, 512, "256 bit x 16 Gb/s"),
    Product("Arc-A770", "xe-hpg", "", None, None),
    Product("Arc-A770-8GB", "xe-hpg", "", 8 * _GIB, 512, "256 bit x 16 Gb/s"),
    Product("Arc-A770-16GB", "xe-hpg", "", 16 * _GIB, 560, "256 bit x 17.5 Gb/s"),
    Product("Flex-140", "xe-hpg", "", 6 * _GIB, 168, "Flex 140 data sheet: 336 of 2 devices"),
    Product("Flex-170", "xe-hpg", "", 16 * _GIB, 576, "Flex 170 data sheet"),
    Product("Max-1100", "xe-hpc", "", 48 * _GIB, 1228.8, "Max 1100 data sheet"),
    Product("Max-1550", "xe-hpc", "", 128 * _GIB, 3276.8, "Max 1550 data sheet"),
    Product("Arc-B570", "xe2", "", 10 * _GIB, 380, "160 bit x 19 Gb/s"),
    Product("Arc-B580", "xe2", "", 12 * _GIB, 456, "192 bit x 19 Gb/s"),
    Product("Arc-Pro-B50", "xe2", "", 16 * _GIB, 224, "128 bit x 14 Gb/s"),
    Product("Arc-Pro-B60", "xe2", "", 24 * _GIB, 456, "192 bit x 19 Gb/s"),
)
_GAUDI: Final = (
    # Memory as hl-smi states it.
    Product("Gaudi2", "gaudi2", "", 96 * _GIB, 2450, "Gaudi 2 white paper", 432),
    Product("Gaudi3", "gaudi3", "", 128 * _GIB, 3700, "Gaudi 3 white paper", 1835),
)

PRODUCTS: Final[Mapping[str, tuple[Product, ...]]] = {
    # Memory as nvidia-smi states it: an H100 has less than 80 GiB, while an A100 has all of it.
    "nvidia": (*_PASCAL, *_VOLTA, *_TURING, *_AMPERE, *_ADA, *_HOPPER, *_BLACKWELL),
    "amd": (*_INSTINCT, *_RADEON),
    "intel": _INTEL,
    "intel-gaudi": _GAUDI,
}
"""By the name of the vendor in `devices/vendors.py`, the oldest architecture first."""
