"""Corrections follow measurements of their own device class, and say little while they have few."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitness.corrections import NO_CORRECTIONS, SpeedRatio, learn_corrections


def _ratio(ratio: float, device_class: str = "nvidia-l4x1", vendor: str = "nvidia") -> SpeedRatio:
    return SpeedRatio(vendor, device_class, "llama.cpp", 40 * ratio, 40)


def test_nothing_measured_corrects_nothing() -> None:
    correction = NO_CORRECTIONS.find("nvidia", "nvidia-l4x1", "llama.cpp")
    assert (correction.ratio, correction.measurements) == (1.0, 0)


def test_many_measurements_of_a_class_decide_its_correction() -> None:
    learned = learn_corrections([_ratio(0.6)] * 50)
    assert learned.find("nvidia", "nvidia-l4x1", "llama.cpp").ratio == pytest.approx(0.6, rel=0.03)


def test_one_measurement_corrects_less_than_many() -> None:
    one, many = (
        learn_corrections([_ratio(0.5)] * count).find("nvidia", "nvidia-l4x1", "llama.cpp") for count in (1, 30)
    )
    assert 0.5 < many.ratio < one.ratio < 1
    assert one.spread > many.spread


def test_unmeasured_class_has_the_correction_of_its_vendor() -> None:
    learned = learn_corrections([_ratio(0.7, f"nvidia-{name}x1") for name in "abcdef"])
    correction = learned.find("nvidia", "nvidia-newx1", "llama.cpp")
    assert correction.ratio == pytest.approx(math.exp(math.log(0.7) * 6 / 7))
    assert learned.find("amd", "amd-newx1", "llama.cpp").measurements == 0
    assert learned.find("nvidia", "nvidia-newx1", "vllm").measurements == 0


def test_class_that_was_measured_often_counts_once_for_its_vendor() -> None:
    often = [_ratio(2.0, "nvidia-ax1")] * 1000
    learned = learn_corrections([*often, _ratio(1.0, "nvidia-bx1"), _ratio(1.0, "nvidia-cx1")])
    assert learned.find("nvidia", "nvidia-newx1", "llama.cpp").ratio == pytest.approx(1.0)


def test_outlier_does_not_move_a_correction() -> None:
    learned = learn_corrections([*[_ratio(0.9)] * 9, _ratio(0.06)])
    assert learned.find("nvidia", "nvidia-l4x1", "llama.cpp").ratio == pytest.approx(0.9, rel=0.05)


@pytest.mark.parametrize("measured", [0.0, -3.0, 40_000.0, math.nan, math.inf])
def test_damaged_measurement_is_not_learned(measured: float) -> None:
    learned = learn_corrections([SpeedRatio("nvidia", "nvidia-l4x1", "llama.cpp", measured, 40)])
    assert learned == learn_corrections([])


def test_disagreeing_devices_make_a_vendor_uncertain() -> None:
    alike = learn_corrections([_ratio(1.0, f"nvidia-{name}x1") for name in "abcd"])
    unlike = learn_corrections([_ratio(0.2 * 2**i, f"nvidia-{name}x1") for i, name in enumerate("abcd")])
    spreads = [corrections.find("nvidia", "nvidia-newx1", "llama.cpp").spread for corrections in (alike, unlike)]
    assert spreads[1] > 1.5 * spreads[0]


@given(st.lists(st.floats(0.06, 19), min_size=1, max_size=30))
def test_correction_stays_between_its_measurements_and_none(ratios: list[float]) -> None:
    learned = learn_corrections([_ratio(ratio) for ratio in ratios])
    for device_class in ("nvidia-l4x1", "nvidia-newx1"):
        correction = learned.find("nvidia", device_class, "llama.cpp")
        assert min(1.0, *ratios) - 1e-9 <= correction.ratio <= max(1.0, *ratios) + 1e-9
        assert correction.spread > 0
        assert correction.measurements == len(ratios)


@given(st.permutations([_ratio(r, c) for r, c in ((0.5, "a"), (0.8, "a"), (1.4, "b"), (0.9, "c"), (1.1, "c"))]))
def test_order_of_measurements_does_not_matter(measurements: list[SpeedRatio]) -> None:
    first = learn_corrections(sorted(measurements))
    assert learn_corrections(measurements) == first
