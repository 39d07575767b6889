"""The measurement of a replica that serves: a few requests of one stream, while nobody else asks its service."""

import asyncio
from datetime import UTC, datetime
from typing import Final

from msgspec import structs

from controller.benchmarks.benchmark_job import MeasuredEngine
from controller.models.jobs import JobOutcome
from controller.services.endpoints import Endpoint
from controller.services.readiness_probe import read_token
from crds.inferenceservice import InferenceService
from crds.rate import MOST_REPORTED
from fitness.bench.measurement import measure_engine, plan_one_stream
from fitness.bench.streamed_completion import BenchError
from fitness.performance import MeasuredPerformance
from kube.client import Client
from kube.resources import ObjectKey
from kube.time import rfc3339

MOST_SECONDS: Final = 180.0
"""The longest measurement; one that takes longer has failed."""


async def measure_replica(
    client: Client, service: InferenceService, replica: Endpoint, engine: MeasuredEngine
) -> MeasuredPerformance | JobOutcome:
    """Measure a replica in a pod of a service, or return why it could not be measured."""
    metadata = service.metadata
    token = await read_token(client, ObjectKey(metadata.namespace, metadata.name), metadata.uid)
    if not isinstance(token, str):
        return _describe_failure(token.reason, token.message)
    plan = plan_one_stream(service.spec.benchmark, service.spec.context_length)
    try:
        async with asyncio.timeout(MOST_SECONDS):
            record = await measure_engine(replica.url, metadata.name, token, plan)
    except BenchError as error:
        return _describe_failure(error.reason, error.message)
    except TimeoutError:
        return _describe_failure("TimedOut", f"the measurement was not over after {MOST_SECONDS:.0f} s")
    if max(record.tokens_per_second, record.prompt_tokens_per_second or 0.0) > MOST_REPORTED:
        return _describe_failure("BadAnswer", f"no engine is faster than {MOST_REPORTED:.0f} tokens/s")
    measured_at = rfc3339(datetime.now(UTC))
    return structs.replace(record, **engine._asdict(), node=replica.node, source="live", measured_at=measured_at)


def _describe_failure(reason: str, message: str) -> JobOutcome:
    return JobOutcome(state="Broken", reason=reason, message=message, ended=datetime.now(UTC))
