"""The client of the agent's control socket, for the commands of `pomona agent`."""

from pathlib import Path

from gateway.http.control_client import ControlClient
from metal_agent.control.agent_control import AGENT_SOCKET
from metal_agent.control.agent_status import AgentStatus, StopAccepted


class AgentClient(ControlClient):
    """The client of the agent whose state is in `folder`.

    Every call raises ControlUnreachableError or ControlRefusedError, and may be repeated.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / AGENT_SOCKET, "agent")

    async def status(self) -> AgentStatus:
        """Return the status of the agent."""
        return await self.call("GET", "/status", AgentStatus)

    async def stop(self) -> StopAccepted:
        """Drain and stop everything, after which the agent ends; return at once."""
        return await self.call("POST", "/stop", StopAccepted)
