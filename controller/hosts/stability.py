"""The condition Stable of a host whose Lease has expired lately, with the reason why it gets no new process yet."""

from collections.abc import Sequence

from controller.hosts.liveness import HostDistrust
from controller.reconcile.conditions import condition
from crds.meta import FLAPPING, STABLE
from crds.metalhost import MetalHost
from kube.client import Obj


def stable_condition(host: MetalHost, expiries: Sequence[str], distrust: HostDistrust | None) -> Obj | None:
    """Return the condition Stable, or None if the Lease of the host has not expired lately.

    Args:
        host: the host.
        expiries: the times at which its Lease has expired within the last hour.
        distrust: the reason why it is trusted late, or None.
    """
    if not expiries:
        return None
    generation = host.metadata.generation
    if distrust is None:
        message = "the host takes processes"
        return condition(STABLE, true=True, reason=STABLE, message=message, generation=generation)
    message = (
        f"the Lease of host {host.metadata.name} expired {distrust.expiries} times within an hour: it takes new "
        f"processes once it has been alive for {distrust.seconds:.0f} seconds, and keeps those that run there; see "
        "that the machine stays awake and connected"
    )
    return condition(STABLE, true=False, reason=FLAPPING, message=message, generation=generation)
