"""The stamp of an applied object: a digest of what was desired, by which a later decision recognises it.

A policy of the cluster may rewrite what is applied, such as the registry of an image. Compared by its values, such an
object would differ for ever. Compared by the stamp it is what was desired, as long as no other writer has taken over
one of its fields since. The number of replicas is no part of the digest: a change of it restarts nothing.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from controller.reconcile.plan import FIELD_MANAGER
from crds.meta import GROUP
from kube.apply import is_applied
from kube.client import Obj
from kube.comparison import FieldSet, covers_owned, owned_fields
from kube.resources import Resource

ANNOTATION_STAMP: Final = f"{GROUP}/desired"
ANNOTATION_INPUTS: Final = f"{GROUP}/inputs"
"""Digest of what users decided about an object; it changes with an edit, and not with an update of Pomona."""
ANNOTATION_UPDATE: Final = f"{GROUP}/update"
"""On an object that an update of Pomona has replaced last, and no edit."""
ANNOTATION_SERVED: Final = f"{GROUP}/served"
"""On a Deployment beside a copy of weights whose pods served when its template was replaced last."""
_MOST_REMEMBERED: Final = 20_000
_OWNED: Final[dict[tuple[int, str], FieldSet]] = {}
"""Field sets that own all fields of the spec with this digest: each decision about a service asks for it again."""


def stamp(desired: Obj) -> Obj:
    """Return the desired object with its stamp."""
    annotations = {**desired["metadata"].get("annotations", {}), ANNOTATION_STAMP: _digest(desired["spec"])}
    return {**desired, "metadata": {**desired["metadata"], "annotations": annotations}}


def is_desired(desired: Obj, observed: Obj) -> bool:
    """Return whether `observed` is what applying `desired` has made; `desired` may have its stamp already.

    It is if its stamp, the annotation with the digest of what was applied, is that of `desired`, the number of replicas
    is equal, and we still own each field of the spec: nobody else has changed one since.
    """
    stamped = _read_stamp(desired) or _digest(desired["spec"])  # its stamp, or that which it would get
    if _read_stamp(observed) != stamped:
        return False
    if observed["spec"].get("replicas") != desired["spec"].get("replicas"):
        return False
    owned = owned_fields(observed, FIELD_MANAGER) or {}
    return _is_owned(stamped, desired["spec"], owned.get("f:spec", {}))


def _is_owned(digest: str, spec: Mapping[str, Any], owned: FieldSet) -> bool:
    """Return whether all fields of a spec with this digest are owned, according to `managedFields` (`owned`).

    The comparison is slow, so a positive result is remembered by the identity of `owned`, one object for many of ours.
    """
    key = id(owned), digest
    if _OWNED.get(key) is owned:  # not a later object that got the id of one that is gone
        return True
    if not covers_owned(owned, {name: value for name, value in spec.items() if name != "replicas"}):
        return False
    if len(_OWNED) >= _MOST_REMEMBERED:
        _OWNED.clear()  # what is needed is compared once more
    _OWNED[key] = owned
    return True


def needs_apply(resource: Resource, desired: Obj, observed: Obj) -> bool:
    """Return whether `desired` must be applied: `observed` differs from it, or lacks an annotation such as the stamp.

    The stamp is a digest of the spec that was applied. Kinds that get none are compared field by field.
    """
    if _read_stamp(desired) is None:
        return not is_applied(resource, desired, observed, FIELD_MANAGER)

    # By the stamps; the API server may have changed fields of the spec since.
    annotations = observed["metadata"].get("annotations") or {}
    has_annotations = desired["metadata"]["annotations"].items() <= annotations.items()
    return not has_annotations or not is_desired(desired, observed)


def _digest(spec: Mapping[str, Any]) -> str:
    constant = {name: value for name, value in spec.items() if name != "replicas"}
    return hashlib.sha256(msgspec.json.encode(constant, order="deterministic")).hexdigest()[:16]


def _read_stamp(obj: Obj) -> str | None:
    annotation: str | None = (obj["metadata"].get("annotations") or {}).get(ANNOTATION_STAMP)
    return annotation
