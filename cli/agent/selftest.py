"""`pomona agent selftest`: compare this machine with what the agent expects of it."""

import asyncio
import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import Literal

import click

from cli import log
from cli.output import facts_option, print_facts
from metal_agent.selftest.line import Line
from metal_agent.selftest.run import run_selftest


@click.command("selftest")
@facts_option("table")
@click.pass_context
def command(ctx: click.Context, *, form: Literal["table", "json", "yaml"]) -> None:
    """Check the tools, processes, sockets and memory of this machine, on which the agent relies.

    Each line is ok, unknown (the agent works without it) or FAILED. The command starts and ends a few processes of its
    own, one of which takes 256 MiB, and changes nothing else. The exit code is 1 when a check FAILED.

    \b
    Examples:
      pomona agent selftest
      pomona agent selftest -o json
    """
    log.configure()
    # Processes that are killed on purpose are a line of the table, so their warnings are not logged.
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
        # On macOS it is below /var, a link; paths that processes report are resolved.
        lines = asyncio.run(run_selftest(Path(folder).resolve()))
    if form == "table":
        print(format_table(lines))
    else:
        print_facts([line._asdict() for line in lines], form)
    if any(line.verdict == "FAILED" for line in lines):
        ctx.exit(1)


def format_table(lines: list[Line]) -> str:
    """Return the lines as a table, with the counts below."""
    names = max((len(line.name) for line in lines), default=0)
    founds = min(40, max((len(line.found) for line in lines), default=0))
    texts = [
        f"{each.verdict:8} {each.name:{names}}  {each.found:{founds}}  expected: {each.expected}" for each in lines
    ]
    count = Counter(line.verdict for line in lines)
    return "\n".join([*texts, "", f"{count['ok']} ok, {count['unknown']} unknown, {count['FAILED']} FAILED"])
