"""`pomona agent doctor`: find out why this host does not serve, or may stop to."""

import asyncio
import json
import logging
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

import click

from cli import log
from cli.options import STATE_FOLDER_TEXT, default_state_folder
from kube import credentials
from kube.kubeconfig import CredentialsError
from metal_agent.doctor.finding import Finding
from metal_agent.doctor.run import CheckedHost, run_doctor

_WIDTH = 80
_INDENT = 10


@click.command("doctor")
@click.option("--name", help="Name of the MetalHost of this machine.")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Kubeconfig with the credentials of this host. Without it and a join, no cluster is asked.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help=f"Folder of the agent. Default: {STATE_FOLDER_TEXT}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, *, name: str | None, kubeconfig: Path | None, state_dir: Path | None, as_json: bool
) -> None:
    """Check everything that keeps a host from serving: engines, GPU, settings of macOS, and both ways to the cluster.

    Each finding is ok, unknown, a warning (it serves, but may stop to) or a problem, with the way out. Nothing is
    changed. The exit code is 1 when there is a problem.

    \b
    Examples:
      pomona agent doctor
      pomona agent doctor --name studio-1 --kubeconfig ~/.pomona/kubeconfig --json
    """
    log.configure()
    # What fails is a finding, so warnings of the client are not logged.
    logging.getLogger().setLevel(logging.ERROR)
    if kubeconfig and not name:
        raise click.UsageError("--kubeconfig needs --name: give the name of this host's MetalHost")
    try:
        identity = credentials.load(kubeconfig) if kubeconfig else None
    except CredentialsError as error:
        raise click.ClickException(str(error)) from error
    checked = CheckedHost((state_dir or default_state_folder()).absolute(), name, identity)
    with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
        findings = asyncio.run(run_doctor(checked, Path(folder).resolve()))
    print(format_json(findings) if as_json else format_findings(findings))
    if any(finding.verdict == "problem" for finding in findings):
        ctx.exit(1)


def format_json(findings: list[Finding]) -> str:
    """Return the findings as a JSON array, one per row."""
    return "[\n" + ",\n".join(json.dumps(finding._asdict()) for finding in findings) + "\n]"


def format_findings(findings: list[Finding]) -> str:
    """Return the findings as text of 80 columns, each with its way out, and the counts below."""
    lines = []
    for finding in findings:
        text = f"{finding.name}: {finding.found}" if finding.found else finding.name
        lines += _wrap(f"{finding.verdict:<{_INDENT}}{text}", " " * _INDENT)
        if finding.fix and finding.verdict != "ok":
            lines += _wrap(f"{' ' * _INDENT}-> {finding.fix}", " " * (_INDENT + 3))
    count = Counter(finding.verdict for finding in findings)
    total = f"{count['ok']} ok, {count['unknown']} unknown, {count['warning']} warnings, {count['problem']} problems"
    return "\n".join([*lines, "", total])


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
