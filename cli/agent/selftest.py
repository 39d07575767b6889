"""`pomona agent selftest`: compare this machine with what the agent expects of it."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Literal

import click

from cli import log
from cli.output import facts_option, print_facts, terminal_width, wrap_text
from metal_agent.selftest.line import Line
from metal_agent.selftest.run import run_selftest

_INDENT = 9


@click.command("selftest")
@facts_option("text")
@click.pass_context
def command(ctx: click.Context, *, output_format: Literal["text", "json", "yaml"]) -> None:
    """Check the tools, processes, sockets and memory of this machine, on which the agent relies.

    Each line is ok, unknown (the agent works without it) or FAILED. The command starts and ends a few processes of its
    own, one of which takes 256 MiB, and changes nothing else. The exit code is 1 when a check FAILED.

    \b
    Examples:
      pomona agent selftest
      pomona agent selftest -o json
    """
    # Processes that are killed on purpose are a line of the output, so their warnings are not logged.
    log.configure(errors_only=True)
    with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
        # On macOS it is below /var, a link; paths that processes report are resolved.
        lines = asyncio.run(run_selftest(Path(folder).resolve()))
    if output_format == "text":
        print(format_lines(lines, terminal_width()))
    else:
        print_facts([line._asdict() for line in lines], output_format)
    if any(line.verdict == "FAILED" for line in lines):
        ctx.exit(1)


def format_lines(lines: list[Line], width: int) -> str:
    """Return the lines as text of `width` columns, each with what was expected, and the counts below."""
    texts: list[str] = []
    for each in lines:
        text = f"{each.name}: {each.found} (expected: {each.expected})"
        texts += wrap_text(text, width, " " * _INDENT, first=f"{each.verdict:<{_INDENT}}")
    count = Counter(line.verdict for line in lines)
    return "\n".join([*texts, "", f"{count['ok']} ok, {count['unknown']} unknown, {count['FAILED']} FAILED"])
