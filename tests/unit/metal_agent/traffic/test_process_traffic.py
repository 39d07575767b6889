"""The traffic in the statuses of processes changes rarely, and is unknown rather than wrong."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kube.resources import ObjectKey
from metal_agent.lifecycle import ProcessState
from metal_agent.supervise.runner import Runner
from metal_agent.traffic.process_traffic import (
    LEAST_SECONDS,
    ProcessTraffic,
    ShownTraffic,
    TrafficReport,
    choose_traffic,
    share_rate,
)
from metal_agent.traffic.service_rates import ServiceRate, ServiceRates
from tests.unit.metal_agent.traffic.test_service_rates import proxy_state


class Serving:
    """A stand-in of a runner: a process of a service, in a phase."""

    def __init__(self, service: ObjectKey | None) -> None:
        self.state = ProcessState("Ready")
        self.assignment = cast("Any", self)
        self.service = service


def rates_of(tokens_per_second: int, until: int = 60) -> ServiceRates:
    rates = ServiceRates()
    for second in range(0, until + 1, 10):
        rates.note_state(proxy_state(**{"a/chat": tokens_per_second * second}), second)
    return rates


@given(st.lists(st.none() | st.floats(0, 1000), max_size=60))
def test_number_changes_once_a_minute_at_most_and_by_more_than_a_tenth(measured: list[float | None]) -> None:
    shown: ShownTraffic | None = None
    for number, rate in enumerate(measured):
        now = 10.0 * number
        before, shown = shown, choose_traffic(shown, ProcessTraffic(rate) if rate is not None else None, now)
        assert (shown is None) == (rate is None)
        if before is not None and shown is not None and shown != before:
            assert now - before.since >= LEAST_SECONDS
            previous = before.traffic.tokens_per_second
            assert abs(shown.traffic.tokens_per_second - previous) > 0.1 * previous
        if before is None and shown is not None:
            assert shown == ShownTraffic(shown.traffic, now)


def test_requests_and_their_time_are_shown_as_report_are() -> None:
    first = ProcessTraffic(10.0, 60, 500)
    shown = choose_traffic(None, first, 0)
    for changed in (first._replace(requests_per_minute=90), first._replace(average_ms=None)):
        assert choose_traffic(shown, changed, 59) == shown
        assert choose_traffic(shown, changed, 60) == ShownTraffic(changed, 60)
    assert choose_traffic(shown, ProcessTraffic(10.5, 64, 520), 60) == shown


def test_processes_share_the_requests_of_their_service_and_have_its_average() -> None:
    assert share_rate(ServiceRate(30.0, 90.0, 0.25), 2) == ProcessTraffic(15.0, 45, 250)
    assert share_rate(ServiceRate(0.05, 0.0), 1) == ProcessTraffic(0.0, 0, None)
    assert share_rate(ServiceRate(30.0, 90.0), 1) == ProcessTraffic(30.0, 90, None), "an earlier proxy counts no time"


def test_idle_process_shows_0_and_an_unknown_one_nothing() -> None:
    runner = Serving(ObjectKey("a", "chat"))
    report = TrafficReport({"u1": cast("Runner", runner)}, rates := rates_of(0))
    assert report.find("u1") is None
    told: list[str] = []
    report.on_change = told.append
    rates.on_read(60)
    assert (report.find("u1"), told) == (ProcessTraffic(0.0), ["u1"])
    rates.on_read(70)
    assert told == ["u1"], "nothing has changed"
    rates.on_read(200)
    assert (report.find("u1"), told) == (None, ["u1", "u1"]), "the proxy is silent"


def test_question_of_a_starting_controller_changes_no_status() -> None:
    idle = ShownTraffic(ProcessTraffic(0.0), 0.0)
    assert choose_traffic(idle, share_rate(ServiceRate(1 / 60), 1), 1000.0) == idle
    assert choose_traffic(idle, share_rate(ServiceRate(1.0), 1), 1000.0) == ShownTraffic(ProcessTraffic(1.0), 1000.0)


def test_process_that_is_not_ready_shows_nothing() -> None:
    runner = Serving(ObjectKey("a", "chat"))
    report = TrafficReport({"u1": cast("Runner", runner)}, rates := rates_of(5))
    rates.on_read(60)
    assert report.find("u1") == ProcessTraffic(5.0)
    runner.state = ProcessState("Failed")
    assert report.find("u1") is None
    rates.on_read(60)
    assert report._shown == {}


def test_processes_of_one_service_share_its_report() -> None:
    runners = {uid: cast("Runner", Serving(ObjectKey("a", "chat"))) for uid in ("u1", "u2")}
    other = cast("Runner", Serving(None))
    report = TrafficReport({**runners, "u3": other}, rates := rates_of(30))
    rates.on_read(60)
    assert [report.find(uid) for uid in ("u1", "u2", "u3")] == [ProcessTraffic(15.0), ProcessTraffic(15.0), None]
