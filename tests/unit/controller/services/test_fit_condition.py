"""The condition Fits says before anything is placed whether a replica could run anywhere, and why not."""

import pytest

from controller.services.speed_report import SpeedReport, describe_fit
from crds.placement import ClassSpeed
from tests.support.service_decisions import chat_service, decide_chat

H100 = ClassSpeed(device_class="nvidia-h100x1", tokens_per_second="120", fit="perfect")
L4 = ClassSpeed(device_class="nvidia-l4x1", fit="too_tight", shortfall="needs 40 GiB, 22 GiB free on it: short 18 GiB")
UNKNOWN = ClassSpeed(device_class="nvidia-newx1")


def refuse(reason: str) -> ClassSpeed:
    return ClassSpeed(device_class="nvidia-t4x1", tokens_per_second="9.0", fit="good", refusal=reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("classes", "status", "reason", "words"),
    [
        ([H100, L4], "True", "Fits", "on 1 of 2 device classes, best on nvidia-h100x1 (perfect, 120 tokens/s)"),
        ([L4, UNKNOWN], "Unknown", "Unknown", "the memory of a replica on nvidia-newx1 is unknown"),
        ([L4], "False", "TooTight", "fits on no device class; nvidia-l4x1: needs 40 GiB"),
        ([refuse("TooSlow"), L4], "False", "TooSlow", "nvidia-t4x1: 9.0 tokens/s are fewer than spec.placement.min"),
        ([refuse("SpeedUnknown")], "False", "SpeedUnknown", "its speed is unknown"),
        ([refuse("TooTight")], "False", "TooTight", "the fit is good, less than spec.placement.minFit"),
    ],
)
def test_condition_says_what_fits_or_what_is_missing(
    classes: list[ClassSpeed], status: str, reason: str, words: str
) -> None:
    condition = describe_fit(classes, 3)
    assert (condition["status"], condition["reason"], condition["observedGeneration"]) == (status, reason, 3)
    assert words in condition["message"]


def test_service_without_device_classes_has_no_such_condition() -> None:
    for speed, expected in ((SpeedReport(), False), (SpeedReport((H100,)), True)):
        status = decide_chat(chat_service(), speed=speed).status
        assert status is not None
        assert ("Fits" in {condition["type"] for condition in status["conditions"]}) == expected
