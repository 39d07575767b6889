"""The client of the agent's control socket, for the commands of `pomona agent`."""

import socket
from pathlib import Path

from msgspec import structs

from gateway.http.control_client import ControlRefusedError
from gateway.http.owned_control_client import OwnedControlClient
from metal_agent.control.agent_control import AGENT_SOCKET
from metal_agent.control.agent_status import AgentStatus, StopAccepted


class AgentClient(OwnedControlClient):
    """The client of the agent whose state is in `folder`; with `only_pid`, of that process and no other.

    Every call raises ControlUnreachableError or ControlRefusedError, and may be repeated.
    """

    def __init__(self, folder: Path, only_pid: int | None = None) -> None:
        super().__init__(folder / AGENT_SOCKET, "agent")
        self._only_pid = only_pid

    def check_peer(self, connection: socket.socket) -> None:
        """Note the pid of the process that answers.

        Raises ControlRefusedError if it is not of the folder's owner, or if only another process may answer.
        """
        super().check_peer(connection)
        if self._only_pid is not None and self.peer_pid != self._only_pid:  # the pid that the service manager names
            raise ControlRefusedError(
                f"process {self.peer_pid} answers at {self.socket}, and the agent of the service is process "
                f"{self._only_pid}: end the former"
            )

    async def status(self) -> AgentStatus:
        """Return the status of the agent, with its pid as the kernel names it."""
        return structs.replace(await self.call("GET", "/status", AgentStatus), pid=self.peer_pid)

    async def stop(self) -> int:
        """Drain and stop everything, after which the agent ends; return its pid at once."""
        await self.call("POST", "/stop", StopAccepted)
        return self.peer_pid
