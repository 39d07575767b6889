"""`pomona bench`: measure the speed of a service of the cluster, or of any OpenAI-compatible endpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from cli import outcome
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_services
from cli.options import DURATION, EXISTING_FILE, gather_options, hosts_ca_option, result_option
from cli.output import facts_option, print_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """The engine that is measured."""

    name: str
    """A service of the cluster, or a URL."""
    model: str | None = None
    """The engine's name of its model; None for the only model that the engine lists."""
    token_file: Path | None = None
    hosts_ca: Path | None = None


@click.command("bench")
@gather_options("wanted", BenchTarget)
@click.argument("name", metavar="SERVICE|URL", shell_complete=complete_services)
@click.option("--model", help="Name of the model at a URL. Default: the only one that the engine lists.")
@click.option(
    "--token-file",
    type=EXISTING_FILE,
    help="File with the bearer token for a URL. The token of a service is read from its Secret.",
)
@hosts_ca_option
@click.option("--warmup", type=click.IntRange(0, 100), default=2, show_default=True, help="Runs that do not count.")
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
@click.option("--prompt-tokens", type=click.IntRange(1, 100_000), default=128, show_default=True, help="Prompt length.")
@click.option("--tokens", type=click.IntRange(8, 4096), default=128, show_default=True, help="Tokens of each answer.")
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
    from cli.service.bench_run import measure_or_exit, render_performance  # noqa: PLC0415 - not needed for --help
    from fitness.bench.measurement import BenchPlan  # noqa: PLC0415 - same

    # `extent` has the other options, which are named like the fields of BenchPlan; parallel 0: not stated.
    measured = measure_or_exit(target, wanted, BenchPlan(parallel=parallel or 0, **extent), result)
    facts = msgspec.json.decode(msgspec.json.encode(measured))
    outcome.write_result("bench", facts, result)
    if output_format == "table":
        print(render_performance(measured))
    else:
        print_facts(facts, output_format)
