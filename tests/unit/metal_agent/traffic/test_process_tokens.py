"""The tokens per second in the statuses of processes change rarely, and are unknown rather than wrong."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kube.resources import ObjectKey
from metal_agent.lifecycle import ProcessState
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.process_tokens import LEAST_SECONDS, ProcessTokens, ShownRate, choose_rate
from metal_agent.traffic.token_rates import TokenRates
from tests.unit.metal_agent.traffic.test_token_rates import proxy_state


class Serving:
    """A stand-in of a runner: a process of a service, in a phase."""

    def __init__(self, service: ObjectKey | None) -> None:
        self.state = ProcessState("Ready")
        self.assignment = cast("Any", self)
        self.service = service


def rates_of(tokens_per_second: int, until: int = 60) -> TokenRates:
    rates = TokenRates()
    for second in range(0, until + 1, 10):
        rates.note_state(proxy_state(**{"a/chat": tokens_per_second * second}), second)
    return rates


@given(st.lists(st.none() | st.floats(0, 1000), max_size=60))
def test_number_changes_once_a_minute_at_most_and_by_more_than_a_tenth(measured: list[float | None]) -> None:
    shown: ShownRate | None = None
    for number, each in enumerate(measured):
        now = 10.0 * number
        before, shown = shown, choose_rate(shown, each, now)
        assert (shown is None) == (each is None)
        if before is not None and shown is not None and shown != before:
            assert now - before.since >= LEAST_SECONDS
            assert abs(shown.tokens_per_second - before.tokens_per_second) > 0.1 * before.tokens_per_second
        if before is None and shown is not None:
            assert shown == ShownRate(shown.tokens_per_second, now)


def test_idle_process_shows_0_and_an_unknown_one_nothing() -> None:
    runner = Serving(ObjectKey("a", "chat"))
    tokens = ProcessTokens({"u1": cast("Runner", runner)}, rates := rates_of(0))
    assert tokens.find("u1") == ""
    told: list[str] = []
    tokens.on_change = told.append
    rates.on_read(60)
    assert (tokens.find("u1"), told) == ("0.0", ["u1"])
    rates.on_read(70)
    assert told == ["u1"], "nothing has changed"
    rates.on_read(200)
    assert (tokens.find("u1"), told) == ("", ["u1", "u1"]), "the proxy is silent"


def test_question_of_a_starting_controller_changes_no_status() -> None:
    idle = ShownRate(0.0, 0.0)
    assert choose_rate(idle, 1 / 60, 1000.0) == idle
    assert choose_rate(idle, 1.0, 1000.0) == ShownRate(1.0, 1000.0)


def test_process_that_is_not_ready_shows_nothing() -> None:
    runner = Serving(ObjectKey("a", "chat"))
    tokens = ProcessTokens({"u1": cast("Runner", runner)}, rates := rates_of(5))
    rates.on_read(60)
    assert tokens.find("u1") == "5.0"
    runner.state = ProcessState("Failed")
    assert tokens.find("u1") == ""
    rates.on_read(60)
    assert tokens._shown == {}


def test_processes_of_one_service_share_its_tokens() -> None:
    runners = {uid: cast("Runner", Serving(ObjectKey("a", "chat"))) for uid in ("u1", "u2")}
    other = cast("Runner", Serving(None))
    tokens = ProcessTokens({**runners, "u3": other}, rates := rates_of(30))
    rates.on_read(60)
    assert [tokens.find(uid) for uid in ("u1", "u2", "u3")] == ["15.0", "15.0", ""]
