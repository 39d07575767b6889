"""Checks of the agent as a service of this machine: whether it is installed, runs, and is accepted by the cluster."""

from launchd.service_definition import PROGRAM
from launchd.service_manager import ServiceState
from metal_agent.control.agent_status import AgentStatus
from metal_agent.doctor.finding import Finding
from metal_agent.exit_codes import AgentExit


def check_service(
    state: ServiceState | None,
    agent: AgentStatus | None,
    ended: AgentExit | None,
    missing: str | None,
    *,
    is_outdated: bool = False,
) -> Finding:
    """Check that the agent runs and starts again by itself.

    Args:
        state: the service manager's view; None: the agent is not installed.
        agent: the status of the running agent; None: none answers.
        ended: how the last agent ended, if it wrote that.
        missing: the program of the service, or its Python, if it is not there any more.
        is_outdated: this version would write another definition of the service.
    """
    name = "service"
    if state is None:
        detail = f"an agent runs as process {agent.pid}, and ends with its terminal" if agent else "no agent runs"
        return Finding(name, "warning" if agent else "problem", detail, f"sudo {PROGRAM} agent install")
    if missing:
        fix = "install Pomona anew, then the agent with its options: pomona agent install"
        return Finding(name, "problem", f"{state.job} starts {missing}, which is not there", fix)
    if agent is None:
        reason = f": {ended.message}" if ended else ""
        fix = "mend that, then: pomona agent restart" if ended else "pomona agent logs"
        return Finding(name, "problem", f"{state.job} is {state.phase}, and no agent answers{reason}", fix)
    if state.pid not in (None, agent.pid):
        detail = f"{state.job} has process {state.pid}, and process {agent.pid} serves"
        return Finding(name, "problem", detail, f"end process {agent.pid}: its engines go on")
    if is_outdated:
        detail = f"{state.definition} is of another version of Pomona"
        return Finding(name, "warning", detail, "pomona agent restart")
    return Finding(name, "ok", f"{state.job} runs as process {agent.pid}")
