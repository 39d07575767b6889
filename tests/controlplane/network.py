"""Simulated machines: a bridge, and one network namespace for each host, in the sandbox's own network.

A host's link can be cut; to other hosts it then looks like a sleeping machine: silent, without refused connections. All
addresses are in one /16 without a router, as on one switch.
"""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from ipaddress import IPv4Address

BRIDGE = "br0"
ADDRESS = "10.77.0.1"
SERVICE_ADDRESS = "10.0.0.1"
SERVICE_RANGE = "10.0.0.0/16"
"""ClusterIPs; a /24 would be full after 254 Services."""
PREFIX_LENGTH = 16
BRIDGE_MAC = "02:00:0a:4d:00:01"
"""Without one of its own, a bridge has the lowest of its members: it changes when a host comes or goes, and the other
hosts send to the old one for most of a minute."""
FIRST_HOST_ADDRESS = IPv4Address("10.77.100.1")


class NetworkError(Exception):
    """`ip` failed; the message has its commands and its output."""


@dataclass(frozen=True)
class Host:
    """One machine on the network."""

    name: str
    address: str
    netns: str
    link: str

    @property
    def exec(self) -> list[str]:
        """The command prefix that runs a command on this host."""
        return ["nsenter", f"--net=/run/netns/{self.netns}"]

    async def cut(self) -> None:
        """Cut the link: packets are lost, connections stay open."""
        await ip(f"link set {self.link} down")

    async def restore(self) -> None:
        """Restore the link."""
        await ip(f"link set {self.link} up")

    async def kill_all(self) -> None:
        """End every process on this host, as a power cut would, also one that is started meanwhile."""
        while pids := (await ip(f"netns pids {self.netns}")).split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    async def close(self) -> None:
        """End the processes of this host and remove it from the network."""
        await self.kill_all()
        await ip(f"netns delete {self.netns}")


class Network:
    """The bridge with the cluster's own addresses, and the hosts on it."""

    def __init__(self) -> None:
        self._hosts_made = 0

    async def start(self) -> None:
        """Create the bridge, with the API server's address and that of its Service, since there is no kube-proxy."""
        await ip(
            f"link add {BRIDGE} address {BRIDGE_MAC} type bridge",
            f"address add {ADDRESS}/{PREFIX_LENGTH} dev {BRIDGE}",
            f"address add {SERVICE_ADDRESS}/32 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        )

    async def add_host(self, name: str, address: str = "") -> Host:
        """Add a machine, at the next free address of hosts or at one that no host gets."""
        link = name
        if not address:
            address, link = str(FIRST_HOST_ADDRESS + self._hosts_made), f"host{self._hosts_made}"
            self._hosts_made += 1
        host = Host(name=name, address=address, netns=name, link=link)
        await ip(
            f"netns add {host.netns}",
            f"link add {host.link} type veth peer name eth0 netns {host.netns}",
            f"link set {host.link} master {BRIDGE} up",
        )
        await ip(
            "link set lo up",
            f"address add {host.address}/{PREFIX_LENGTH} dev eth0",
            "link set eth0 up",
            netns=host.netns,
        )
        return host


async def ip(*commands: str, netns: str | None = None) -> str:
    """Run commands of `ip` as one batch, and return their output.

    Raises:
        NetworkError: a command failed; the later ones did not run.
    """
    place = ["-netns", netns] if netns else []
    process = await asyncio.create_subprocess_exec(
        "ip",
        *place,
        "-batch",
        "-",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate("\n".join(commands).encode())
    if process.returncode != 0:
        raise NetworkError(f"ip {'; '.join(commands)}: {errors.decode().strip()}")
    return output.decode()
