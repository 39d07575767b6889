"""The table of Apple's chips: memory bandwidth, which bounds the speed of decoding and which macOS does not report.

The variants of a chip that was sold with two memory interfaces differ in GPU cores. The bandwidth of a chip that is not
listed is None.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

_GB: Final = 10**9


class Bandwidth(NamedTuple):
    """Memory bandwidth of one variant of a chip."""

    gb_per_second: int
    """In 10^9 bytes, as Apple counts."""
    source: str
    gpu_cores: int | None = None
    """GPU cores of this variant; None if all variants have the same bandwidth."""


CHIPS: Final[Mapping[str, tuple[Bandwidth, ...]]] = {
    # Apple states no bandwidth for the M1; its memory is LPDDR4X-4266 on 128 bits.
    "Apple M1": (Bandwidth(68, "4266 MT/s x 16 bytes; Apple calls the M2's 100 GB/s 50 % more, 2022-06-06"),),
    "Apple M1 Pro": (Bandwidth(200, "Apple newsroom, M1 Pro and M1 Max, 2021-10-18"),),
    "Apple M1 Max": (Bandwidth(400, "Apple newsroom, M1 Pro and M1 Max, 2021-10-18"),),
    "Apple M1 Ultra": (Bandwidth(800, "Apple newsroom, M1 Ultra, 2022-03-08"),),
    "Apple M2": (Bandwidth(100, "Apple newsroom, M2, 2022-06-06"),),
    "Apple M2 Pro": (Bandwidth(200, "Apple newsroom, M2 Pro and M2 Max, 2023-01-17"),),
    "Apple M2 Max": (Bandwidth(400, "Apple newsroom, M2 Pro and M2 Max, 2023-01-17"),),
    "Apple M2 Ultra": (Bandwidth(800, "Apple newsroom, M2 Ultra, 2023-06-05"),),
    "Apple M3": (Bandwidth(100, "Apple, MacBook Pro (14-inch, M3) specifications, 2023-10-30"),),
    "Apple M3 Pro": (Bandwidth(150, "Apple, MacBook Pro (M3 Pro) specifications, 2023-10-30"),),
    "Apple M3 Max": (
        Bandwidth(300, "Apple, MacBook Pro (M3 Max) specifications, 2023-10-30", gpu_cores=30),
        Bandwidth(400, "Apple, MacBook Pro (M3 Max) specifications, 2023-10-30", gpu_cores=40),
    ),
    "Apple M3 Ultra": (Bandwidth(819, "Apple, Mac Studio (2025) specifications, 2025-03-05"),),
    "Apple M4": (Bandwidth(120, "Apple newsroom, M4, 2024-05-07"),),
    "Apple M4 Pro": (Bandwidth(273, "Apple newsroom, M4 Pro and M4 Max, 2024-10-30"),),
    "Apple M4 Max": (
        Bandwidth(410, "Apple, MacBook Pro (M4 Max) specifications, 2024-10-30", gpu_cores=32),
        Bandwidth(546, "Apple newsroom, M4 Pro and M4 Max, 2024-10-30", gpu_cores=40),
    ),
    "Apple M5": (Bandwidth(153, "Apple newsroom, M5, 2025-10-15"),),
    "Apple M5 Pro": (Bandwidth(307, "Apple newsroom, M5 Pro and M5 Max, 2026-03-03"),),
    "Apple M5 Max": (
        Bandwidth(460, "Apple, MacBook Pro (M5 Max) specifications, 2026-03-03", gpu_cores=32),
        Bandwidth(614, "Apple newsroom, M5 Pro and M5 Max, 2026-03-03", gpu_cores=40),
    ),
    "Apple M5 Ultra": (Bandwidth(1200, "Apple newsroom, M6 and M5 Ultra, 2026-08-25"),),
    "Apple M6": (Bandwidth(170, "Apple newsroom, M6 and M5 Ultra, 2026-08-25: up to 170 GB/s"),),
}
"""By the name in sysctl machdep.cpu.brand_string."""


def bandwidth_bytes_per_second(chip: str | None, gpu_cores: int | None) -> int | None:
    """Look up the memory bandwidth of `chip`; None when the chip is not listed or its variant is not known."""
    # CHIPS: the variants of each chip by its name. One without a number of GPU cores is the only one of its chip.
    for variant in CHIPS.get(chip or "", ()):
        if variant.gpu_cores is None or variant.gpu_cores == gpu_cores:
            return variant.gb_per_second * _GB
    return None
