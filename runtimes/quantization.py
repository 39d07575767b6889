"""The refusal of quantizations that an engine cannot serve on an accelerator, by each engine's own table.

Otherwise the engine would fail minutes after the pod was placed.
"""

import re
from typing import Final, NamedTuple

from devices.products import find_family, list_families, list_products
from devices.vendors import VENDORS
from runtimes.registry import RUNTIMES, find_runtime
from runtimes.runtime import PLAIN

_ANY: Final = "*"
_METHODS: Final = tuple(
    (re.compile(pattern), method)
    for pattern, method in (
        (r"|none|half|(bf|fp|f|float|bfloat)(16|32)", PLAIN),
        (r"i?q\d.*|tq\d.*|gguf.*|mxfp4_moe", "gguf"),
        (r"mx\d.*|\d+-bit", "mlx"),
        (r".*mxfp4.*", "mxfp4"),
        (r".*mxfp6.*", "mxfp6"),
        (r".*(nvfp4|modelopt_fp4).*", "nvfp4"),
        (r".*fp8.*|modelopt", "fp8"),
        (r"awq.*", "awq"),
        (r"gptq.*", "gptq"),
        (r"(bitsandbytes|bnb).*", "bitsandbytes"),
        (r"(int8|w8a8).*", "int8"),
        (r"compressed-tensors.*", "compressed-tensors"),
        (r"torchao.*", "torchao"),
        (r"quark.*", "quark"),
        (r"inc", "inc"),
    )
)
_BITS: Final = re.compile(r"(?<=\w) \d+-bit$")
_CUMULATIVE_VENDOR: Final = "nvidia"
"""The vendor whose architectures each do what earlier ones did; AMD has two lines of them."""


class _Support(NamedTuple):
    """Architectures of one vendor on which an engine serves a method."""

    native: frozenset[str]
    emulated: frozenset[str]
    is_any: bool
    """True if every product of the vendor will do, listed or not."""


def name_method(quantization: str) -> str | None:
    """Return the method of a quantization as a Model's status states it (`awq 4-bit`, `Q4_K_M`, `bfloat16`).

    None: it is not known, so it is not judged.
    """
    text = _BITS.sub("", quantization.strip().lower())
    return next((method for pattern, method in _METHODS if pattern.fullmatch(text)), None)


def refuse_quantization(quantization: str, engine: str, vendor: str, device: str = "") -> str | None:
    """Return why an engine cannot serve weights of a quantization on an accelerator, with pairs that work, or None.

    None also if nothing is known here of the engine, the vendor, the method of quantization or the architecture of the
    device: then the engine itself has to refuse.

    Args:
        quantization: as a Model's status states it, or the name of a method.
        engine: name of the runtime.
        vendor: name of the accelerator.
        device: product or architecture; empty or not listed: unknown, so that any product of the vendor may be meant.
    """
    by_vendor, method = find_runtime(engine).quantizations, name_method(quantization)
    if not by_vendor or vendor not in VENDORS:  # nothing is known of the engine, or of the accelerator
        return None
    if vendor not in by_vendor:
        return f"runtime {engine} does not run on accelerator {vendor}: it runs on {', '.join(by_vendor)}"
    if method is None:
        return None

    # Architectures on which the engine serves the method (None: on none), and that of this device (None: unknown).
    support, family = _find_support(method, engine, vendor), find_family(vendor, device)
    if support is None:
        return (
            f"runtime {engine} cannot serve {quantization} weights on accelerator {vendor}, where it takes "
            f"{', '.join(by_vendor[vendor])}: {_list_pairs(method)}"
        )

    # Emulated is enough: the engine then computes with 16 bits.
    if support.is_any or family is None or family in support.native | support.emulated:
        return None
    problem = f"runtime {engine} cannot serve {quantization} weights on {device}, which is {vendor} {family}"
    return f"{problem}: {_list_pairs(method)}"


def list_unfit_families(quantization: str, engine: str, vendor: str) -> tuple[str, ...]:
    """Return the architectures of a vendor on which an engine cannot serve a quantization; none if that is unknown."""
    method = name_method(quantization)
    support = _find_support(method, engine, vendor) if method else None
    if support is None or support.is_any:
        return ()
    return tuple(family for family in list_families(vendor) if family not in support.native | support.emulated)


def warn_quantization(quantization: str, engine: str, vendor: str, device: str = "") -> str | None:
    """Return a remark about a quantization that is not refused, or None.

    Either the device only emulates it, so that it saves memory but no time; or the device is not known, and not every
    product of the vendor can serve it.
    """
    method = name_method(quantization)
    support = _find_support(method, engine, vendor) if method else None
    # Nothing is known, or every product will do.
    if method is None or support is None or support.is_any:
        return None

    # The device is unknown, or it emulates the method; else there is nothing to remark.
    family = find_family(vendor, device)
    if family is None:
        return f"{quantization} with {engine} needs {_describe_support(method, engine, vendor)}: set hardware.products"
    if family not in support.emulated:
        return None
    better = f"; {vendor} {_name_families(vendor, support.native)} would compute with them" if support.native else ""
    return (
        f"runtime {engine} emulates {quantization} on {device}, which is {vendor} {family}: the weights save memory, "
        f"but are computed with 16 bits{better}"
    )


def _find_support(method: str, engine: str, vendor: str) -> _Support | None:
    """Return the architectures on which an engine serves a method of quantization; None if there are none.

    The terms of its table are `*` (every product), `ada` (this architecture), `ada+` (also later ones) and `~ampere`
    (emulated: weights are kept in this form, but computed with 16 bits).
    """
    terms = find_runtime(engine).quantizations.get(vendor, {}).get(method)
    if terms is None:
        return None

    # Sort the terms: the method is native or emulated on the architectures that they name.
    families, native, emulated = list_families(vendor), set[str](), set[str]()
    for term in terms.split():
        # `*` names no architecture: `is_any` stands for it.
        if term == _ANY:
            continue
        target = emulated if term.startswith("~") else native
        name = term.strip("~+")
        if term.endswith("+"):
            # `families` begins with the oldest.
            target.update(families[families.index(name) :])
        else:
            target.add(name)
    return _Support(native=frozenset(native), emulated=frozenset(emulated), is_any=terms == _ANY)


def _list_pairs(method: str) -> str:
    """Return the pairs of engine and accelerator that serve a method, for a message."""
    pairs = []
    for engine, runtime in RUNTIMES.items():
        vendors = [vendor for vendor, methods in runtime.quantizations.items() if method in methods]
        if vendors:
            pairs.append(f"{engine} on {', '.join(_describe_support(method, engine, vendor) for vendor in vendors)}")
    if not pairs:
        return "use other weights of the model"
    return f"it works with {'; '.join(pairs)}"


def _describe_support(method: str, engine: str, vendor: str) -> str:
    """Return a vendor with the architectures that serve a method, if not all do."""
    support = _find_support(method, engine, vendor)
    if support is None or support.is_any:
        return vendor
    return f"{vendor} {_name_families(vendor, support.native | support.emulated)}"


def _name_families(vendor: str, families: frozenset[str]) -> str:
    """Return `from ampere on` if all later architectures are among `families`, else the products of each.

    Only NVIDIA's architectures each do what the earlier ones do, so that "from ... on" is true of future ones.
    """
    ordered = list_families(vendor)
    # The oldest of them.
    first = next(family for family in ordered if family in families)
    if set(ordered[ordered.index(first) :]) == families and vendor == _CUMULATIVE_VENDOR:
        return f"from {first} on"
    return "/".join(name for family in ordered if family in families for name in list_products(vendor, family))
