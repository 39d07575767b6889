"""The measurement of a pod that nobody else asks, a replica or that of a Job, by a few requests of one stream."""

import asyncio
from datetime import UTC, datetime
from typing import Final, Literal

from msgspec import structs

from controller.benchmarks.benchmark_job import MeasuredEngine
from controller.models.jobs import JobOutcome
from controller.services.endpoints import Endpoint
from controller.services.readiness_probe import read_token
from crds.inferenceservice import InferenceService
from crds.rate import MOST_REPORTED
from fitness.bench.measurement import measure_engine, plan_one_stream
from fitness.bench.streamed_completion import BenchError
from fitness.performance import MOST_TOKENS_PER_SECOND, MeasuredPerformance
from kube.client import Client
from kube.resources import ObjectKey
from kube.time import rfc3339

MOST_SECONDS: Final = 180.0
"""The longest measurement; one that takes longer has failed."""


async def measure_pod(
    client: Client, service: InferenceService, pod: Endpoint, engine: MeasuredEngine, source: Literal["job", "live"]
) -> MeasuredPerformance | JobOutcome:
    """Measure a pod that has the token of a service, or return why it could not be measured."""
    # 1. Read the token; without one, the result says why.
    metadata = service.metadata
    token = await read_token(client, ObjectKey(metadata.namespace, metadata.name), metadata.uid)
    if not isinstance(token, str):
        return _describe_failure(token.reason, token.message)

    # 2. Measure by requests of one stream.
    plan = plan_one_stream(service.spec.benchmark, service.spec.context_tokens)
    try:
        async with asyncio.timeout(MOST_SECONDS):
            record = await measure_engine(pod.url, metadata.name, token, plan)
    except BenchError as error:
        return _describe_failure(error.reason, error.message)
    except TimeoutError:
        return _describe_failure("TimedOut", f"the measurement was not over after {MOST_SECONDS:.0f} s")

    # 3. Refuse impossible speeds. MOST_REPORTED bounds the speed of generation alone. How many tokens a prompt has,
    # only the engine says: so that rate is bounded by no more than what a record may state.
    if record.tokens_per_second > MOST_REPORTED or (record.prompt_tokens_per_second or 0.0) >= MOST_TOKENS_PER_SECOND:
        return _describe_failure("BadAnswer", f"no engine generates more than {MOST_REPORTED:.0f} tokens/s")

    # 4. Add the facts that a measurement does not state itself: those of the engine, the node, the source and the time.
    measured_at = rfc3339(datetime.now(UTC))
    return structs.replace(record, **engine._asdict(), node=pod.node, source=source, measured_at=measured_at)


def _describe_failure(reason: str, message: str) -> JobOutcome:
    return JobOutcome(state="Broken", reason=reason, message=message, ended=datetime.now(UTC))
