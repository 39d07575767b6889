"""`pomona agent doctor`: find out why this host does not serve, or may stop to."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import click

from cli import log
from cli.agent.agent_service import ServiceManagers, find_agent, find_managers, state_option
from cli.options import PATH
from cli.output import facts_option, print_facts, terminal_width, wrap_text
from kube import credentials
from kube.kubeconfig import CredentialsError
from launchd.service_definition import find_option
from metal_agent.cluster.host_identity import HostIdentity, read_joined_host
from metal_agent.doctor.finding import Finding
from metal_agent.doctor.run import CheckedHost, run_doctor

_INDENT = 10


@click.command("doctor")
@click.option("--name", help="Name of the MetalHost of this machine. Default: that of the agent.")
@click.option("--kubeconfig", type=PATH, help="Kubeconfig of this host. Default: that of the agent.")
@click.option(
    "--deep",
    is_flag=True,
    help="Check the tools, processes, sockets and memory of this machine, too: starts and ends a few processes, one of "
    "which takes 256 MiB.",
)
@state_option
@facts_option("text")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    name: str | None,
    kubeconfig: Path | None,
    deep: bool,
    state_dir: Path | None,
    output_format: str,
) -> None:
    """Check everything that keeps a host from serving: engines, GPU, settings of macOS, and both ways to the cluster.

    Each finding is ok, unknown, a warning (it serves, but may stop to) or a problem, with the way out. Nothing is
    changed. The exit code is 1 when there is a problem.

    \b
    Examples:
      pomona agent doctor
      pomona agent doctor --deep
      pomona agent doctor --name studio-1 --kubeconfig ~/.pomona/kubeconfig -o json
    """
    # What fails is a finding, so warnings of the client are not logged.
    log.configure(errors_only=True)
    checked = _find_host(find_managers(ctx), name, kubeconfig, state_dir)

    # Run the checks, with a folder for what they write.
    with tempfile.TemporaryDirectory(prefix="pomona-") as folder:
        # On macOS it is below /var, a link; paths that processes report are resolved.
        findings = asyncio.run(run_doctor(checked, Path(folder).resolve(), deep=deep))

    if output_format == "text":
        print(format_findings(findings, terminal_width()))
    else:
        print_facts([finding._asdict() for finding in findings], output_format)
    if any(finding.verdict == "problem" for finding in findings):
        ctx.exit(1)


def _find_host(
    managers: ServiceManagers, name: str | None, kubeconfig: Path | None, state_dir: Path | None
) -> CheckedHost:
    """Return the host to check, with the credentials by which it calls the cluster.

    Name and kubeconfig are those given here, else those of the installed agent. Without a kubeconfig, both come from
    what `pomona agent join` wrote; without that, the host has no name and no credentials. Credentials that cannot be
    read are a finding of the check (`CheckedHost.problem`), not an error.

    Raises:
        ServiceError: a service manager cannot say whether it has the agent.
        click.UsageError: there is a kubeconfig, and no name.
    """
    # 1. Options that are not given here are those of the installed agent.
    manager, folder = find_agent(managers, state_dir)
    # installed: the command line of the installed agent; empty: none is installed
    installed = (manager.read_arguments() if manager else None) or ()
    name = name or find_option(installed, "--name")
    if kubeconfig is None and (installed_kubeconfig := find_option(installed, "--kubeconfig")):
        kubeconfig = Path(installed_kubeconfig)

    # 2. The host, without name and credentials so far.
    checked = CheckedHost(
        folder,
        service=manager.read_state() if manager else None,
        starts_at_login=manager is managers.user,
        program=installed[0] if installed else None,
        is_outdated=manager is not None and manager.find_outdated() is not None,
    )

    # 3. Add them: from the kubeconfig, else from what `pomona agent join` wrote.
    try:
        if kubeconfig:
            if not name:
                raise click.UsageError("--kubeconfig needs --name: give the name of this host's MetalHost")
            return checked._replace(name=name, credentials=credentials.load(kubeconfig))

        joined = read_joined_host(folder)
        if joined is None:
            return checked
        return checked._replace(name=joined.host, credentials=HostIdentity(folder, joined).credentials())
    except (CredentialsError, OSError) as error:
        return checked._replace(problem=str(error))


def format_findings(findings: list[Finding], width: int) -> str:
    """Return the findings as text of `width` columns, each with its way out, and the counts below."""
    lines = []
    for finding in findings:
        text = f"{finding.name}: {finding.found}" if finding.found else finding.name
        lines += wrap_text(text, width, " " * _INDENT, first=f"{finding.verdict:<{_INDENT}}")
        if finding.fix and finding.verdict != "ok":
            lines += wrap_text(finding.fix, width, " " * (_INDENT + 3), first=f"{' ' * _INDENT}-> ")
    count = Counter(finding.verdict for finding in findings)
    total = f"{count['ok']} ok, {count['unknown']} unknown, {count['warning']} warnings, {count['problem']} problems"
    return "\n".join([*lines, "", total])
