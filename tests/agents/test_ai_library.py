"""npm's `ai` with its provider for APIs like OpenAI's: what a program sees that was written for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.proxy import keep_alive
from tests.agents.conftest import AgentsGateway
from tests.agents.programs import ensure_agents
from tests.agents.test_agents import CUT, RETRY, RETRY_SECONDS, run
from tests.support.faulty_relay import Fault
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.unit.gateway.cluster.running_gateway import SECRET

WAYS = ("stream", "whole")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the program and the packages that it imports."""
    (tmp_path / "node_modules").symlink_to(ensure_agents())
    shutil.copy(Path(__file__).with_name("ask.mjs"), tmp_path)
    return tmp_path


async def ask(served: AgentsGateway, home: Path, way: str, *, key: str = SECRET) -> Any:
    """Return what the program has seen."""
    outcome = await run(["node", "ask.mjs", f"{served.gateway.url}/v1", way], home, {"POMONA_API_KEY": key})
    assert outcome.code == 0, outcome
    return json.loads(outcome.output)


@pytest.mark.parametrize("way", WAYS)
async def test_question_is_one_request(served: AgentsGateway, home: Path, way: str) -> None:
    assert await ask(served, home, way) == {"text": SENTENCE, "error": None, "reason": "stop"}
    assert served.relay.paths() == ["/v1/chat/completions"]


async def test_stream_that_was_cut_is_an_error(served: AgentsGateway, home: Path) -> None:
    served.relay.lasting_fault = CUT
    seen = await ask(served, home, "stream")
    assert SENTENCE.startswith(seen["text"])
    assert "its engine broke off the response, which is not complete" in seen["error"]["message"]
    assert len(served.relay.paths()) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", [429, 503])
async def test_library_waits_as_it_is_told(served: AgentsGateway, home: Path, way: str, status: int) -> None:
    served.relay.faults = [Fault(status, RETRY)]
    assert (await ask(served, home, way))["text"] == SENTENCE
    first, second = served.relay.requests
    assert second.came_at - first.came_at >= RETRY_SECONDS - 0.1


@pytest.mark.parametrize("way", WAYS)
async def test_errors_have_their_status(served: AgentsGateway, home: Path, way: str) -> None:
    refused = await ask(served, home, way, key="wrong")
    assert (refused["error"]["status"], refused["text"]) == (401, "")
    served.gateway.cluster.put_key(services=["other"])
    assert (await ask(served, home, way))["error"]["status"] == 404
    assert served.relay.paths() == []


async def test_comments_before_the_first_token_do_not_disturb_it(
    served: AgentsGateway, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_COMMENT_SECONDS", "COMMENT_SECONDS"):
        monkeypatch.setattr(keep_alive, name, 0.1)
    served.relay.faults = [Fault(delay_seconds=2)]
    assert (await ask(served, home, "stream"))["text"] == SENTENCE
