"""The webhook as a whole: what it cannot judge it lets pass, and a port that is taken stops nothing else."""

import asyncio
import shutil
import socket
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from controller.http_endpoints import BindAddress
from controller.preflight import preflight_webhook
from controller.preflight.admission_review import ReviewedWrite
from controller.preflight.preflight_verdict import FitFacts
from controller.preflight.preflight_webhook import NOT_UNDERSTOOD, PreflightWebhook
from crds.inferenceservice import InferenceService
from tests.support.api_objects import as_service, service
from tests.support.background import running
from tests.support.certificates import HOST
from tests.support.eventually import eventually

CHAT = as_service(service())


def fill(folder: Path) -> None:
    """Put into the folder what the chart's Secret has."""
    shutil.copy(HOST.certificate, folder / "tls.crt")
    shutil.copy(HOST.key, folder / "tls.key")
    (folder / "path").write_text("a1b2\n")


def build_webhook(port: int = 0, folder: Path = Path("/nonexistent"), *, is_ready: bool = True) -> PreflightWebhook:
    facts = FitFacts() if is_ready else None
    return PreflightWebhook(BindAddress("127.0.0.1", port), folder, lambda _service: facts)


@pytest.mark.parametrize(
    ("stored", "before", "is_update", "is_ready", "words"),
    [
        (None, None, False, True, NOT_UNDERSTOOD),
        (CHAT, None, True, True, NOT_UNDERSTOOD),
        (CHAT, None, False, False, "still reading the cluster"),
        (CHAT, None, False, True, "no node or host says"),
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


async def test_port_that_is_taken_and_a_certificate_that_is_missing_are_told_once_and_served_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_webhook, "RETRY_SECONDS", 0.01)
    with socket.socket() as taken, capture_logs() as logs:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def list_problems() -> list[str]:
            return [log["error"] for log in logs if log["event"] == "preflight_not_served"]

        async with running(build_webhook(port, tmp_path).run()):
            await eventually(lambda: any("tls.crt" in problem for problem in list_problems()))
            fill(tmp_path)
            await eventually(lambda: any("in use" in problem for problem in list_problems()))
            taken.close()
            await eventually(lambda: [log for log in logs if log["event"] == "preflight_served"])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        assert len(list_problems()) == 2
    way_outs = {log["way_out"] for log in logs if log["event"] == "preflight_not_served"}
    assert all("--preflight-bind-address" in out and "preflight.enabled=true" in out for out in way_outs)


def test_path_is_that_of_the_secret_and_none_without_one(tmp_path: Path) -> None:
    webhook = build_webhook(folder=tmp_path)
    assert not webhook.knows_path("/preflight/")
    fill(tmp_path)
    assert webhook.knows_path("/preflight/a1b2")
    assert not any(map(webhook.knows_path, ("/preflight/", "/preflight/a1b", "/preflight/a1b2/", "/a1b2")))
    (tmp_path / "path").write_text("c3")
    assert webhook.knows_path("/preflight/c3")
    for damage in (b"", b"\n", b"\xff"):
        (tmp_path / "path").write_bytes(damage)
        assert not webhook.knows_path("/preflight/")
