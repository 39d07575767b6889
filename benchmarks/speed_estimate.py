"""The estimates of `fitness/` beside community measurements and beside llmfit, as tables of docs/fit-and-speed.md.

Speed is compared with the measurements that llmfit carries (`benchmarks/community_speeds.py`). A hash of the device's
name holds back three tenths of them, so that a device is never judged by what was learned from itself; and in ten parts
each device is held back once. Memory and speed are compared with llmfit's own estimates of its catalog as well.

    python -m benchmarks.speed_estimate --write    writes the tables into the page
"""

import hashlib
import importlib.metadata
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.community_speeds import CommunityRow, read_rows
from benchmarks.peer_estimates import (
    PRODUCTS_COMPARED,
    PeerMemory,
    compare_memory,
    compare_speed,
    count_understated_experts,
)
from crds.serving import ServingOptions
from fitness.corrections import NO_CORRECTIONS, Corrections, SpeedRatio, learn_corrections
from fitness.speed import SpeedEstimate, estimate_speed

PAGE: Final = Path(__file__).parent.parent / "docs" / "fit-and-speed.md"
BEGIN: Final = "<!-- written by python -m benchmarks.speed_estimate --write: begin -->"
END: Final = "<!-- end -->"
PARTS: Final = 10
HELD_BACK: Final = 3
"""Parts of ten that are held back."""
_NEAR: Final = 0.25
_MEMORY_NEAR: Final = 0.1
_PEER_EFFICIENCY: Final = 0.55
"""llmfit's one efficiency for all devices, without a second term (its `fit.rs`)."""
_SIZES: Final = ((0.0, 1.0), (1.0, 3.0), (3.0, 8.0), (8.0, 14.0), (14.0, 1000.0))


class Judgement(NamedTuple):
    """One measured row beside its estimate."""

    row: CommunityRow
    ratio: float
    """Measured by expected."""
    is_in_range: bool
    width: float
    """Upper end of the range by its lower one."""

    @property
    def group(self) -> str:
        """Vendor and kind of the model."""
        return f"{self.row.devices.vendor}, {'experts' if self.row.active_share else 'dense'}"


def part_of(device: str) -> int:
    """Return the part, from 0 to 9, to which a hash assigns a device."""
    return int(hashlib.sha256(device.encode()).hexdigest()[:8], 16) % PARTS


def estimate_row(row: CommunityRow, corrections: Corrections = NO_CORRECTIONS) -> SpeedEstimate | None:
    """Estimate the speed of a measured model, on its device."""
    return estimate_speed(
        row.layout, ServingOptions(), row.runtime, row.devices, corrections, active_share=row.active_share
    )


def learn(rows: Iterable[CommunityRow]) -> Corrections:
    """Learn corrections from measured rows."""
    return learn_corrections(
        SpeedRatio(
            row.devices.vendor,
            row.devices.device_class,
            row.runtime,
            row.tokens_per_second,
            estimate.generation.expected,
        )
        for row in rows
        if (estimate := estimate_row(row)) is not None
    )


def judge(rows: Iterable[CommunityRow], corrections: Corrections) -> list[Judgement]:
    """Compare rows with their estimates; a row without an estimate counts as one that is out of range."""
    judged = []
    for row in rows:
        estimate = estimate_row(row, corrections)
        if estimate is None:
            judged.append(Judgement(row, 0.0, False, 0.0))
            continue
        low, expected, high = estimate.generation
        measured = row.tokens_per_second
        judged.append(Judgement(row, measured / expected, low <= measured <= high, high / low))
    return judged


def judge_held_back(rows: Sequence[CommunityRow]) -> list[Judgement]:
    """Judge the devices that are held back, by what was learned from the others."""
    learned = learn(row for row in rows if part_of(row.device) >= HELD_BACK)
    return judge([row for row in rows if part_of(row.device) < HELD_BACK], learned)


def judge_each_device(rows: Sequence[CommunityRow]) -> list[Judgement]:
    """Judge each device by what was learned from the nine parts in which it is not."""
    judged = []
    for part in range(PARTS):
        learned = learn(row for row in rows if part_of(row.device) != part)
        judged += judge([row for row in rows if part_of(row.device) == part], learned)
    return judged


def share(
    judged: Sequence[Judgement], holds: Callable[[Judgement], bool] = lambda judgement: judgement.is_in_range
) -> float:
    """Return the share of rows for which `holds` is true: those within their own range."""
    return sum(map(holds, judged)) / len(judged) if judged else 0.0


def share_by_device(judged: Sequence[Judgement]) -> float:
    """Return the share of rows within their range, with each device counted once, however often it was measured."""
    devices = {judgement.row.device for judgement in judged}
    return statistics.mean(
        share([judgement for judgement in judged if judgement.row.device == device]) for device in devices
    )


def peer_ratio(row: CommunityRow) -> float:
    """Return measured by expected of llmfit's formula for dense models, with our bandwidth and bytes."""
    read = row.layout.tensor_bytes * (row.active_share or 1.0)
    return row.tokens_per_second * read / ((row.devices.bandwidth_bytes_per_second or 0) * _PEER_EFFICIENCY)


def _speed_table(judged: Sequence[Judgement]) -> list[str]:
    lines = [
        "| devices, models | rows | devices | measured / expected | within 25 % | in range | width | one term |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups = [*sorted({judgement.group for judgement in judged}), ""]
    for group in groups:
        rows = [judgement for judgement in judged if not group or judgement.group == group]
        near = share(rows, lambda judgement: abs(judgement.ratio - 1) <= _NEAR)
        peer = share(rows, lambda judgement: abs(peer_ratio(judgement.row) - 1) <= _NEAR)
        lines.append(
            f"| {group or '**all**'} | {len(rows)} | {len({row.row.device for row in rows})} "
            f"| {statistics.median(row.ratio for row in rows):.2f} | {near:.0%} | {share(rows):.0%} "
            f"| {statistics.median(row.width for row in rows):.2f} | {peer:.0%} |"
        )
    return lines


def _memory_table(compared: Sequence[PeerMemory]) -> list[str]:
    lines = [
        "| parameters | rows | 5th percentile | median | 95th percentile | within 10 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for least, most in (*_SIZES, (0.0, 1000.0)):
        ratios = sorted(memory.ratio for memory in compared if least <= memory.billions < most)
        name = "**all**" if most - least == _SIZES[-1][1] else f"{least:.0f} to {most:.0f} B"
        name = f"from {least:.0f} B" if name.endswith("1000 B") else name
        cuts = statistics.quantiles(ratios, n=20)
        near = sum(abs(ratio - 1) <= _MEMORY_NEAR for ratio in ratios) / len(ratios)
        lines.append(
            f"| {name} | {len(ratios)} | {cuts[0]:.2f} | {statistics.median(ratios):.2f} | {cuts[-1]:.2f} "
            f"| {near:.0%} |"
        )
    return lines


def _peer_table() -> list[str]:
    lines = [
        "| device as its driver names it | our GB/s | llmfit's GB/s | rows | median ours / llmfit's |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for product, memory_mib in PRODUCTS_COMPARED:
        speed = compare_speed(product, memory_mib)
        theirs = f"{speed.peer_gb_per_second:.0f}" if speed.peer_gb_per_second else "a constant instead"
        lines.append(
            f"| {product} | {speed.gb_per_second:.0f} | {theirs} | {len(speed.ratios)} "
            f"| {statistics.median(speed.ratios):.2f} |"
        )
    return lines


def render() -> str:
    """Return the tables of the page."""
    dropped = Counter[str]()
    rows = list(read_rows(dropped))
    total = len(rows) + dropped.total()
    held, per_device = judge_held_back(rows), judge_each_device(rows)
    reasons = "; ".join(f"{count} because {reason}" for reason, count in dropped.most_common())
    whole, understated = count_understated_experts("NVIDIA H100 80GB HBM3", 81_559)
    version = importlib.metadata.version("llmfit")
    return "\n".join(
        (
            f"Measurements of llmfit {version}: {total}, of which {dropped.total()} are left out: {reasons}.",
            "",
            f"### Speed of devices that were held back ({len(held)} rows)",
            "",
            *_speed_table(held),
            "",
            f"With each device counted once, {share_by_device(held):.0%} are in range.",
            "",
            "### Speed with each device held back once",
            "",
            *_speed_table(per_device),
            "",
            f"With each device counted once, {share_by_device(per_device):.0%} are in range.",
            "",
            "### Memory by our estimate / by llmfit, dense models of its catalog",
            "",
            *_memory_table(compare_memory()),
            "",
            f"Models with experts that llmfit puts whole on an H100: {whole}; in less than their file: {understated}.",
            "",
            "### Speed by our estimate / by llmfit, dense models of its catalog from 3 B parameters",
            "",
            *_peer_table(),
        )
    )


def main() -> None:
    """Print the tables, or write them into the page."""
    tables = render()
    if "--write" not in sys.argv[1:]:
        print(tables)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


if __name__ == "__main__":
    main()
