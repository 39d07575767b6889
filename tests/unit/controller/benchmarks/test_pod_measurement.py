"""A pod is measured with the token of its service, and what it answers is bounded."""

import asyncio
from typing import Any

import pytest

from controller.benchmarks import pod_measurement
from controller.benchmarks.benchmark_job import MeasuredEngine
from controller.benchmarks.pod_measurement import measure_pod
from controller.models.jobs import JobOutcome
from controller.services.endpoints import Endpoint
from controller.services.tokens import token_secret
from fitness.bench.measurement import BenchPlan
from fitness.bench.streamed_completion import BenchError
from fitness.performance import MeasuredPerformance
from kube.client import Client, Obj
from tests.support.api_objects import as_service, service

ENGINE = MeasuredEngine("tiny", "llama.cpp", "engine:1", "nvidia", 80.0)
POD = Endpoint("10.0.0.1", 8080, node="n1")
CHAT = as_service(service(benchmark={"runs": 3}))


class TokenClient(Client):
    """Has the token of the service."""

    def __init__(self) -> None:
        pass

    async def get(self, *_: Any, **__: Any) -> Obj:
        return token_secret(CHAT, "secret-token")[1]


def measure(monkeypatch: pytest.MonkeyPatch, answer: MeasuredPerformance | Exception) -> tuple[Any, list[Any]]:
    asked = list[Any]()

    async def measure_engine(url: str, model: str, token: str, plan: BenchPlan) -> MeasuredPerformance:
        asked.append((url, model, token, plan.runs))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pod_measurement, "measure_engine", measure_engine)
    return asyncio.run(measure_pod(TokenClient(), CHAT, POD, ENGINE, "job")), asked


def test_record_says_where_it_was_measured_and_by_what(monkeypatch: pytest.MonkeyPatch) -> None:
    record, asked = measure(monkeypatch, MeasuredPerformance(tokens_per_second=90.0))
    assert asked == [("http://10.0.0.1:8080", "chat", "secret-token", 3)]
    assert (record.source, record.node, record.model, record.accelerator) == ("job", "n1", "tiny", "nvidia")
    assert record.estimated_tokens_per_second == 80.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (BenchError("Refused", "the engine answered 500"), "Refused"),
        (TimeoutError(), "TimedOut"),
        (MeasuredPerformance(tokens_per_second=1e6), "BadAnswer"),
        (MeasuredPerformance(tokens_per_second=90.0, prompt_tokens_per_second=1e10), "BadAnswer"),
    ],
)
def test_pod_that_cannot_be_measured_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, answer: MeasuredPerformance | Exception, reason: str
) -> None:
    outcome, _ = measure(monkeypatch, answer)
    assert isinstance(outcome, JobOutcome)
    assert (outcome.state, outcome.reason) == ("Broken", reason)
