"""The Lease of this host, by which the controller knows that its agent lives."""

from collections.abc import Callable

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client
from kube.lease import HeldElsewhereError, HostLease
from metal_agent.cluster.endpoint_slices import FIELD_MANAGER, LEASE_SECONDS, RENEW_SECONDS
from metal_agent.options import StartError


async def keep_host_lease(client: Client, host: str, identity: str, on_renewed: Callable[[], None]) -> None:
    """Renew the Lease until cancelled. Raises StartError when another agent has it."""
    try:
        lease = HostLease(client, HOSTS_NAMESPACE, host, identity, FIELD_MANAGER, duration_seconds=LEASE_SECONDS)
        await lease.keep_renewed(RENEW_SECONDS, on_renewed)
    except HeldElsewhereError as error:
        raise StartError(
            f"another agent serves as host {host}: Lease {HOSTS_NAMESPACE}/{host}: {error}; this agent is "
            f"{identity}: stop one of the two; if this machine is a copy of the other, have it join as another "
            "host"
        ) from error
