"""Labels that the controller writes on Models and services, which users write too: one set with its own field manager.

A label that a user or another manager has set stays theirs, and only what this manager owns is ever removed.
"""

from collections.abc import Mapping
from typing import Any, Final

from kube.apply import is_applied
from kube.client import Obj
from kube.comparison import owned_fields
from kube.resources import Resource

LABEL_MANAGER: Final = "pomona-discovery"
"""Field manager of the labels."""


def desired_labels(resource: Resource, labels: Mapping[str, str], observed: Obj) -> Obj | None:
    """Return what to apply as `LABEL_MANAGER`, without labels that others own; None if that would change nothing.

    Server-side apply removes labels that we own and do not state, so an object without labels may have to be applied.
    A label is others' if the object has it and `managedFields` does not give it to us.
    """
    owned = owned_fields(observed, LABEL_MANAGER)  # None: we have never applied labels to it
    our_labels: Mapping[str, Any] = (owned or {}).get("f:metadata", {}).get("f:labels", {})
    present = observed["metadata"].get("labels") or {}

    # Labels that the object does not have, or that are ours.
    writable = {
        name: value for name, value in sorted(labels.items()) if name not in present or f"f:{name}" in our_labels
    }
    if not writable and not owned:
        return None

    metadata = {key: observed["metadata"][key] for key in ("name", "namespace", "uid") if key in observed["metadata"]}
    if writable:
        metadata["labels"] = writable
    desired: Obj = {"metadata": metadata}
    return None if is_applied(resource, desired, observed, LABEL_MANAGER) else desired
