"""Models in a copy of the cluster, as if they were applied and inspected.

A Model whose source nothing has read yet is taken as inspected if its header was read for the plan, if another Model of
the same source has been inspected, or if its memory is stated.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from controller.models.decision import CACHED, READY, inspected_message, model_condition
from controller.models.observation import ObservedModel
from controller.models.reconciler import decide_model
from controller.models.volume import read_facts, take_answer
from controller.placement.cluster_copy import ClusterCopy
from controller.reconcile.plan import Snapshot, readable
from crds.model import Model, ModelFacts
from kube.client import Obj
from kube.resources import MODELS, ObjectKey, object_key
from kube.time import rfc3339

ModelHeaders = Mapping[ObjectKey, ModelFacts]
"""Facts that were read in the headers of Models."""


def revise(obj: Obj, **metadata: Any) -> Obj:
    """Return a later version of an object of the store."""
    version: str = obj["metadata"]["resourceVersion"]
    later = str(int(version) + 1) if version.isdecimal() else f"{version}+"
    return {**obj, "metadata": {**obj["metadata"], **metadata, "resourceVersion": later}}


def is_header_missing(copy: ClusterCopy, manifest: Obj) -> bool:
    """Return whether the memory of a Model is unknown until the header of its source is read.

    False also for sources that cannot be read from here (file, ollama), and for a manifest that cannot be decoded.
    """
    try:
        # A status in the manifest does not count.
        model = msgspec.convert({**manifest, "status": {}}, Model)
    except msgspec.ValidationError:
        return False
    if model.spec.stated_bytes is not None or model.spec.source.partition("://")[0] in {"file", "ollama"}:
        return False
    return _find_alike(copy, model, None) is None  # None: it is not about an edit


def assume_inspection(
    copy: ClusterCopy, key: ObjectKey, earlier: Obj | None, headers: ModelHeaders, now: datetime
) -> str:
    """Give a Model in a copy of the cluster the status that it would have after its inspection; note what is assumed.

    The controller inspects a Model by a Job, which does not run in a copy: its result is taken from the header of the
    source, a Model with the same source, or the memory that it states. Returns the note; empty: nothing is assumed,
    because the Model is gone, inspected already or refused, or nothing of that is known.

    Args:
        copy: the copy.
        key: the Model.
        earlier: the Model before the manifest; None: it is new.
        headers: what was read in headers.
        now: the wall clock.
    """
    model = Snapshot(copy.store, now).read(MODELS, key, Model)
    obj = copy.store.get(MODELS, key.name, key.namespace)
    if model is None or obj is None or model.status.observed_generation == model.metadata.generation:
        return ""

    # Decide as the reconciler of Models would while no Job, pod or claim of the Model exists.
    status, note = decide_model(model, ObservedModel(), copy.settings.pods, now).status or {}, ""

    # Pending: it is valid, and only its inspection is missing. Take the facts from elsewhere.
    if status.get("phase") == "Pending":
        assumed = _assume_facts(copy, model, earlier, headers.get(key))
        if assumed is not None:
            facts, note = assumed
            status = _build_status(model, facts)

    # Put the status into the copy.
    conditions = [{**condition, "lastTransitionTime": rfc3339(now)} for condition in status.get("conditions", ())]
    copy.store.put(MODELS, revise({**obj, "status": {**status, "conditions": conditions}}))
    return note


def _assume_facts(
    copy: ClusterCopy, model: Model, earlier: Obj | None, header: ModelFacts | None
) -> tuple[ModelFacts, str] | None:
    """Return the facts about a Model that is not inspected, and the assumption in words; None if nothing is known."""
    name = model.metadata.name
    if header is not None:
        return take_answer(model, header), f"Model {name} is as its header says"

    alike = _find_alike(copy, model, earlier)
    if alike is not None:
        other = f"{alike.metadata.namespace}/{alike.metadata.name}"
        return read_facts(alike), f"Model {name} is like {other}, which has the same source"

    if model.spec.stated_bytes is not None:
        return ModelFacts(), f"Model {name} takes the memory that its spec.memoryBytes states"
    return None


def _find_alike(copy: ClusterCopy, model: Model, earlier: Obj | None) -> Model | None:
    """Return a Model with the same source and files whose header was read; None if there is none.

    `earlier` is the Model itself before an edit: it is preferred, as its source may have stayed.
    """
    stored = sorted(copy.store.list(MODELS), key=object_key)
    for obj in stored if earlier is None else [earlier, *stored]:
        status = obj.get("status") or {}
        # The status of an edited Model is about its earlier source.
        is_current = status.get("observedGeneration") == obj["metadata"].get("generation")

        # status.layout, the sizes of the network, is known once the header was read.
        if obj["spec"].get("source") == model.spec.source and status.get("layout") and is_current:
            for candidate in readable([obj], Model):
                if tuple(candidate.spec.files) == tuple(model.spec.files):
                    return candidate
    return None


def _build_status(model: Model, facts: ModelFacts) -> Obj:
    """Return the status of a Model that has just been inspected."""
    conditions = [
        model_condition(model, READY, true=True, reason="Inspected", message=inspected_message(facts)),
        model_condition(model, CACHED, true=False, reason="Planned", message="its weights are not fetched yet"),
    ]
    stated = {"observedGeneration": model.metadata.generation, "phase": "Ready", "conditions": conditions}
    return {**stated, **msgspec.to_builtins(facts)}
