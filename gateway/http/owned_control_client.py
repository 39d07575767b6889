"""The client of a control API whose socket is in a private folder: the process that answers must be of its owner.

Root asks the processes of other users, which could answer anything: the kernel says which process answers, and whose it
is.
"""

import socket

from devices.sockets import unix_peer_pid, unix_peer_uid
from gateway.http.control_client import ControlClient, ControlRefusedError


class OwnedControlClient(ControlClient):
    """The client of a process of the owner of the socket's folder."""

    peer_pid = 0
    """The process that has answered last; 0: none has."""

    def check_peer(self, connection: socket.socket) -> None:
        """Note the pid of the process that answers. Raises ControlRefusedError if it is not of the folder's owner."""
        self.peer_pid, uid = unix_peer_pid(connection), unix_peer_uid(connection)
        owner = self.socket.parent.stat().st_uid
        if uid != owner:
            raise ControlRefusedError(
                f"process {self.peer_pid} of uid {uid} answers at {self.socket}, whose folder is of uid {owner}: end "
                "it, or remove the socket"
            )
