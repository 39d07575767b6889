"""A pod's network: a network namespace connected to the bridge, with an address from the node's subnet."""

from __future__ import annotations

from tests.controlplane.network import ADDRESS, BRIDGE, PREFIX_LENGTH, NetworkError, ip

FIRST, LAST = 10, 250


class PodNetwork:
    """The pod subnet of one node, e.g. `10.77.1` for addresses 10.77.1.10 to 10.77.1.250."""

    def __init__(self, subnet: str) -> None:
        self._subnet = subnet
        self._taken: dict[str, int] = {}
        self._next = FIRST

    def allocate(self, uid: str) -> str:
        """Return the pod's address, never one that was just freed; raises NetworkError when the subnet is full."""
        if uid not in self._taken:
            free = set(range(FIRST, LAST + 1)) - set(self._taken.values())
            if not free:
                raise NetworkError(f"no address is free in {self._subnet}.{FIRST}-{LAST}: delete pods of this node")
            number = min(free, key=lambda candidate: (candidate < self._next, candidate))
            self._taken[uid], self._next = number, number + 1
        return f"{self._subnet}.{self._taken[uid]}"

    def release(self, uid: str) -> None:
        """Free a pod's address."""
        self._taken.pop(uid, None)

    async def add(self, uid: str) -> str:
        """Create the pod's network namespace, named by `netns(uid)`, and return its address. Safe to call again."""
        address, name, link = self.allocate(uid), netns(uid), f"v{uid[:13]}"
        await remove_namespace(uid)
        await ip(
            f"netns add {name}",
            f"link add {link} type veth peer name eth0 netns {name}",
            f"link set {link} master {BRIDGE} up",
        )
        await ip(
            "link set lo up",
            f"address add {address}/{PREFIX_LENGTH} dev eth0",
            "link set eth0 up",
            f"route add default via {ADDRESS}",
            netns=name,
        )
        return address

    async def remove(self, uid: str) -> None:
        """Remove the namespace with its links, and free the address."""
        await remove_namespace(uid)
        self.release(uid)


def netns(uid: str) -> str:
    """Return the name of a pod's network namespace."""
    return f"pod-{uid}"


async def remove_namespace(uid: str) -> None:
    """Remove a pod's namespace if there is one, even one of an earlier kubelet."""
    try:
        await ip(f"netns delete {netns(uid)}")
    except NetworkError as error:
        if "No such file" not in str(error):
            raise


async def ensure_address(address: str) -> None:
    """Add the node's own address to the bridge unless the bridge has it already."""
    try:
        await ip(f"address add {address}/{PREFIX_LENGTH} dev {BRIDGE}")
    except NetworkError as error:
        if "File exists" not in str(error) and "already assigned" not in str(error):
            raise
