"""A node is rejected for what is known for sure; whatever is unknown fits."""

from typing import Any

import pytest

from devices.vendors import VENDORS
from extender.misfit import find_static_misfit, find_transient_misfit
from extender.node_facts import ScoringFacts
from fitness.stated_hardware import DeviceHardware
from tests.unit.extender.extender_objects import GIB, H100_LABELS, L4_LABELS, MI300_LABELS, SHARED, facts, subject

LARGE = 40 * GIB


@pytest.mark.parametrize(
    ("labels", "asked", "words"),
    [
        (MI300_LABELS, {}, "its devices are of amd, and the service needs nvidia"),
        (L4_LABELS, {"need_bytes": LARGE}, "a device has 22.5 GiB of memory, and the model needs 40.0 GiB"),
    ],
)
def test_static_misfit_is_said_in_words(labels: dict[str, str], asked: dict[str, Any], words: str) -> None:
    assert find_static_misfit(facts(labels).hardware, subject(**asked), VENDORS) == words


@pytest.mark.parametrize(
    ("hardware", "asked"),
    [
        (facts(H100_LABELS).hardware, {"need_bytes": LARGE}),
        (facts(L4_LABELS | MI300_LABELS).hardware, {}),
        (DeviceHardware(), {"need_bytes": LARGE}),
        (DeviceHardware(frozenset({"nvidia"}), "nvidia"), {"need_bytes": LARGE}),
        (DeviceHardware(frozenset({"nvidia"}), "nvidia", memory_bytes=(None, None)), {"need_bytes": LARGE}),
        (facts(MI300_LABELS).hardware, {"is_served": False}),
        (facts(MI300_LABELS).hardware, {"accelerator": ""}),
        (facts(MI300_LABELS).hardware, {"accelerator": "acme-npu"}),
        (facts(MI300_LABELS).hardware, {"accelerator": "cpu", "device_count": 0}),
    ],
)
def test_node_of_which_nothing_speaks_against_it_fits(hardware: DeviceHardware, asked: dict[str, Any]) -> None:
    assert find_static_misfit(hardware, subject(**asked), VENDORS) is None


@pytest.mark.parametrize(
    ("memory_gib", "count", "fits"),
    [((24, 80), 1, True), ((24, 80), 2, False), ((24, None), 1, True), ((24, 24), 1, False), ((80,), 4, True)],
)
def test_as_many_devices_as_requested_must_be_large_enough(
    memory_gib: tuple[int | None, ...], count: int, *, fits: bool
) -> None:
    hardware = DeviceHardware(
        *(frozenset({"nvidia"}), "nvidia"),
        memory_bytes=tuple(gib and gib * GIB for gib in memory_gib),
        lists_devices=True,
    )
    misfit = find_static_misfit(hardware, subject(device_count=count, need_bytes=LARGE), VENDORS)
    assert (misfit is None) == fits


def test_shared_device_without_free_memory_fits_later() -> None:
    busy = facts(L4_LABELS | SHARED, free_bytes=4 * GIB)
    words = "its shared devices have 4 GiB free, and the model needs 8.0 GiB"
    assert find_transient_misfit(busy, subject(need_bytes=8 * GIB)) == words
    assert find_transient_misfit(busy, subject(need_bytes=4 * GIB + 1)) is None  # free memory is rounded down


@pytest.mark.parametrize(
    "known",
    [
        facts(L4_LABELS, free_bytes=0),
        facts(L4_LABELS | SHARED),
        facts(L4_LABELS | SHARED, free_bytes=None),
        ScoringFacts(),
    ],
)
def test_free_memory_that_is_unknown_or_of_exclusive_devices_rejects_nothing(known: ScoringFacts) -> None:
    assert find_transient_misfit(known, subject(need_bytes=8 * GIB)) is None
    assert find_transient_misfit(facts(L4_LABELS | SHARED, free_bytes=0), subject()) is None
