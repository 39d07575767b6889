"""The failures of calls to the API server in the words of a user: one line, with the way out."""

import re
from http import HTTPStatus
from typing import Final

from crds.meta import GROUP, HOSTS_NAMESPACE
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, Unauthorized, Unreachable
from kube.kubeconfig import CredentialsError

_REFUSED_RIGHT: Final = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)
_CONFLICT: Final = re.compile(r'conflicts? with "(?P<manager>[^"]*)"')
_NO_NAMESPACE: Final = re.compile(r'namespaces "(?P<name>[^"]*)" not found')
_READING_VERBS: Final = frozenset({"get", "list", "watch"})
_MACHINE_RESOURCES: Final = frozenset({"metalhosts", "metalprocesses", "nodefitnesses", "nodes"})
"""Kinds that no role of Kubernetes' own has: they name machines and quote the logs of engines."""
_PREFIX: Final = re.compile(r"^(?:GET|POST|PUT|PATCH|DELETE) \S+: |^port-forward [^:]*: ")


def is_unknown_kind(error: NotFound) -> bool:
    """Decide whether the kind, rather than the object, does not exist: the answer then names no reason."""
    return not error.reason


def describe_unreachable(error: Unreachable, server: str) -> str:
    """Return the message that the API server does not answer, or that no credentials could be got to ask it."""
    if isinstance(error.__cause__, CredentialsError):
        return str(error.__cause__)
    # _PREFIX: the call at the beginning of the message, such as `GET /api/v1/pods: `
    cause = _PREFIX.sub("", str(error)) or "no answer"
    return (
        f"the API server {server} does not answer ({cause}): check that this machine reaches it, or choose another "
        "cluster with --context or --kubeconfig"
    )


def describe_api_error(error: ApiError, server: str) -> str:
    """Return the message that the API server refused: why, and who can change that."""
    match error:
        case Unauthorized():
            return (
                f"the API server {server} refuses these credentials: log in again, or choose another user with "
                "--context or --kubeconfig"
            )
        case Forbidden():
            return _describe_forbidden(error)
        case NotFound() if is_unknown_kind(error):
            return (
                f"the API server {server} does not know the kinds of {GROUP}: install Pomona in this cluster (helm "
                "install pomona deploy/chart --namespace pomona-system --create-namespace), or choose another cluster "
                "with --context"
            )
        # _CONFLICT matches the message of server-side apply about a field of another manager, _NO_NAMESPACE that about
        # a namespace that does not exist.
        case Conflict() if error.reason == "Conflict" and _CONFLICT.search(error.message):
            return _describe_conflict(error)
        case NotFound() if matched := _NO_NAMESPACE.fullmatch(error.message):
            return (
                f"namespace {matched['name']} does not exist: create it (kubectl create namespace {matched['name']}), "
                "or choose another with --namespace"
            )
        case NotFound() | Invalid():
            return error.message or str(error)
        case ApiError(status=HTTPStatus.BAD_REQUEST):
            return error.message or str(error)

    # All others, such as an error inside of the server or too many requests.
    return f"the API server {server} cannot answer now: {error}"


def _describe_forbidden(error: Forbidden) -> str:
    """Return which right the user lacks, and who can grant it by which role.

    * To read nodes and hosts, Pomona has a cluster role of its own, pomona-machines-view.
    * To change them, or to read or change anything else in the namespace of the hosts, is for administrators.
    * What belongs to no namespace takes a cluster role binding, as Kubernetes' own roles are bound in namespaces.
    * Everything else is in the roles view, edit and admin of Kubernetes; of these, view reads no Secrets.
    """
    match = _REFUSED_RIGHT.search(error.message)
    if match is None:
        return f"{error.call} is refused: {error.message or 'no reason given'}"

    # denied: who may not do what to which kind, and where
    resource = f"{match['resource']}.{match['group']}" if match["group"] else match["resource"]
    namespace = match["namespace"]
    place = f"in namespace {namespace}" if namespace else "in the whole cluster"
    denied = f"{match['user']} may not {match['verb']} {resource} {place}"

    # _READING_VERBS: get, list, watch; _MACHINE_RESOURCES: nodes, hosts and what is about them
    is_reading = match["verb"] in _READING_VERBS
    is_of_machines = match["resource"] in _MACHINE_RESOURCES
    if is_of_machines and is_reading:
        return (
            f"{denied}: an administrator of the cluster can grant it: kubectl create clusterrolebinding NAME "
            f"--clusterrole=pomona-machines-view --user={match['user']}"
        )

    if is_of_machines or namespace == HOSTS_NAMESPACE:
        return f"{denied}: administrators of the cluster may, and can bind a role that allows it (docs/security.md)"
    if not namespace:
        return f"{denied}: an administrator of the cluster can grant it by a cluster role binding"

    view_suffices = is_reading and match["resource"] != "secrets"
    roles = "view, edit or admin" if view_suffices else "edit or admin"
    return f"{denied}: an administrator of the cluster can grant it by a role binding to the cluster role {roles}"


def _describe_conflict(error: Conflict) -> str:
    """Return which fields belong to another field manager."""
    # The names of the other managers are in the message, the fields in its causes; `error.call` says what was to be
    # applied.
    managers = sorted(set(_CONFLICT.findall(error.message)))
    fields = sorted({field.removeprefix(".") for field, _ in error.causes if field})
    what = error.call.removeprefix("apply ").replace(f".{GROUP} ", " ", 1)
    return (
        f"{what} belongs to {', '.join(managers)}, which has set {', '.join(fields) or 'some fields'} to another "
        "value, and nothing is overwritten: change it there, or deploy under another name"
    )
