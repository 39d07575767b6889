"""`pomona agent selftest`: what the agent relies on, on this machine, beside what it expects."""

import asyncio
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

import click

from cli import log
from metal_agent.selftest.line import Line
from metal_agent.selftest.run import run


@click.command("selftest")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for pasting into an issue.")
@click.pass_context
def command(ctx: click.Context, *, as_json: bool) -> None:
    """Look at this machine as the agent does, and say where it differs from what the agent expects.

    Each line is ok, unknown (the agent does without) or FAILED. It starts and ends a few processes of its own, one of
    which takes 256 MiB, and changes nothing. The exit code is 1 when something FAILED.

    \b
    Example:
      pomona agent selftest
    """
    log.configure()
    # It kills processes of its own on purpose: that is a line of the table, and no warning to a person.
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
        # macOS gives one below /var, which is a link; processes tell where it leads.
        lines = asyncio.run(run(Path(folder).resolve()))
    print(rows(lines) if as_json else table(lines))
    if any(line.verdict == "FAILED" for line in lines):
        ctx.exit(1)


def rows(lines: list[Line]) -> str:
    """Return the lines as JSON, each in a row of its own."""
    return "[\n" + ",\n".join(json.dumps(line._asdict()) for line in lines) + "\n]"


def table(lines: list[Line]) -> str:
    """Lay the lines out for people, with a sum below."""
    names = max((len(line.name) for line in lines), default=0)
    founds = min(40, max((len(line.found) for line in lines), default=0))
    texts = [
        f"{each.verdict:8} {each.name:{names}}  {each.found:{founds}}  expected: {each.expected}" for each in lines
    ]
    count = Counter(line.verdict for line in lines)
    return "\n".join([*texts, "", f"{count['ok']} ok, {count['unknown']} unknown, {count['FAILED']} FAILED"])
