"""The objects by which the API server knows a host: its ServiceAccount and least rights, and those of a join code.

An administrator writes them (`invitation.py`) and deletes them (`removal.py`). A host may read its one Secret, keep its
Lease and request tokens for itself; the rest is the ClusterRole `pomona-metal-agent` within the host policy.
"""

from collections.abc import Iterable
from typing import Final

from crds.meta import GROUP, HOSTS_NAMESPACE, LABEL_MANAGED_BY, MANAGED_BY
from kube.client import Obj
from kube.resources import CLUSTER_ROLE_BINDINGS, POD_TEMPLATES, ROLE_BINDINGS, ROLES, Resource

AGENT_ROLE: Final = "pomona-metal-agent"
JOIN_CLAIMS: Final = f"{GROUP}/join-claims"
"""Annotation of a code's PodTemplate: the host's first token without its signature, which is in the code."""


def join_code_name(host: str) -> str:
    """Return the name of the objects of a host's join code; a host's own name has no dot."""
    return f"{host}.join"


def agent_binding_name(host: str) -> str:
    """Return the name of the ClusterRoleBinding of a host."""
    return f"pomona-metal-host-{host}"


def host_account(host: str) -> Obj:
    """Return the ServiceAccount of a host."""
    return {"metadata": _metadata(host)}


def host_rights(host: str, audiences: Iterable[str]) -> tuple[tuple[Resource, Obj], ...]:
    """Return the rights of a host; `audiences` are those of the API server, for which alone it may request tokens."""
    # _rule: the API group, the resource, the name of the one object, and the verbs.
    rules = [
        # The copy of the tokens that its processes need, and no other Secret.
        _rule("", "secrets", host, "get", "list", "watch"),
        # Its heartbeat.
        _rule("coordination.k8s.io", "leases", host, "get", "create", "patch"),
        # The next token, before the one that it has expires.
        _rule("", "serviceaccounts/token", host, "create"),
        # The policy pomona-host-tokens asks for this.
        {"apiGroups": [GROUP], "resources": ["metalhosts/audience"], "resourceNames": [*audiences], "verbs": ["use"]},
    ]

    # A Role of its own in the namespace of hosts, and the one ClusterRole of all hosts.
    binding = _binding("ClusterRole", AGENT_ROLE, host)
    return (
        (ROLES, {"metadata": _metadata(host), "rules": rules}),
        (ROLE_BINDINGS, {"metadata": _metadata(host), **_binding("Role", host, host)}),
        (CLUSTER_ROLE_BINDINGS, {"metadata": _labelled(agent_binding_name(host)), **binding}),
    )


def join_template(host: str, claims: str) -> Obj:
    """Return the PodTemplate of a join code, which keeps `claims` for whoever deletes it first.

    The API server answers the deletion of a PodTemplate with the object, as it does for few kinds; Secrets are not
    among them. Nothing in Kubernetes acts on a PodTemplate, and the roles `view`, `edit` and `admin` do not show it,
    unlike a ServiceAccount.
    """
    metadata = {**_metadata(join_code_name(host)), "annotations": {JOIN_CLAIMS: claims}}
    # A PodTemplate needs a container.
    return {"metadata": metadata, "template": {"spec": {"containers": [{"name": "none", "image": "none"}]}}}


def code_account(host: str, template_uid: str) -> Obj:
    """Return the ServiceAccount of a join code, which is collected as garbage with its PodTemplate."""
    return {"metadata": _code_metadata(host, template_uid)}


def code_rights(host: str, template_uid: str) -> tuple[tuple[Resource, Obj], ...]:
    """Return Role and RoleBinding of a join code: it may only delete its PodTemplate, which deletes both as well."""
    name, metadata = join_code_name(host), _code_metadata(host, template_uid)
    return (
        (ROLES, {"metadata": metadata, "rules": [_rule("", "podtemplates", name, "delete")]}),
        (ROLE_BINDINGS, {"metadata": metadata, **_binding("Role", name, name)}),
    )


def _code_metadata(host: str, template_uid: str) -> Obj:
    """Return the metadata of an object of a join code, which is owned by its PodTemplate."""
    name = join_code_name(host)
    owner = {"apiVersion": "v1", "kind": POD_TEMPLATES.kind, "name": name, "uid": template_uid}
    return {**_metadata(name), "ownerReferences": [owner]}


def _labelled(name: str) -> Obj:
    """Return the metadata of an object of the cluster."""
    return {"name": name, "labels": {LABEL_MANAGED_BY: MANAGED_BY}}


def _metadata(name: str) -> Obj:
    """Return the metadata of an object in the namespace of hosts."""
    return {**_labelled(name), "namespace": HOSTS_NAMESPACE}


def _rule(group: str, resource: str, name: str, *verbs: str) -> Obj:
    """Return the rule that allows verbs on one named object."""
    return {"apiGroups": [group], "resources": [resource], "resourceNames": [name], "verbs": [*verbs]}


def _binding(kind: str, role: str, account: str) -> Obj:
    """Return role and subject of a binding to an account in the namespace of hosts."""
    return {
        "roleRef": {"apiGroup": ROLES.group, "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": HOSTS_NAMESPACE}],
    }
