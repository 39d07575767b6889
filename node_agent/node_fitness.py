"""The status of a NodeFitness: the facts in the shape of the API, and when they are written.

They are written once a minute as a heartbeat, and at once if the devices are others, or the condition Ready turns.
Everything else waits for the heartbeat: a thousand agents cost the API server 17 writes a second.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from crds.meta import LABEL_MANAGED_BY, MANAGED_BY
from crds.nodefitness import NodeFitnessStatus
from kube.client import Obj
from node_agent.last_devices import ReportedHardware
from node_agent.node_labels import LabelConflict

HEARTBEAT_SECONDS: Final = 60.0
_GIB: Final = 2**30
_STEPS: Final = {"availableBytes": _GIB, "diskFreeBytes": _GIB}
_DEVICE_STEPS: Final = {"freeBytes": _GIB, "utilizationPercent": 10, "temperatureCelsius": 5}
"""Values that change all the time, and the least change of them that a heartbeat writes."""
_IDENTITY: Final = ("vendor", "deviceClass", "driver")
_DEVICE_IDENTITY: Final = ("id", "product", "partition", "architecture", "memoryBytes")
_LONGEST_MESSAGE: Final = 1000


class ReportProblems(NamedTuple):
    """Everything that keeps an agent from reporting as it should, beside what its hardware states."""

    conflicts: Sequence[LabelConflict] = ()
    labels_refused: str = ""
    """The answer of the API server to the labels; empty: it took them."""
    probe_failed: str = ""
    """A sentence if the last probe read nothing, so that the facts grow old; empty: it did."""


def encode_status(status: NodeFitnessStatus, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status as JSON, without changes that are too small to be written.

    Free memory, utilization and temperature change all the time. Such a value stays as in `written`, the status that
    was written last, until it differs from it by a step.
    """
    body: dict[str, Any] = msgspec.to_builtins(status)
    # _DEVICE_STEPS and _STEPS: the least change that is written, by field; devices are matched by what does not change
    earlier = {_identify_device(device): device for device in written.get("devices", ())}
    if devices := body.get("devices"):
        body["devices"] = [
            _skip_small_changes(device, earlier.get(_identify_device(device), {}), _DEVICE_STEPS) for device in devices
        ]
    return _skip_small_changes(body, written, _STEPS)


def _skip_small_changes(wanted: dict[str, Any], written: Mapping[str, Any], steps: Mapping[str, int]) -> dict[str, Any]:
    """Return the wanted values; a value that has changed by less than its step stays as it was written."""
    kept = {
        field: written[field]
        for field, step in steps.items()
        if field in wanted and field in written and abs(wanted[field] - written[field]) < step
    }
    return wanted | kept


def is_due(body: Mapping[str, Any], written: Mapping[str, Any], silent_seconds: float, interval_seconds: float) -> bool:
    """Decide whether to write the status now: at once if devices or a condition have changed, else as a heartbeat.

    Args:
        body: the status as it would be written.
        written: the status that was written last; empty: none.
        silent_seconds: time since then.
        interval_seconds: time until the next probe.
    """
    # _identify: vendor, device class, driver and devices, and the status of each condition
    if _identify(body) != _identify(written):
        return True
    # Of the two probes around the end of a heartbeat, the nearer one writes: half an interval early is near enough.
    return silent_seconds >= HEARTBEAT_SECONDS - interval_seconds / 2


def _identify(body: Mapping[str, Any]) -> object:
    """Return the part of a status whose change is written at once: vendor, devices, and the status of conditions."""
    devices = [_identify_device(device) for device in body.get("devices", ())]
    conditions = [(condition["type"], condition["status"]) for condition in body.get("conditions", ())]
    return [body.get(field) for field in _IDENTITY], devices, conditions


def _identify_device(device: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the facts of a device whose change is written at once."""
    return tuple(device.get(field) for field in _DEVICE_IDENTITY)


def build_condition(reported: ReportedHardware | None, problems: ReportProblems) -> Obj:
    """Return the condition Ready of a NodeFitness, without lastTransitionTime.

    Its message has all problems, the worst first, and its reason is that of the worst one. It is True without problems.
    """
    tools = [*reported.problems, *_describe_kept_devices(reported)] if reported and reported.problems else []
    refused = problems.labels_refused
    # By reason, the worst first: the first one with a sentence becomes the reason of the condition.
    reasons = {
        "ProbeFailed": [problems.probe_failed] if problems.probe_failed else [],
        "ToolFailed": tools,
        "LabelsRefused": [f"the API server refused the labels of the Node: {refused}"] if refused else [],
        "LabelConflict": [conflict.sentence for conflict in problems.conflicts],
    }

    reason = next((name for name, sentences in reasons.items() if sentences), None)
    if reason is None:
        return {"type": "Ready", "status": "True", "reason": "HardwareRead", "message": "the hardware was read"}

    message = "; ".join(sentence for sentences in reasons.values() for sentence in sentences)
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE - 3]}..."
    return {"type": "Ready", "status": "False", "reason": reason, "message": message}


def _describe_kept_devices(reported: ReportedHardware) -> list[str]:
    """Return a sentence if the devices are not those of the last probe."""
    if reported.devices_state == "kept":
        return [f"the devices are those of {reported.believed.observed_at}"]
    if reported.devices_state == "unknown":
        return [f"the devices are unknown; they were found last at {reported.believed.observed_at}"]
    return []


def build_object(node: Obj) -> Obj:
    """Return the NodeFitness of `node`, with which it is deleted."""
    name, uid = node["metadata"]["name"], node["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}
    return {"metadata": {"name": name, "labels": {LABEL_MANAGED_BY: MANAGED_BY}, "ownerReferences": [owner]}}
