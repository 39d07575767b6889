"""`pomona agent selftest`: compare this machine with what the agent expects of it."""

import asyncio
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import click

from cli import log
from metal_agent.selftest.line import Line
from metal_agent.selftest.run import run_selftest


@click.command("selftest")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, to be pasted into an issue.")
@click.pass_context
def command(ctx: click.Context, *, as_json: bool) -> None:
    """Check the tools, processes, sockets and memory of this machine, on which the agent relies.

    Each line is ok, unknown (the agent works without it) or FAILED. The command starts and ends a few processes of its
    own, one of which takes 256 MiB, and changes nothing else. The exit code is 1 when a check FAILED.

    \b
    Example:
      pomona agent selftest
    """
    log.configure()
    # Processes that are killed on purpose are a line of the table, so their warnings are not logged.
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
        # On macOS it is below /var, a link; paths that processes report are resolved.
        lines = asyncio.run(run_selftest(Path(folder).resolve()))
    print(format_json(lines) if as_json else format_table(lines))
    if any(line.verdict == "FAILED" for line in lines):
        ctx.exit(1)


def format_json(lines: list[Line]) -> str:
    """Return the lines as a JSON array, one per row."""
    return "[\n" + ",\n".join(json.dumps(line._asdict()) for line in lines) + "\n]"


def format_table(lines: list[Line]) -> str:
    """Return the lines as a table, with the counts below."""
    names = max((len(line.name) for line in lines), default=0)
    founds = min(40, max((len(line.found) for line in lines), default=0))
    texts = [
        f"{each.verdict:8} {each.name:{names}}  {each.found:{founds}}  expected: {each.expected}" for each in lines
    ]
    count = Counter(line.verdict for line in lines)
    return "\n".join([*texts, "", f"{count['ok']} ok, {count['unknown']} unknown, {count['FAILED']} FAILED"])
