"""The rules by which Kubernetes' scheduler admits a pod to a node: its taints, and what the pod selects.

The queue gives a pod only a node whose rules it meets, or the scheduler would refuse the pod there for ever. How much
room the node has is another question. Taints of hosts are tolerated by the same rules.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from crds.meta import Toleration
from crds.metalhost import HostTaint
from kube.client import Obj

_CORDONED: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
"""The taint of a node on which an administrator lets no new pod run."""
_Matches = Callable[[str | None, list[str]], bool]
_OPERATORS: Final[Mapping[str, _Matches]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, values: _is_greater(value, values[0]),
    "Lt": lambda value, values: _is_greater(values[0], value),
}


def admits(node: Obj, pod_spec: Obj) -> bool:
    """Return whether a node admits new pods with this spec, if it has room."""
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
    taints = [*(spec.get("taints") or ()), *([_CORDONED] if spec.get("unschedulable") else [])]
    tolerations = pod_spec.get("tolerations") or []
    for taint in taints:
        if taint.get("effect") != "PreferNoSchedule" and not any(_tolerates(each, taint) for each in tolerations):
            return False
    if any(labels.get(name) != value for name, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return required is None or any(matches_term(term, node) for term in required["nodeSelectorTerms"])


def _tolerates(toleration: Obj, taint: Obj) -> bool:
    if toleration.get("effect") not in {None, "", taint.get("effect")}:
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator") == "Exists":
        return key in {"", taint["key"]}
    return key == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")


def find_untolerated(taints: Iterable[HostTaint], tolerations: Collection[Toleration]) -> HostTaint | None:
    """Return the first taint of a host that none of these tolerates; None if all are tolerated."""
    return next((taint for taint in taints if not any(_tolerates_host(each, taint) for each in tolerations)), None)


def _tolerates_host(toleration: Toleration, taint: HostTaint) -> bool:
    if toleration.effect not in {"", taint.effect}:
        return False
    if toleration.operator == "Exists":
        return toleration.key in {"", taint.key}
    return (toleration.key, toleration.value) == (taint.key, taint.value)


def matches_term(term: Obj, node: Obj) -> bool:
    """Return whether a node meets all expressions of a term; one without any selects no node."""
    labels, fields = node["metadata"].get("labels") or {}, {"metadata.name": node["metadata"]["name"]}
    expressions = [(each, labels) for each in term.get("matchExpressions") or ()]
    expressions += [(each, fields) for each in term.get("matchFields") or ()]
    return bool(expressions) and all(
        _OPERATORS[each["operator"]](values.get(each["key"]), each.get("values") or []) for each, values in expressions
    )


def _is_greater(value: str | None, other: str | None) -> bool:
    try:
        return int(value or "") > int(other or "")
    except ValueError:
        return False
