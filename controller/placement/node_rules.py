"""The rules by which Kubernetes' scheduler admits a pod to a node: its taints, and what the pod selects.

The queue gives a pod only a node whose rules it meets, or the scheduler would refuse the pod there for ever. How much
room the node has is another question. Taints of hosts are tolerated by the same rules.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from crds.meta import Toleration
from crds.metalhost import HostTaint
from kube.client import Obj

_CORDONED: Final = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
"""The taint of a node on which an administrator lets no new pod run."""
_Test = Callable[[str | None], bool]
"""Decides about the value of a label of a node; None: the node has no such label."""
_Term = tuple[tuple[tuple[str, _Test], ...], tuple[tuple[str, _Test], ...]]
"""The keys of labels and of fields, each with its test, all of which a node has to pass."""
_OPERATORS: Final[Mapping[str, Callable[[Sequence[str]], _Test]]] = {
    "In": lambda values: frozenset(values).__contains__,
    "NotIn": lambda values: functools.partial(_is_absent, frozenset(values)),
    "Exists": lambda _: lambda value: value is not None,
    "DoesNotExist": lambda _: lambda value: value is None,
    "Gt": lambda values: lambda value: _is_greater(value, values[0]),
    "Lt": lambda values: lambda value: _is_greater(values[0], value),
}


class NodeRules:
    """The rules of a pod about its node, read once: they may be long, and each node is compared with them."""

    def __init__(self, pod_spec: Obj) -> None:
        """Read the rules of a pod about its node: nodeSelector, tolerations and required node affinity."""
        # (name, value) of each label that the node must have.
        self._selector = tuple((pod_spec.get("nodeSelector") or {}).items())

        tolerations = pod_spec.get("tolerations") or ()
        # (key, effect) of the tolerations with operator Exists; an empty text matches any key or effect.
        self._tolerated_keys = {
            (toleration.get("key") or "", toleration.get("effect") or "")
            for toleration in tolerations
            if toleration.get("operator") == "Exists"
        }
        # (key, value, effect) of all others: they match one value of a key.
        self._tolerated_values = {
            (toleration.get("key"), toleration.get("value") or "", toleration.get("effect") or "")
            for toleration in tolerations
            if toleration.get("operator") != "Exists"
        }

        # Tests of the required node affinity: a node must pass one of the terms. None: the pod requires nothing.
        affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        self._terms = None if required is None else [_read_term(term) for term in required["nodeSelectorTerms"]]

    def admit(self, node: Obj) -> bool:
        """Return whether a node admits new pods with these rules, if it has room."""
        spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
        # A cordoned node counts as tainted (`_CORDONED`), so that pods may tolerate that.
        taints = [*(spec.get("taints") or ()), *([_CORDONED] if spec.get("unschedulable") else [])]
        for taint in taints:
            if taint.get("effect") != "PreferNoSchedule" and not self._tolerate(taint):
                return False
        if any(labels.get(name) != value for name, value in self._selector):
            return False
        if self._terms is None:  # the pod has no required node affinity
            return True
        fields = {"metadata.name": node["metadata"]["name"]}
        return any(_meets(term, labels, fields) for term in self._terms)

    def _tolerate(self, taint: Obj) -> bool:
        """Return whether a toleration matches a taint; one without a key, or effect, matches any key, or effect."""
        key, value = taint["key"], taint.get("value") or ""
        return any(
            ("", effect) in self._tolerated_keys
            or (key, effect) in self._tolerated_keys
            or (key, value, effect) in self._tolerated_values
            for effect in ("", taint.get("effect"))
        )


def admits(node: Obj, pod_spec: Obj) -> bool:
    """Return whether a node admits new pods with this spec, if it has room."""
    return NodeRules(pod_spec).admit(node)


def find_untolerated(taints: Iterable[HostTaint], tolerations: Collection[Toleration]) -> HostTaint | None:
    """Return the first taint of a host that none of these tolerates; None if all are tolerated."""
    return next(
        (taint for taint in taints if not any(_tolerates_host(toleration, taint) for toleration in tolerations)), None
    )


def _tolerates_host(toleration: Toleration, taint: HostTaint) -> bool:
    """Return whether a toleration matches a host's taint, by the rules that Kubernetes has for nodes."""
    if toleration.effect not in {"", taint.effect}:
        return False
    if toleration.operator == "Exists":
        return toleration.key in {"", taint.key}
    return (toleration.key, toleration.value) == (taint.key, taint.value)


def matches_term(term: Obj, node: Obj) -> bool:
    """Return whether a node meets all expressions of a term; one without any selects no node."""
    metadata = node["metadata"]
    return _meets(_read_term(term), metadata.get("labels") or {}, {"metadata.name": metadata["name"]})


def _read_term(term: Obj) -> _Term:
    """Return the tests of a node selector term: on labels, and on fields."""
    return _read_tests(term.get("matchExpressions") or ()), _read_tests(term.get("matchFields") or ())


def _read_tests(expressions: Iterable[Obj]) -> tuple[tuple[str, _Test], ...]:
    """Return each expression's key with the test of its operator and values.

    `_OPERATORS` has a function for each operator, such as In, that makes a test of a label's value from the values.
    """
    return tuple(
        (expression["key"], _OPERATORS[expression["operator"]](expression.get("values") or ()))
        for expression in expressions
    )


def _meets(term: _Term, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Return whether labels and fields of a node pass all tests of a term; a term without any matches no node."""
    of_labels, of_fields = term
    for key, test in of_labels:
        if not test(labels.get(key)):
            return False
    for key, test in of_fields:
        if not test(fields.get(key)):
            return False
    return bool(of_labels or of_fields)


def _is_absent(values: frozenset[str], value: str | None) -> bool:
    """Return whether a value is none of these: the operator NotIn, which a missing label meets, too."""
    return value not in values


def _is_greater(value: str | None, other: str | None) -> bool:
    """Return whether a value is a greater number than another; False unless both are whole numbers."""
    try:
        return int(value or "") > int(other or "")
    except ValueError:
        return False
