"""Options of a user for the pods of a service: environment, volumes, placement and pull secrets of spec.pod.

Whoever may create InferenceServices may not need to be trusted with pods. So an option opens no Secret, no file of a
node and no ServiceAccount, and replaces nothing that Pomona sets itself; a user's volume never has the name of ours.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from controller.services.pods.devices import build_node_affinity
from crds.inferenceservice import InferenceService
from crds.meta import LABEL_SERVICE
from crds.pods import PodOptions, PodVolume, PodVolumeMount, SpreadConstraint
from crds.quantity import write_quantity
from devices.vendors import Vendor
from kube.client import Obj
from runtimes.pod import RESERVED_FOLDERS, find_overlap, refuse_device_variables

_USERS: Final = "user-"
"""Prefix of the names of a user's volumes in the pod."""
_RESERVED: Final = ("/models", "/parts", *RESERVED_FOLDERS)
"""Folders that Pomona, or the container runtime, mounts or may mount."""
_WEIGHTS_CLAIM: Final = re.compile(r".+-cache(-[0-9a-f]{8})?")
"""Names of the claims that Models make. Such a claim may be made later than the service that mounts it."""
_DEFAULT_SPREAD: Final = (SpreadConstraint(topology_key="kubernetes.io/hostname"),)
"""A preference that costs a single replica nothing; if it came with the second replica, the first would restart."""
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def add_options(pod: Obj, service: InferenceService, vendor: Vendor, unfit: Sequence[str] = ()) -> Obj:
    """Return the spec of a pod with the options of the service; its first container is the engine's.

    `unfit` are the architectures of devices on which the engine cannot serve the weights.
    """
    spec, options = service.spec, service.spec.pod
    engine, *others = pod["containers"]
    added: Obj = {}  # fields of the pod

    # 1. The engine gets the variables and mounts.
    if options.env:
        engine = {**engine, "env": [*engine.get("env", ()), *map(msgspec.to_builtins, options.env)]}
    if options.volume_mounts:
        mounts = [_render_mount(mount) for mount in options.volume_mounts]
        engine = {**engine, "volumeMounts": [*engine.get("volumeMounts", ()), *mounts]}

    # 2. The pod gets all else.
    if options.volumes:
        added["volumes"] = [*pod.get("volumes", ()), *(_render_volume(volume) for volume in options.volumes)]
    if options.image_pull_secrets:
        added["imagePullSecrets"] = msgspec.to_builtins(options.image_pull_secrets)
    if affinity := _merge_affinity(build_node_affinity(spec.hardware, vendor, unfit) or {}, options):
        added["affinity"] = affinity
    if runtime_class := options.runtime_class_name or vendor.runtime_class:
        added["runtimeClassName"] = runtime_class
    if options.scheduler_name:
        added["schedulerName"] = options.scheduler_name

    # None: the default, which spreads the pods over nodes. Empty: the user wants no spread.
    spread = options.topology_spread_constraints
    if constraints := [
        _render_spread(constraint, service) for constraint in (_DEFAULT_SPREAD if spread is None else spread)
    ]:
        added["topologySpreadConstraints"] = constraints

    return {**pod, **added, "containers": [engine, *others]}


def pin_to_node(pod: Obj, node: str) -> Obj:
    """Return the spec of a pod that runs on this node, if the node meets all other requirements of the pod."""
    affinity = pod.get("affinity", {})
    nodes = affinity.get("nodeAffinity", {})
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    stated = nodes.get(_REQUIRED, {}).get("nodeSelectorTerms", [])
    # Terms are alternatives. An empty one matches no node, and with the name it would match this one.
    terms = [
        {**term, "matchFields": [*term.get("matchFields", ()), *fields]} if any(term.values()) else term
        for term in stated
    ]
    required = {"nodeSelectorTerms": terms or [{"matchFields": fields}]}
    return {**pod, "affinity": {**affinity, "nodeAffinity": {**nodes, _REQUIRED: required}}}


def find_option_problem(options: PodOptions, pod: Obj) -> str | None:
    """Return the first option that a pod cannot have, with the way out, or None.

    Args:
        options: those of the service.
        pod: the spec of its pod without them.
    """
    # 1. No variable may replace one of ours, or give a container devices.
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    our_variables = {variable["name"] for container in containers for variable in container.get("env", ())}
    for variable in options.env:
        if variable.name in our_variables:
            return f"pod.env {variable.name} is set by Pomona: remove it, and use the field of the service instead"
    if device_problem := refuse_device_variables("pod.env", options.env):
        return device_problem

    # 2. No volume may be a claim with weights.
    for volume in options.volumes:
        claim = volume.persistent_volume_claim
        # _WEIGHTS_CLAIM matches the names of the claims that Models make.
        if claim is not None and _WEIGHTS_CLAIM.fullmatch(claim.claim_name):
            return (
                f"pod.volumes {volume.name} is claim {claim.claim_name}, and claims whose names end in -cache, or in "
                "-cache- and 8 hexadecimal digits, hold the verified weights of Models: name the Model in modelRef, or "
                "mount a claim with another name"
            )

    # 3. Each mount must name a volume of the user, and be beside the folders in use.
    volume_names = {volume.name for volume in options.volumes}
    used_paths = [
        *_RESERVED,
        *(mount["mountPath"] for container in containers for mount in container.get("volumeMounts", ())),
    ]
    for mount in options.volume_mounts:
        if mount.name not in volume_names:
            return (
                f"pod.volumeMounts {mount.mount_path} has volume {mount.name}, which pod.volumes does not have: add it"
            )
        if used_path := find_overlap(mount.mount_path, used_paths):
            return (
                f"pod.volumeMounts {mount.mount_path} overlaps {used_path}, which Pomona or the container runtime "
                "uses: choose another mountPath"
            )
    return None


def _render_volume(volume: PodVolume) -> Obj:
    """Return a user's volume with the name that it has in the pod."""
    rendered: Obj = {"name": f"{_USERS}{volume.name}"}  # _USERS: a prefix, so that it is never a name of ours
    if volume.empty_dir is not None:
        limit = volume.empty_dir.size_limit
        size_limit = {} if limit is None else {"sizeLimit": write_quantity(limit)}
        rendered["emptyDir"] = msgspec.to_builtins(volume.empty_dir) | size_limit
    if volume.persistent_volume_claim is not None:
        rendered["persistentVolumeClaim"] = msgspec.to_builtins(volume.persistent_volume_claim)
    if volume.config_map is not None:
        rendered["configMap"] = msgspec.to_builtins(volume.config_map)
    return rendered


def _render_mount(mount: PodVolumeMount) -> Obj:
    return {**msgspec.to_builtins(mount), "name": f"{_USERS}{mount.name}"}


def _render_spread(constraint: SpreadConstraint, service: InferenceService) -> Obj:
    """Return a topologySpreadConstraint over the pods of the service's present template."""
    return {
        "topologyKey": constraint.topology_key,
        "maxSkew": constraint.max_skew,
        "whenUnsatisfiable": constraint.when_unsatisfiable,
        "labelSelector": {"matchLabels": {LABEL_SERVICE: service.metadata.name}},
        # The pods of the earlier template end soon, and their places are no reason for the new ones.
        "matchLabelKeys": ["pod-template-hash"],
    }


def _merge_affinity(hardware: Obj, options: PodOptions) -> Obj:
    """Return the user's affinity, with the node affinity that the hardware needs.

    Required terms are alternatives, so what the hardware demands is added to each of them. Preferences are joined.
    """
    stated: Obj = msgspec.to_builtins(options.affinity) if options.affinity is not None else {}
    of_hardware, of_user = hardware.get("nodeAffinity", {}), stated.get("nodeAffinity", {})
    merged: Obj = {}  # the node affinity

    # 1. What the hardware demands is added to each alternative of the user.
    demanded: list[Any] = [
        expression
        for term in of_hardware.get(_REQUIRED, {}).get("nodeSelectorTerms", ())
        for expression in term["matchExpressions"]
    ]

    # Terms are alternatives. An empty one of the user matches no node, and must stay empty.
    terms = [
        {**term, "matchExpressions": [*term.get("matchExpressions", ()), *demanded]} if term else term
        for term in of_user.get(_REQUIRED, {}).get("nodeSelectorTerms") or ()
    ]
    if demanded and not terms:
        terms = [{"matchExpressions": demanded}]
    if terms:
        merged[_REQUIRED] = {"nodeSelectorTerms": terms}

    # 2. Preferences are joined.
    if preferred := [*of_hardware.get(_PREFERRED, ()), *of_user.get(_PREFERRED, ())]:
        merged[_PREFERRED] = preferred

    affinity = {**stated, "nodeAffinity": merged}
    return {kind: value for kind, value in affinity.items() if value}
