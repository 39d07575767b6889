"""The measurement of `pomona bench`, of a service of the cluster or of an engine at a URL."""

import asyncio
import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import urlsplit

import aiohttp
import click
import msgspec

from artifacts.errors import PERMANENT_EXIT, RETRYABLE_EXIT
from cli import outcome
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions
from cli.options import load_hosts_ca
from cli.service.bench import BenchTarget
from cli.service.service_address import open_service
from cli.stop_signals import run_until_signal
from fitness.bench.measurement import BenchPlan, measure_endpoint, summarize
from fitness.bench.streamed_completion import BenchError
from fitness.performance import MeasuredPerformance
from kube.resources import INFERENCE_SERVICES
from kube.time import rfc3339
from runtimes.serving import SHARED_REQUESTS
from standalone.ask import AskError, open_session

_MODELS_BYTES: Final = 1 << 20
_FINAL_REASONS: Final = frozenset({"Unauthorized", "NoTokenCount", "NotStreamed"})
"""Reasons that another try does not change."""


def measure_or_exit(
    target: ClusterOptions, wanted: BenchTarget, plan: BenchPlan, result: Path | None
) -> MeasuredPerformance:
    """Measure a service, or the engine at a URL, and return the measurement; exit if that fails.

    The error is printed, and written to the file `result` if there is one.
    """
    try:
        return _measure_url(wanted, plan) if "://" in wanted.name else _measure_service(target, wanted, plan)
    except BenchError as error:
        # is_final: another try does not help, which the exit code says
        _fail(error.reason, error.message, result, is_final=error.reason in _FINAL_REASONS)
    except AskError as error:
        _fail("Unreachable", str(error), result, is_final=False)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("pomona bench: stopped before it was measured", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT)


def _fail(reason: str, message: str, result: Path | None, *, is_final: bool) -> NoReturn:
    outcome.write_result("bench", {"reason": reason, "message": message, "retryable": not is_final}, result)
    print(f"pomona bench: {message}", file=sys.stderr)
    sys.exit(PERMANENT_EXIT if is_final else RETRYABLE_EXIT)


def _measure_url(wanted: BenchTarget, plan: BenchPlan) -> MeasuredPerformance:
    """Measure the engine at a URL. Raises BenchError, and click.ClickException with the way out."""
    # 1. The URL and the token; "" is none.
    parts = urlsplit(wanted.name)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise click.ClickException(f"{wanted.name} is no URL: give one such as http://127.0.0.1:8080")
    token = ""
    if wanted.token_file is not None:
        try:
            token = wanted.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"--token-file {wanted.token_file}: {error}") from error
        if not (token.isascii() and token.isprintable()):
            raise click.ClickException(f"--token-file {wanted.token_file}: no request can carry this token")

    # 2. The measurement, which SIGTERM ends.
    async def measure() -> MeasuredPerformance:
        """Measure the model that is named, or the only one of the engine, with one stream unless more are asked.

        `wanted` has what the user asked for, `plan` how long and how often is measured.
        """
        tls = load_hosts_ca(wanted.hosts_ca) if wanted.hosts_ca else True
        # Users may state the address with /v1, which each request adds itself.
        url = wanted.name.rstrip("/").removesuffix("/v1")
        async with open_session(aiohttp.TCPConnector(ssl=tls, limit=0), token) as session:
            model = wanted.model or await _find_model(session, url)
            return await _measure(session, url, model, plan._replace(parallel=plan.parallel or 1))

    return asyncio.run(run_until_signal(measure(), signal.SIGTERM))


def _measure_service(target: ClusterOptions, wanted: BenchTarget, plan: BenchPlan) -> MeasuredPerformance:
    """Measure a service of the cluster. Raises BenchError and AskError."""
    for option, value in (("--model", wanted.model), ("--token-file", wanted.token_file)):
        if value is not None:
            raise click.UsageError(f"{option} is for a URL; {wanted.name} is a service, which states it itself")
    return run_in_cluster(target, lambda cluster: _measure_in_cluster(cluster, wanted, plan))


async def _measure_in_cluster(cluster: Cluster, wanted: BenchTarget, plan: BenchPlan) -> MeasuredPerformance:
    """Measure a replica of a service, by default with as many streams as the service works on at once."""
    name = wanted.name
    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    chosen = service.get("status", {}).get("serving", {}).get("parallel", SHARED_REQUESTS)
    parallel = plan.parallel or service["spec"].get("parallel", chosen)
    async with open_service(cluster, name, None, wanted.hosts_ca) as (session, address):
        performance = await _measure(session, address, name, plan._replace(parallel=parallel))
    runtime = service.get("status", {}).get("runtime", "")
    return msgspec.structs.replace(performance, model=service["spec"]["modelRef"], runtime=runtime)


async def _measure(session: aiohttp.ClientSession, url: str, model: str, plan: BenchPlan) -> MeasuredPerformance:
    """Measure a model at a URL, and return the record; if several streams at once fail, that is only a warning."""
    result = await measure_endpoint(session, url, model, plan)
    # failed: why more streams at once were not measured; one stream was
    if result.failed is not None:
        print(f"pomona bench: more streams were not measured: {result.failed.message}", file=sys.stderr)
    performance = summarize(result, plan)
    return msgspec.structs.replace(performance, model=model, measured_at=rfc3339(datetime.now(UTC)))


async def _find_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the only model that an engine lists at /v1/models.

    Raises:
        BenchError: the engine does not answer, or not with a list of models.
        click.ClickException: it lists several models, or none.
    """
    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            listed = json.loads(await response.content.read(_MODELS_BYTES))
            names = [str(model["id"]) for model in listed["data"]]
    # The engine does not answer, or answers with something else.
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError("Unreachable", f"{url}: {str(error) or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{url}/v1/models answered {response.status} and lists no models: name the model with --model"
        raise BenchError("BadAnswer", message) from error

    if len(names) != 1:
        shown = ", ".join(names[:8]) or "none"
        raise click.ClickException(f"{url} has several models, or none: name one with --model, of {shown}")
    return names[0]


def render_performance(measured: MeasuredPerformance) -> str:
    """Return a measurement as a table for people: speed, latencies, and the speed of several streams together."""
    spread = f"{min(measured.runs):,.1f} to {max(measured.runs):,.1f} in {len(measured.runs)} runs"
    rows = [
        ("generation", f"{measured.tokens_per_second:,.1f} tokens/s (median; {spread})"),
        ("prompt", _show(measured.prompt_tokens_per_second, "tokens/s")),
        ("first token", _show(measured.time_to_first_token_ms, "ms")),
        ("between tokens", _show(measured.inter_token_latency_ms, "ms")),
        # One stream has the first row.
        *(
            (f"{streams} streams", f"{rate:,.1f} tokens/s together")
            for streams, rate in measured.concurrency.items()
            if streams != "1"
        ),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _show(value: float | None, unit: str) -> str:
    return f"{value:,.1f} {unit}" if value is not None else "unknown"
