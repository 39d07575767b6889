"""Where a process listens, as the kernel tells it: no log and no file can claim a port that is another's."""

import psutil

LOOPBACK = "127.0.0.1"


def loopback_port(pid: int) -> int | None:
    """Return the TCP port on which process `pid`, or one that it started, listens on 127.0.0.1; None for none yet."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        found = [socket for member in family for socket in member.net_connections("tcp4")]
    except psutil.Error:  # it, or a child, has just ended
        return None
    ports = [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN and each.laddr.ip == LOOPBACK]
    return min(ports, default=None)
