"""The table of number formats in which devices compute: 4-bit integers and 8-bit floating point, by architecture.

True means that matrix units multiply such numbers, not that an engine can store weights so.
"""

import re
from typing import NamedTuple

_TURING, _ADA, _HOPPER = 75, 89, 90


class NumberFormats(NamedTuple):
    """Formats in which a device computes; None if that is not known."""

    int4: bool | None = None
    fp8: bool | None = None


def find_number_formats(vendor: str, architecture: str) -> NumberFormats:
    """Return whether an architecture, such as sm_90, gfx942 or gaudi3, computes with INT4 and FP8; None: unknown."""
    if vendor == "nvidia":
        return _of_nvidia(architecture)
    if vendor == "amd":
        return _of_amd(architecture)
    if vendor == "intel-gaudi":
        # The guides of Gaudi state FP8 from Gaudi2 on; INT4 is a storage format there, which it converts.
        return NumberFormats(fp8={"gaudi": False, "gaudi2": True, "gaudi3": True}.get(architecture))
    return NumberFormats()


def _of_nvidia(architecture: str) -> NumberFormats:
    """Return the formats of tensor cores: INT4 from Turing to Ada, which Hopper dropped, and FP8 from Ada on.

    Source: the tables of CUDA's programming guide and of PTX (`mma` with `.s4`, `.e4m3`).
    """
    match = re.fullmatch(r"sm_([0-9]{2,3})", architecture)
    if not match:
        return NumberFormats()
    capability = int(match[1])
    return NumberFormats(int4=_TURING <= capability < _HOPPER, fp8=capability >= _ADA)


def _of_amd(architecture: str) -> NumberFormats:
    """Return the formats of matrix instructions: MFMA of CDNA and WMMA of RDNA.

    Source: AMD's instruction set documents: FP8 from CDNA3 (gfx942) and RDNA4 (gfx12) on; IU4 in RDNA3 and RDNA4 only.
    """
    # gfx9.. are CDNA and its predecessors, gfx10.., gfx11.. and gfx12.. RDNA; any other name is unknown.
    if not re.fullmatch(r"gfx(9[0-9a-f]{2}|1[0-2][0-9a-f]{2})", architecture):
        return NumberFormats()
    is_rdna4 = architecture.startswith("gfx12")
    return NumberFormats(
        int4=is_rdna4 or architecture.startswith("gfx11"),
        fp8=is_rdna4 or architecture in {"gfx940", "gfx941", "gfx942", "gfx950"},
    )
