"""Pods that mount a ReadWriteOnce volume run on one node, since such a volume can be attached to one only.

The scheduler holds this by itself only if the volume is a part of its node. A second pod elsewhere would wait for ever
for a network disk (Multi-Attach error). So each pod that mounts the volume has a label of its claim, and runs where
pods with that label run; the first one runs anywhere. A pod with several volumes follows that of its main Model alone,
since the scheduler counts only pods that match all terms of an affinity. The Job that fetches weights has ended before
any pod mounts them.
"""

from collections.abc import Collection
from typing import Final

from controller.models.served import is_mounted_image, own_claim
from crds.meta import GROUP
from crds.model import Model
from kube.client import Obj

_LABEL: Final = f"volume.{GROUP}/"
"""Prefix of a label for each claim: a pod may mount the volumes of several Models."""
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def has_one_node(model: Model) -> bool:
    """Return whether the volume of a Model can be attached to one node only, which is not known of a user's own."""
    cache = model.spec.cache
    is_ours = cache.scope == "model" and not is_mounted_image(model) and own_claim(model) is None
    return is_ours and cache.access_mode == "ReadWriteOnce"


def label_claims(claims: Collection[str]) -> dict[str, str]:
    """Return the labels of a pod that mounts these claims."""
    return {f"{_LABEL}{claim}": "true" for claim in claims}


def keep_on_one_node(pod: Obj, claim: str) -> Obj:
    """Return the spec of a pod that runs on the node of the other pods with this claim, if there are any."""
    affinity = pod.get("affinity", {})
    pods = affinity.get("podAffinity", {})
    term = {"labelSelector": {"matchLabels": label_claims((claim,))}, "topologyKey": "kubernetes.io/hostname"}
    return {**pod, "affinity": {**affinity, "podAffinity": {**pods, _REQUIRED: [*pods.get(_REQUIRED, ()), term]}}}


def forget_claims(template: Obj) -> Obj:
    """Return the template of a pod without what this module adds, as earlier versions made it."""
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    metadata["labels"] = {name: value for name, value in metadata["labels"].items() if not name.startswith(_LABEL)}
    affinity = dict(spec.pop("affinity", {}))
    pods = dict(affinity.pop("podAffinity", {}))
    if terms := [each for each in pods.pop(_REQUIRED, ()) if not _is_ours(each)]:
        pods[_REQUIRED] = terms
    if pods:
        affinity["podAffinity"] = pods
    if affinity:
        spec["affinity"] = affinity
    return {**template, "metadata": metadata, "spec": spec}


def _is_ours(term: Obj) -> bool:
    labels: Obj = term.get("labelSelector", {}).get("matchLabels", {})
    return any(name.startswith(_LABEL) for name in labels)
