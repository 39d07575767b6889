"""Claude Code and Codex through the gateway: how often each asks for one question, and what it makes of faults."""

import asyncio
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from cli.endpoint.client_configuration import EndpointFacts, render_configuration
from gateway.proxy import errors, keep_alive
from tests.agents.conftest import CONTEXT_LENGTH, AgentsGateway
from tests.agents.programs import find_program
from tests.support.faulty_relay import Fault
from tests.support.tiny_models.tiny_gguf import SENTENCE
from tests.unit.gateway.cluster.running_gateway import SECRET

QUESTION = "say hello"
LIMIT_SECONDS = 180.0
RETRY_SECONDS = 2.0
RETRY = {"Retry-After": f"{RETRY_SECONDS:.0f}"}
CUT = Fault(cut_after_events=8)


class Outcome(NamedTuple):
    """The end of an agent."""

    code: int | None
    output: str
    errors: str


class Agent(Protocol):
    """An agent with a home folder of its own."""

    path: str
    """The path that it asks."""
    requests_of_cut_stream: int
    """So often it asks while each stream is cut."""
    requests_of_refused_key: int
    says_of_refused_key: str
    says_of_long_prompt: str

    async def ask(self, url: str, *, goes_on: bool = False) -> Outcome:
        """Ask a question, in the conversation before if it goes on."""


class ClaudeCode:
    """Claude Code, which gets the rest of a cut stream by a request without a stream."""

    path = "/v1/messages"
    requests_of_cut_stream = 2
    requests_of_refused_key = 1
    says_of_refused_key = "Please run /login"
    says_of_long_prompt = "Prompt is too long"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._program = find_program("@anthropic-ai/claude-code-*/claude")

    async def ask(self, url: str, *, goes_on: bool = False) -> Outcome:
        facts = EndpointFacts(url, SECRET, "chat", CONTEXT_LENGTH)
        exports = render_configuration("claude-code", facts).removesuffix("claude\n")
        words = [str(self._program), *(["--continue"] if goes_on else []), "-p", QUESTION]
        return await run(["sh", "-euc", f"{exports}exec {shlex.join(words)}"], self._home, {})


class Codex:
    """Codex, which asks five times again."""

    path = "/v1/responses"
    requests_of_cut_stream = 6
    requests_of_refused_key = 6
    says_of_refused_key = "the key is missing, wrong, suspended or expired"
    says_of_long_prompt = "ran out of room in the model's context window"

    def __init__(self, home: Path) -> None:
        self._home = home
        self._program = find_program("@openai/codex-*/vendor/*/bin/codex")

    async def ask(self, url: str, *, goes_on: bool = False) -> Outcome:
        facts = EndpointFacts(url, SECRET, "chat", CONTEXT_LENGTH)
        return await self.ask_by(render_configuration("codex", facts), {"POMONA_API_KEY": SECRET}, goes_on=goes_on)

    async def ask_by(self, configuration: str, variables: dict[str, str], *, goes_on: bool = False) -> Outcome:
        """Ask with this text as config.toml."""
        folder = self._home / ".codex"
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(configuration)
        words = ["exec", *(["resume", "--last"] if goes_on else []), "--skip-git-repo-check", QUESTION]
        return await run([str(self._program), *words], self._home, variables)


async def run(argv: Sequence[str], home: Path, variables: dict[str, str]) -> Outcome:
    """Run a program to its end, with nothing but these variables."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env={"HOME": str(home), "PATH": os.environ["PATH"], **variables},
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, said = await asyncio.wait_for(process.communicate(), LIMIT_SECONDS)
    except TimeoutError:
        process.kill()
        raise
    return Outcome(process.returncode, output.decode(), said.decode())


@pytest.fixture(params=[ClaudeCode, Codex])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Agent:
    made: Agent = request.param(tmp_path)
    return made


async def test_question_is_one_request(served: AgentsGateway, agent: Agent) -> None:
    outcome = await agent.ask(served.gateway.url)
    assert (outcome.code, outcome.output.strip()) == (0, SENTENCE), outcome
    (request,) = served.relay.requests
    assert request.path == agent.path
    assert request.headers["Authorization"] == "Bearer t"  # the service's, in place of the client's key
    assert SECRET.encode() not in request.body
    assert b"x-anthropic-billing-header" not in request.body
    assert "context window" not in outcome.errors  # the configuration states it


async def test_conversation_stays_at_its_endpoint(served: AgentsGateway, agent: Agent) -> None:
    served.gateway.cluster.serve("team-a", "chat", served.relay.url, served.spare_relay.url)
    for number in range(3):
        outcome = await agent.ask(served.gateway.url, goes_on=number > 0)
        assert outcome.code == 0, outcome
    assert sorted(len(relay.requests) for relay in (served.relay, served.spare_relay)) == [0, 3]


async def test_stream_that_was_cut_is_asked_for_again(served: AgentsGateway, agent: Agent) -> None:
    served.relay.faults = [CUT]
    outcome = await agent.ask(served.gateway.url)
    assert (outcome.code, outcome.output.strip()) == (0, SENTENCE), outcome
    assert served.relay.paths() == [agent.path] * 2


async def test_stream_that_is_always_cut_is_given_up(served: AgentsGateway, agent: Agent) -> None:
    served.relay.lasting_fault = CUT
    outcome = await agent.ask(served.gateway.url)
    assert served.relay.paths() == [agent.path] * agent.requests_of_cut_stream
    if outcome.code:
        assert "its engine broke off the response, which is not complete" in outcome.errors
    else:
        assert outcome.output.strip() == SENTENCE  # by a request without a stream


@pytest.mark.parametrize("status", [429, 503])
async def test_agent_waits_as_it_is_told(served: AgentsGateway, agent: Agent, status: int) -> None:
    served.relay.faults = [Fault(status, RETRY)]
    outcome = await agent.ask(served.gateway.url)
    assert (outcome.code, outcome.output.strip()) == (0, SENTENCE), outcome
    first, second = served.relay.requests
    assert second.came_at - first.came_at >= RETRY_SECONDS - 0.1


async def test_comments_before_the_first_token_do_not_disturb_an_agent(
    served: AgentsGateway, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_COMMENT_SECONDS", "COMMENT_SECONDS"):
        monkeypatch.setattr(keep_alive, name, 0.1)
    served.relay.faults = [Fault(delay_seconds=3)]
    outcome = await agent.ask(served.gateway.url)
    assert (outcome.code, outcome.output.strip()) == (0, SENTENCE), outcome
    assert len(served.relay.paths()) == 1


async def test_agent_says_soon_that_its_key_is_refused(
    served: AgentsGateway, agent: Agent, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the header that forbids another try, Claude Code asks on for minutes, and says nothing."""
    served.gateway.cluster.put_key(suspend=True)
    outcome = await agent.ask(served.gateway.url)
    assert outcome.code == 1
    assert agent.says_of_refused_key in outcome.output + outcome.errors
    assert capfd.readouterr().err.count('"status":401') == agent.requests_of_refused_key
    assert served.relay.paths() == []


async def test_agent_says_that_its_prompt_is_too_long(
    served: AgentsGateway, agent: Agent, small_engine_url: str
) -> None:
    served.gateway.cluster.serve("team-a", "chat", small_engine_url)
    outcome = await agent.ask(served.gateway.url)
    assert outcome.code == 1
    assert agent.says_of_long_prompt in outcome.output + outcome.errors


async def test_codex_goes_on_at_once_after_its_attempt_for_a_websocket(
    served: AgentsGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes one where nothing but the base URL of OpenAI is changed; after another status it would try for long."""
    attempts: list[float] = []
    refuse = errors.websocket_not_served

    def note_attempt() -> errors.RequestError:
        attempts.append(asyncio.get_running_loop().time())
        return refuse()

    monkeypatch.setattr(errors, "websocket_not_served", note_attempt)
    configuration = f'model = "chat"\nopenai_base_url = "{served.gateway.url}/v1"\n'
    outcome = await Codex(tmp_path).ask_by(configuration, {"CODEX_API_KEY": SECRET})
    assert (outcome.code, outcome.output.strip()) == (0, SENTENCE), outcome
    (attempt,), (request,) = attempts, served.relay.requests
    assert request.came_at - attempt < 2
