"""`pomona bench`: measure the speed of a service of the cluster, or of any OpenAI-compatible endpoint."""

import asyncio
import functools
import json
import signal
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

import click
import msgspec

from artifacts.errors import PERMANENT_EXIT, RETRYABLE_EXIT
from cli import outcome
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_services
from cli.options import DURATION, EXISTING_FILE, gather_options, load_hosts_ca, result_option
from cli.output import facts_option, print_facts
from cli.stop_signals import run_until_signal
from kube.resources import INFERENCE_SERVICES
from kube.time import rfc3339

if TYPE_CHECKING:
    import aiohttp

    from fitness.bench.measurement import BenchPlan
    from fitness.performance import MeasuredPerformance

_MODELS_BYTES: Final = 1 << 20
_FINAL_REASONS: Final = frozenset({"Unauthorized", "NoTokenCount", "NotStreamed"})
"""Reasons that another try does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """The engine that is measured."""

    name: str
    """A service of the cluster, or a URL."""
    model: str | None = None
    """Name by which the engine knows its model; None: the only one that it lists."""
    token_file: Path | None = None
    hosts_ca: Path | None = None

    @property
    def is_url(self) -> bool:
        """True if the engine is at a URL and in no cluster."""
        return "://" in self.name


@click.command("bench")
@gather_options("wanted", BenchTarget)
@click.argument("name", metavar="SERVICE|URL", shell_complete=complete_services)
@click.option("--model", help="Name of the model at a URL. Default: the only one that the engine lists.")
@click.option(
    "--token-file",
    type=EXISTING_FILE,
    help="File with the bearer token for a URL. The token of a service is read from its Secret.",
)
@click.option(
    "--hosts-ca",
    type=EXISTING_FILE,
    help="CA of the certificate of the engine, in PEM form. Default: those that the system trusts.",
)
@click.option(
    "--warmup", type=click.IntRange(0, 100), default=2, show_default=True, help="Runs before those that count."
)
@click.option("--runs", type=click.IntRange(1, 100), default=5, show_default=True, help="Least number of runs.")
@click.option(
    "--min-duration",
    "min_duration_seconds",
    type=DURATION,
    default=0.0,
    help="Least time of the runs together, such as 30s. Default: none.",
)
@click.option(
    "--max-duration", "most_seconds", type=DURATION, default="10m", show_default=True, help="Begin no run after this."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1, 100_000), default=128, show_default=True, help="Length of each prompt."
)
@click.option(
    "--tokens", type=click.IntRange(8, 4096), default=128, show_default=True, help="Tokens that each run generates."
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    help="Most streams at once: 1, 2, 4 and so on are measured. Default: spec.parallel of a service, 1 at a URL.",
)
@facts_option("table")
@result_option
@namespaced_cluster_options
def command(
    *,
    wanted: BenchTarget,
    output_format: str,
    result: Path | None,
    target: ClusterOptions,
    parallel: int | None,
    **extent: Any,
) -> None:
    """Measure how fast SERVICE, or the engine at URL, generates tokens.

    After a warm-up, each run sends a prompt that no run before had, and generates 128 tokens; the speed is the median
    of the runs, by the tokens that the engine counts itself. Then several streams run at once. This takes the place of
    other requests while it runs: a service that is in use is slower meanwhile, and the result lower.

    Exit code: 0 measured, 1 failed but a retry may help, 2 failed and a retry does not help.

    \b
    Examples:
      pomona bench chat
      pomona bench chat --runs 10 --min-duration 1m -o json
      pomona bench http://127.0.0.1:8080 --model tiny --parallel 4
    """
    from fitness.bench.measurement import BenchPlan  # noqa: PLC0415 - not needed for --help

    measured = _measure_or_exit(target, wanted, BenchPlan(parallel=parallel or 0, **extent), result)
    facts = msgspec.json.decode(msgspec.json.encode(measured))
    outcome.write_result("bench", facts, result)
    if output_format == "table":
        print(render_performance(measured))
    else:
        print_facts(facts, output_format)


def _measure_or_exit(
    target: ClusterOptions, wanted: BenchTarget, plan: "BenchPlan", result: Path | None
) -> "MeasuredPerformance":
    """Return the measurement; without one, print and write the error, and exit."""
    from fitness.bench.streamed_completion import BenchError  # noqa: PLC0415 - same
    from standalone.ask import AskError  # noqa: PLC0415 - same

    try:
        return _measure_url(wanted, plan) if wanted.is_url else _measure_service(target, wanted, plan)
    except BenchError as error:
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


def _measure_url(wanted: BenchTarget, plan: "BenchPlan") -> "MeasuredPerformance":
    """Measure the engine at a URL. Raises BenchError."""
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

    async def measure() -> "MeasuredPerformance":
        import aiohttp  # noqa: PLC0415 - not needed for --help

        from standalone.ask import open_session  # noqa: PLC0415 - same

        tls = load_hosts_ca(wanted.hosts_ca) if wanted.hosts_ca else True
        url = wanted.name.rstrip("/").removesuffix("/v1")
        async with open_session(aiohttp.TCPConnector(ssl=tls, limit=0), token) as session:
            model = wanted.model or await _find_model(session, url)
            return await _measure(session, url, model, plan._replace(parallel=plan.parallel or 1))

    return asyncio.run(run_until_signal(measure(), signal.SIGTERM))


def _measure_service(target: ClusterOptions, wanted: BenchTarget, plan: "BenchPlan") -> "MeasuredPerformance":
    """Measure a service of the cluster. Raises BenchError and AskError."""
    for option, value in (("--model", wanted.model), ("--token-file", wanted.token_file)):
        if value is not None:
            raise click.UsageError(f"{option} is for a URL; {wanted.name} is a service, which states it itself")
    return run_in_cluster(target, functools.partial(_measure_in_cluster, wanted=wanted, plan=plan))


async def _measure_in_cluster(cluster: Cluster, *, wanted: BenchTarget, plan: "BenchPlan") -> "MeasuredPerformance":

    from cli.service.service_address import open_service  # noqa: PLC0415 - same

    name = wanted.name
    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    parallel = plan.parallel or service["spec"].get("parallel", 1)
    async with open_service(cluster, name, None, wanted.hosts_ca) as (session, address):
        performance = await _measure(session, address, name, plan._replace(parallel=parallel))
    runtime = service.get("status", {}).get("runtime", "")
    return msgspec.structs.replace(performance, model=service["spec"]["modelRef"], runtime=runtime)


async def _measure(session: "aiohttp.ClientSession", url: str, model: str, plan: "BenchPlan") -> "MeasuredPerformance":

    from fitness.bench.measurement import measure_endpoint, summarize  # noqa: PLC0415 - same

    result = await measure_endpoint(session, url, model, plan)
    if result.failed is not None:
        print(f"pomona bench: more streams were not measured: {result.failed.message}", file=sys.stderr)
    performance = summarize(result, plan)
    return msgspec.structs.replace(performance, model=model, measured_at=rfc3339(datetime.now(UTC)))


async def _find_model(session: "aiohttp.ClientSession", url: str) -> str:
    """Return the only model that an engine lists. Raises BenchError."""
    import aiohttp  # noqa: PLC0415 - not needed for --help

    from fitness.bench.streamed_completion import BenchError  # noqa: PLC0415 - same

    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            listed = json.loads(await response.content.read(_MODELS_BYTES))
            names = [str(model["id"]) for model in listed["data"]]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError("Unreachable", f"{url}: {str(error) or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{url}/v1/models answered {response.status} and lists no models: name the model with --model"
        raise BenchError("BadAnswer", message) from error
    if len(names) != 1:
        shown = ", ".join(names[:8]) or "none"
        raise click.ClickException(f"{url} has several models, or none: name one with --model, of {shown}")
    return names[0]


def render_performance(measured: "MeasuredPerformance") -> str:
    """Return a measurement as a table for people."""
    spread = f"{min(measured.runs):,.1f} to {max(measured.runs):,.1f} in {len(measured.runs)} runs"
    rows = [
        ("generation", f"{measured.tokens_per_second:,.1f} tokens/s (median; {spread})"),
        ("prompt", _show(measured.prompt_tokens_per_second, "tokens/s")),
        ("first token", _show(measured.time_to_first_token_ms, "ms")),
        ("between tokens", _show(measured.inter_token_latency_ms, "ms")),
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
