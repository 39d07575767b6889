"""`pomona agent status`: the service manager's view of the agent, and the agent's own."""

from pathlib import Path

import click
import msgspec

from cli.agent.agent_service import find_agent, find_managers, read_last_exit, read_status, state_option
from cli.output import facts_option, print_facts, render_table, terminal_width, wrap_text
from crds.size import size_text
from launchd.service_manager import ServiceState
from metal_agent.control.agent_status import AgentStatus, IdentityStatus
from metal_agent.exit_codes import AgentExit

_LABEL_WIDTH = 14


class AgentReport(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Everything that the command shows; `service` is absent for an agent in a terminal."""

    state_folder: str
    service: ServiceState | None = None
    agent: AgentStatus | None = None
    last_exit: AgentExit | None = None

    @property
    def is_well(self) -> bool:
        """True if the agent runs, and the API server accepts it."""
        agent = self.agent
        return agent is not None and agent.ready and not agent.stopping and agent.connection.state == "connected"


@click.command("status")
@state_option
@facts_option("text")
@click.pass_context
def command(ctx: click.Context, state_dir: Path | None, output_format: str) -> None:
    """Show whether the agent runs and is connected, what it serves, and why it ended if it did.

    The exit code is 0 if the agent runs and the API server accepts it, else 1. `pomona agent doctor` looks for causes.

    \b
    Examples:
      pomona agent status
      pomona agent status -o json
    """
    # service: the service manager's view; agent: the agent's own, None if none answers; each may be missing
    manager, folder = find_agent(find_managers(ctx), state_dir)
    service = manager.read_state() if manager else None
    agent = read_status(folder)
    last_exit = None if agent else read_last_exit(folder)
    report = AgentReport(state_folder=str(folder), service=service, agent=agent, last_exit=last_exit)

    if output_format == "text":
        print(format_report(report, terminal_width()))
    else:
        print_facts(msgspec.to_builtins(report), output_format)
    ctx.exit(0 if report.is_well else 1)


def format_report(report: AgentReport, width: int) -> str:
    """Return the report as lines of at most `width` columns, with a table of the processes."""
    lines = [("state folder", report.state_folder)]  # label and value; an empty label continues the line before

    # 1. The service manager's view, and how the last agent ended.
    if service := report.service:
        pid = f", process {service.pid}" if service.pid else ""
        runs = f", started {service.runs} times" if service.runs and service.runs > 1 else ""
        lines.append((service.manager, f"{service.job} is {service.phase}{pid}{runs}"))
        if service.last_exit and service.phase != "running":
            lines.append(("last exit", service.last_exit))
    else:
        lines.append(("service", "none: `pomona agent install` makes it one"))
    if last_exit := report.last_exit:
        lines.append(("ended", f"{last_exit.ended_at}, {last_exit.message}"))

    # 2. The agent's own view.
    if agent := report.agent:
        lines += [
            ("agent", f"{agent.host}, {_describe_state(agent)} as process {agent.pid}"),
            ("since", agent.started_at),
            ("version", agent.version),
            ("address", agent.address),
            ("API server", f"{agent.server}, {agent.connection.state} since {agent.connection.since}"),
        ]
        if agent.connection.message:
            lines.append(("", agent.connection.message))  # continues the line before
        if agent.identity:
            lines.append(("token", _describe_token(agent.identity)))
        lines += [("paused", f"{hold.message} ({hold.source}, since {hold.since})") for hold in agent.holds]
        lines.append(("memory", f"{size_text(agent.available_bytes)} of {size_text(agent.budget_bytes)} are free"))
    else:
        lines.append(("agent", "does not answer: see `pomona agent logs`, or start it with `pomona agent`"))

    # 3. The lines as text, and below them the processes, if there are any.
    text = "\n".join(line for label, value in lines for line in _format_line(label, value, width))
    return f"{text}\n\n{_format_processes(report.agent, width)}" if report.agent and report.agent.processes else text


def _describe_state(agent: AgentStatus) -> str:
    if agent.stopping:
        return "stopping"
    return "running" if agent.ready else "starting"


def _describe_token(identity: IdentityStatus) -> str:
    problem = f"; it could not be renewed: {identity.renewal_problem}" if identity.renewal_problem else ""
    return f"expires {identity.expires_at}{problem}"


def _format_line(label: str, value: str, width: int) -> list[str]:
    head = f"{label}:" if label else ""
    return wrap_text(value, width, " " * _LABEL_WIDTH, first=f"{head:{_LABEL_WIDTH}}") or [head]


def _format_processes(agent: AgentStatus, width: int) -> str:
    """Return a table of the processes, and below it a line for each that is not ready and has a message."""
    # No memory, or an unknown one, is shown as -.
    titles = ("SERVICE", "MODEL", "RUNTIME", "PHASE", "MEMORY")
    rows = []
    for process in agent.processes:
        size = size_text(process.memory_bytes) if process.memory_bytes else "-"
        rows.append((f"{process.namespace}/{process.service}", process.model, process.runtime, process.phase, size))
    notes = [
        line
        for process in agent.processes
        if process.message and process.phase != "Ready"
        for line in wrap_text(f"{process.namespace}/{process.service}: {process.message}", width, "  ", first="")
    ]
    return "\n".join([render_table(titles, rows, width, {0}), *notes])
