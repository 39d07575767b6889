"""Pods that mount a ReadWriteOnce volume run on one node, since such a volume can be attached to one only.

The scheduler holds this by itself only if the volume is a part of its node. A second pod elsewhere would wait for ever
for a network disk (Multi-Attach error). So each pod that mounts the volume has a label of its claim, and runs where
pods with that label run; the first one runs anywhere. A pod with several volumes follows that of its main Model alone,
since the scheduler counts only pods that match all terms of an affinity. The Job that fetches weights has ended before
any pod mounts them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from controller.models.served import format_of, is_mounted_image, own_claim
from controller.services.pods.observed_deployments import node_of
from crds.meta import GROUP
from crds.model import Model
from kube.client import Obj

_LABEL: Final = f"volume.{GROUP}/"
"""Prefix of a label for each claim: a pod may mount the volumes of several Models."""
FIRST_MARK: Final = "true"
"""Value of the label until another one is needed (`volume_mark.py`)."""
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def has_one_node(model: Model) -> bool:
    """Return whether the volume of a Model can be attached to one node only, which is not known of a user's own."""
    cache = model.spec.cache
    is_ours = cache.scope == "model" and not is_mounted_image(model) and own_claim(model) is None
    return is_ours and format_of(model) != "ollama" and cache.access_mode == "ReadWriteOnce"


def label_claims(marks: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a pod that mounts these claims, each with the value of its label."""
    return {name_label(claim): mark for claim, mark in marks.items()}


def name_label(claim: str) -> str:
    """Return the label of the pods that mount this claim."""
    return f"{_LABEL}{claim}"


def follows_only_its_volume(pod: Obj) -> bool:
    """Return whether a pod must run on the node of the pods with its volume, and is bound to no other pods."""
    terms = _list_terms(pod)
    return bool(terms) and all(_is_ours(term) for term in terms)


def keep_on_one_node(pod: Obj, claim: str, mark: str) -> Obj:
    """Return the spec of a pod that runs where other pods with this claim run, if there are any.

    They find each other by a label for the claim, whose value is `mark`: another value begins on any node.
    """
    # A pod whose own label is the only match may run anywhere: Kubernetes lets the first one of a group start.
    affinity = pod.get("affinity", {})
    pods = affinity.get("podAffinity", {})
    term = {"labelSelector": {"matchLabels": label_claims({claim: mark})}, "topologyKey": "kubernetes.io/hostname"}
    return {**pod, "affinity": {**affinity, "podAffinity": {**pods, _REQUIRED: [*pods.get(_REQUIRED, ()), term]}}}


def may_follow(new: Obj, earlier: Obj, pods: Iterable[Obj]) -> bool:
    """Return whether a new pod may run on the node of an earlier one after that one has ended.

    False: it must follow other pods with its one-node volume, and none of these `pods` is there.
    """
    # The labels of the pods that it must follow, by the terms of `keep_on_one_node`.
    our_terms = [term for term in _list_terms(new) if _is_ours(term)]
    labels = {name: mark for term in our_terms for name, mark in term["labelSelector"]["matchLabels"].items()}
    if not labels:
        return True
    nodes_to_follow = {
        node_of(pod)
        for pod in pods
        if pod is not earlier and node_of(pod) and labels.items() <= pod["metadata"]["labels"].items()
    }
    return not nodes_to_follow or node_of(earlier) in nodes_to_follow  # no other such pod: it follows nobody


def _list_terms(pod: Obj) -> list[Obj]:
    affinity: Obj = (pod["spec"].get("affinity") or {}).get("podAffinity") or {}
    terms: list[Obj] = affinity.get(_REQUIRED) or []
    return terms


def _is_ours(term: Obj) -> bool:
    labels: Obj = term.get("labelSelector", {}).get("matchLabels", {})
    return any(name.startswith(_LABEL) for name in labels)
