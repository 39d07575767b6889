"""The webhook as a whole: what it cannot judge it lets pass, and a port that is taken stops nothing else."""

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from controller.http_endpoints import BindAddress
from controller.placement.device_classes import DeviceClasses
from controller.preflight import preflight_webhook
from controller.preflight.admission_review import ReviewedWrite
from controller.preflight.preflight_webhook import NOT_UNDERSTOOD, PreflightWebhook
from controller.services.class_speeds import SpeedAssessor
from crds.inferenceservice import InferenceService
from devices.vendors import VENDORS
from fitness.performance_store import PerformanceTable
from kube.client import Client, Obj
from kube.resources import Resource
from tests.support.api_objects import as_service, service, store
from tests.support.background import running
from tests.support.eventually import eventually
from tests.support.service_decisions import SETTINGS
from tests.unit.controller.preflight.preflight_api import store_certificate

CHAT = as_service(service())


class OneSecret(Client):
    """An API server that has the Secret."""

    def __init__(self) -> None:
        self._secret = store_certificate()

    async def get(self, _resource: Resource, _name: str, _namespace: str | None = None) -> Obj:
        return self._secret


def build_webhook(port: int = 0, *, is_ready: bool = True) -> PreflightWebhook:
    classes = DeviceClasses()
    return PreflightWebhook(
        BindAddress("127.0.0.1", port),
        store(),
        SETTINGS,
        lambda: SpeedAssessor(classes.list_classes, PerformanceTable(), VENDORS),
        classes.has_unknown,
        is_ready=lambda: is_ready,
    )


@pytest.mark.parametrize(
    ("stored", "before", "is_update", "is_ready", "words"),
    [
        (None, None, False, True, NOT_UNDERSTOOD),
        (CHAT, None, True, True, NOT_UNDERSTOOD),
        (CHAT, None, False, False, "still reading the cluster"),
        (CHAT, None, False, True, "tiny"),
        (CHAT, CHAT, True, True, ""),
    ],
)
def test_what_cannot_be_judged_passes_with_a_warning(
    stored: InferenceService | None, before: InferenceService | None, *, is_update: bool, is_ready: bool, words: str
) -> None:
    write = ReviewedWrite("u", stored, before, is_update=is_update)
    answer = build_webhook(is_ready=is_ready).judge(write)
    assert answer.refusal == ""
    assert words in answer.warning
    assert bool(answer.warning) == bool(words)


async def test_port_that_is_taken_is_named_and_served_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_webhook, "RETRY_SECONDS", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with capture_logs() as logs:
            async with running(build_webhook(port).run(OneSecret())):
                await eventually(lambda: [each for each in logs if each["event"] == "port_not_served"])
                taken.close()
                await eventually(lambda: [each for each in logs if each["event"] == "preflight_served"])
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
    (problem,) = [each for each in logs if each["event"] == "port_not_served"]
    assert "--preflight-bind-address" in problem["way_out"]
