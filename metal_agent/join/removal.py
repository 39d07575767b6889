"""Remove a host: its rights first, so that each new request of it is refused, then its tokens, then the rest of it.

Each step may be repeated: a removal that ended in between is continued by the next one.
"""

from typing import Final, NamedTuple

from crds.meta import HOSTS_NAMESPACE, LABEL_SLICE_MANAGED_BY, SLICE_MANAGED_BY, split_slice_name
from kube import resources
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import Resource, object_key
from metal_agent.join.host_account import agent_binding_name, join_code_name

TOKEN_CACHE_SECONDS: Final = 11.0
"""Time after which API servers have forgotten a token of a deleted account, and accept it no more.

Until then a host of the same name, if it were made anew, would be open to the tokens of the one before.
"""


class _Step(NamedTuple):
    resource: Resource
    name: str
    namespace: str | None = HOSTS_NAMESPACE


def removal_steps(host: str) -> tuple[tuple[_Step, ...], tuple[_Step, ...]]:
    """Return the objects to delete before the endpoints of a host, and after them, in order.

    Rights and tokens go first: a host that is no longer trusted must not write anything while the rest is deleted.
    """
    code = join_code_name(host)
    grants = f"grants:{host}"  # the Role in which the controller keeps what it has granted to the host
    before = (
        # What it may do in the whole cluster, then in its namespace: from now on it can log in, and do nothing.
        _Step(resources.CLUSTER_ROLE_BINDINGS, agent_binding_name(host), namespace=None),
        _Step(resources.ROLE_BINDINGS, host),
        _Step(resources.ROLE_BINDINGS, grants),
        # Its tokens, and those of a code that is not used yet.
        _Step(resources.POD_TEMPLATES, code),
        _Step(resources.SERVICE_ACCOUNTS, code),
        _Step(resources.SERVICE_ACCOUNTS, host),
    )

    after = (
        # Its processes are replaced once it is gone, and the controller writes no Secret and grants of it any more.
        _Step(resources.METAL_HOSTS, host, namespace=None),
        _Step(resources.SECRETS, host),
        _Step(resources.LEASES, host),
        *(_Step(kind, name) for name in (host, code, grants) for kind in (resources.ROLES, resources.ROLE_BINDINGS)),
    )
    return before, after


async def list_bound_processes(client: Client, host: str) -> list[Obj]:
    """Return the MetalProcesses that are bound to a host. Raises ApiError and Unreachable."""
    return (await client.list(resources.METAL_PROCESSES, field_selector=f"spec.hostName={host}")).items


async def remove_host(client: Client, host: str) -> list[str]:
    """Remove a host; return what was deleted, as KIND/NAME in order. Raises ApiError and Unreachable.

    Its rights and tokens go first, then its endpoints, so that it cannot write them again, then the rest.
    """
    before, after = removal_steps(host)
    names = [await _delete(client, step) for step in before]
    # All slices are searched, not those with its label: the host may be a thief's, which need not have labelled them.
    slices = await client.list(resources.ENDPOINT_SLICES, label_selector=f"{LABEL_SLICE_MANAGED_BY}={SLICE_MANAGED_BY}")
    for item in slices.items:
        key = object_key(item)
        if split_slice_name(key.name)[1] == host:  # a slice is named after its service and its host
            names.append(await _delete(client, _Step(resources.ENDPOINT_SLICES, key.name, key.namespace)))
    names += [await _delete(client, step) for step in after]
    return [name for name in names if name]


async def _delete(client: Client, step: _Step) -> str | None:
    """Delete one object; return it as KIND/NAME, or None if there is none."""
    try:
        await client.delete(step.resource, step.name, step.namespace)
    except NotFound:
        return None
    return f"{step.resource.kind}/{step.name}"
