"""Corrections count where their measurements may, and follow every change."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crds.meta import CONTROLLER_NAMESPACE
from fitness.correction_table import CorrectionGroup, CorrectionTable, MeasuredRatio
from fitness.corrections import NO_CORRECTIONS, SpeedRatio, learn_corrections

NAMESPACES = ("", CONTROLLER_NAMESPACE, "team", "other")
VENDORS = ("nvidia", "amd")
CLASSES = ("ax1", "bx1")


def measured(namespace: str, factor: float, vendor: str = "nvidia", device_class: str = "ax1") -> MeasuredRatio:
    return MeasuredRatio(namespace, SpeedRatio(vendor, f"{vendor}-{device_class}", "vllm", 100 * factor, 100))


ratios = st.builds(
    measured, st.sampled_from(NAMESPACES), st.floats(0.01, 100), st.sampled_from(VENDORS), st.sampled_from(CLASSES)
)
changes = st.lists(st.tuples(st.sampled_from("abc"), st.lists(ratios, max_size=4).map(tuple)), max_size=12)


@given(changes)
def test_table_equals_what_is_learned_anew_of_what_a_namespace_may_use(
    steps: Sequence[tuple[str, tuple[MeasuredRatio, ...]]],
) -> None:
    table, by_hash = CorrectionTable(), dict[str, tuple[MeasuredRatio, ...]]()
    for model_hash, step in steps:
        table.put(model_hash, step)
        by_hash[model_hash] = step
        for namespace in ("", "team", "other", "third"):
            usable = {"", CONTROLLER_NAMESPACE, namespace}
            learned = learn_corrections(
                ratio.ratio for ratios in by_hash.values() for ratio in ratios if ratio.namespace in usable
            )
            for vendor in VENDORS:
                for device_class in (f"{vendor}-{suffix}" for suffix in (*CLASSES, "newx1")):
                    own = table.select(namespace).find(vendor, device_class, "vllm")
                    expected = learned.find(vendor, device_class, "vllm")
                    assert tuple(own) == pytest.approx(tuple(expected))
                    assert 1 / 3 <= own.ratio <= 3


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20))
def test_measurements_of_a_tenant_change_nothing_for_others(factors: list[float]) -> None:
    table = CorrectionTable()
    table.put("shared", (measured("", 0.8),))
    before = {
        namespace: table.select(namespace).find("nvidia", "nvidia-ax1", "vllm")
        for namespace in ("", "team", CONTROLLER_NAMESPACE)
    }
    for number, factor in enumerate(factors):
        table.put(f"forged-{number}", (measured("hostile", factor),))
    assert before == {namespace: table.select(namespace).find("nvidia", "nvidia-ax1", "vllm") for namespace in before}


def test_change_names_the_estimates_that_it_corrects_and_what_is_equal_changes_nothing() -> None:
    table, seen = CorrectionTable(), list[frozenset[CorrectionGroup]]()
    table.subscribe(seen.append)
    table.put("a", (measured("team", 0.5),))
    table.put("a", (measured("team", 0.5),))
    table.put("a", (measured(CONTROLLER_NAMESPACE, 0.5),))
    table.put("a")
    of_team, of_all = CorrectionGroup("team", "nvidia", "vllm"), CorrectionGroup("", "nvidia", "vllm")
    assert seen == [{of_team}, {of_team, of_all}, {of_all}]
    assert table.select("team").find("nvidia", "nvidia-ax1", "vllm") == NO_CORRECTIONS.find(
        "nvidia", "nvidia-ax1", "vllm"
    )


def test_change_of_one_vendor_is_none_of_another() -> None:
    table, seen = CorrectionTable(), list[frozenset[CorrectionGroup]]()
    table.put("a", (measured("team", 0.5), measured("team", 0.5, "amd")))
    table.subscribe(seen.append)
    table.put("a", (measured("team", 0.5), measured("team", 0.7, "amd")))
    assert seen == [{CorrectionGroup("team", "amd", "vllm")}]
    assert table.select("team").find("nvidia", "nvidia-ax1", "vllm").measurements == 1
