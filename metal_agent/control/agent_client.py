"""The client of the agent's control socket, for the commands of `pomona agent`.

Root asks the agents of other users, who could answer anything: the kernel says which process answers, and whose it is.
"""

import socket
from pathlib import Path

from msgspec import structs

from devices.sockets import unix_peer_pid, unix_peer_uid
from gateway.http.control_client import ControlClient, ControlRefusedError
from metal_agent.control.agent_control import AGENT_SOCKET
from metal_agent.control.agent_status import AgentStatus, StopAccepted


class AgentClient(ControlClient):
    """The client of the agent whose state is in `folder`; with `only_pid`, of that process and no other.

    Every call raises ControlUnreachableError or ControlRefusedError, and may be repeated.
    """

    def __init__(self, folder: Path, only_pid: int | None = None) -> None:
        super().__init__(folder / AGENT_SOCKET, "agent")
        self._only_pid = only_pid
        self._peer_pid = 0

    def check_peer(self, connection: socket.socket) -> None:
        """Note the pid of the process that answers.

        Raises ControlRefusedError if it is not of the folder's owner, or if only another process may answer.
        """
        self._peer_pid, uid = unix_peer_pid(connection), unix_peer_uid(connection)
        # The socket is in the state folder of the agent.
        owner = self.socket.parent.stat().st_uid
        if uid != owner:
            raise ControlRefusedError(
                f"process {self._peer_pid} of uid {uid} answers at {self.socket}, whose folder is of uid {owner}: end "
                "it, or remove the socket"
            )

        if self._only_pid is not None and self._peer_pid != self._only_pid:  # the pid that the service manager names
            raise ControlRefusedError(
                f"process {self._peer_pid} answers at {self.socket}, and the agent of the service is process "
                f"{self._only_pid}: end the former"
            )

    async def status(self) -> AgentStatus:
        """Return the status of the agent, with its pid as the kernel names it."""
        return structs.replace(await self.call("GET", "/status", AgentStatus), pid=self._peer_pid)

    async def stop(self) -> int:
        """Drain and stop everything, after which the agent ends; return its pid at once."""
        await self.call("POST", "/stop", StopAccepted)
        return self._peer_pid
