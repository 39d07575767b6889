"""The works of a Model as data: the artifact to inspect or to fetch, the volume, and the path on it.

Pods that serve find the weights at the same path; hosts find them by the same revision and checksum.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, Literal

import msgspec

from artifacts.repositories.s3_access import OPTIONAL_VARIABLES, REQUIRED_VARIABLES
from artifacts.source import HUB_TOKEN_VARIABLE, TOKEN_VARIABLE, parse, scheme_of
from controller.models.jobs import ANYWHERE, Placement, Reservation, SecretVariable, Work
from controller.models.served import accelerator_of, is_mounted_image, own_claim, select_nodes, weights_path
from controller.pod_settings import PodSettings, allowed_tolerations
from controller.reconcile.plan import child
from crds.inferenceservice import InferenceService
from crds.meta import GROUP, LABEL_MODEL, Toleration
from crds.model import Model, ModelFacts
from crds.quantity import write_quantity
from crds.size import MIB, divide_up
from kube.client import Obj
from kube.kinds import PersistentVolumeClaim
from kube.resources import MODELS, PVCS, Resource

MODELS_PATH: Final = "/models"
"""Mount path of the volume, in the pods that fetch and in those that serve."""
WEIGHTS: Final = f"{GROUP}/weights"
"""Annotation of a claim: path of the weights that it is for."""
SPARE_MIB: Final = 16
"""Space that the file system of a small volume needs."""
INSPECT_SECONDS: Final = 600
"""A header is read in seconds; the rest is for pulling the image. An attempt on a server that hangs ends after this."""
SETTLING_SECONDS: Final = 2.0
"""A volume that binds by itself does so within this time; any other waits for its first pod."""


def read_facts(model: Model) -> ModelFacts:
    """Return the facts in the status of a Model."""
    return msgspec.convert(model.status, ModelFacts, from_attributes=True)


def take_answer(model: Model, answer: ModelFacts) -> ModelFacts:
    """Return the result of an inspection, with the checksum that the user states if it found none."""
    facts = msgspec.convert(answer, ModelFacts, from_attributes=True)
    return msgspec.structs.replace(facts, sha256=facts.sha256 or model.spec.sha256 or "")


def take_fetched(facts: ModelFacts, answer: ModelFacts) -> ModelFacts:
    """Return the facts with header, layout and format as the fetch has read them."""
    return msgspec.structs.replace(facts, gguf=answer.gguf, layout=answer.layout, format=answer.format or facts.format)


def keep_fetched(facts: ModelFacts, model: Model) -> ModelFacts:
    """Return the facts with header and layout as the status has them since a fetch, if the revision is the same.

    `facts` are those of the inspection, which may be a later one of the same revision.
    """
    status = model.status
    if status.revision != facts.revision:
        return facts
    return msgspec.structs.replace(facts, gguf=status.gguf, layout=status.layout)


def prepare_inspection(
    model: Model,
    settings: PodSettings,
    *,
    placement: Placement = ANYWHERE,
    last_checked: str = "",
) -> Work:
    """Return the work that reads the artifact's header.

    What decides its result is its identity: a change of that is another work, so that another Job does it.
    `last_checked`, the time of the last check of a source that may move, is a part of it: each check is another work.
    """
    # The arguments of `pomona inspect`.
    spec, claim = model.spec, own_claim(model)
    args = ["--sha256", spec.sha256] if spec.sha256 else []
    if is_mounted_image(model):
        args.append("--image-volume")
    elif claim:  # the user's own, which is mounted
        args += ["--file-root", MODELS_PATH]

    # The other fields of a work may change without another Job.
    identity = [model.metadata.uid, spec.source, spec.sha256 or "", _secret_name(model), *spec.files]
    if last_checked:
        identity.append(f"look={last_checked}")
    return msgspec.structs.replace(
        _prepare_work(model, settings, "inspect", identity, args),
        claim=claim,
        placement=placement,
        # No deadline for the user's own claim: it may be created later, and there is no server that could hang.
        deadline_seconds=None if claim else INSPECT_SECONDS,
    )


def _prepare_work(
    model: Model, settings: PodSettings, verb: Literal["inspect", "fetch"], identity: Sequence[str], args: Sequence[str]
) -> Work:
    """Return a work with all that inspection and fetch have in common: image, credentials, source and mirrors.

    Args:
        model: the Model.
        settings: options of the controller.
        verb: the command of `pomona` that does it.
        identity: the values that tell this work from others; the mirrors are added behind them. Their order must stay,
            because names of Jobs are made of them.
        args: arguments of the command, beside the source and its mirrors.
    """
    # The Secret of a registry is mounted as a login; that of any other source gives environment variables.
    spec, is_image = model.spec, scheme_of(model.spec.source) == "oci"
    secret = _secret_name(model) or None
    mirrors = tuple(argument for mirror in spec.mirrors for argument in ("--mirror", mirror))
    patterns = [f"--files={pattern}" for pattern in spec.files]
    return Work(
        owner=model.metadata,
        verb=verb,
        identity=(*identity, *mirrors),
        arguments=(spec.source, *patterns, *mirrors, *args),
        image=settings.image,
        image_pull_secrets=settings.image_pull_secrets,
        environment=settings.environment,
        token_secret=None if is_image else secret,
        secret_variables=_secret_variables(model),
        login_secret=secret if is_image else None,
    )


def prepare_fetch(
    model: Model,
    facts: ModelFacts,
    claim: PersistentVolumeClaim,
    placement: Placement,
    settings: PodSettings,
    *,
    reservation: Reservation | None = None,
    holds_devices: bool = False,
) -> Work:
    """Return the work that downloads the weights to the volume of `claim`; its pod may be the first one of the volume.

    Args:
        model: the Model.
        facts: what the inspection has found.
        claim: the claim.
        placement: labels of its node, and the taints that it tolerates.
        settings: options of the controller.
        reservation: None for the Model's one volume: then another placement makes another work. For a copy on a node,
            what the Job asks of the node; it does not make another work.
        holds_devices: of the two works for a copy (`node_copies.py`), this is the one whose Job asks for devices.
    """
    path = weights_path(model.spec.source, facts.revision, facts.file, tuple(model.spec.files))

    # The arguments of `pomona fetch`. The size is stated of a single file only: which files of a repository are fetched
    # may differ from one version to the next.
    revision = ("--revision", facts.revision) if facts.revision else ()
    is_single_file = facts.size_bytes is not None and not parse(model.spec.source, model.spec.files).has_listing
    sized = ("--size-bytes", str(facts.size_bytes)) if is_single_file else ()
    verified = ("--sha256", facts.sha256) if facts.sha256 else ()
    folder = f"{MODELS_PATH}/{path.partition('/')[0]}"  # the first part of the path

    # A claim of another uid is an empty volume, and a Job's placement cannot change: either makes another fetch.
    identity = [path, facts.sha256, claim.metadata.uid, _secret_name(model)]
    if reservation is None:
        identity.append(msgspec.json.encode(placement).decode())
    elif holds_devices:
        identity.append("devices")
    return msgspec.structs.replace(
        _prepare_work(model, settings, "fetch", identity, (*revision, *sized, "--to", folder, *verified)),
        claim=claim.metadata.name,
        storage_class=claim.spec.storage_class_name or "",
        placement=placement,
        reservation=reservation or Reservation(),
    )


def place_fetch(model: Model, consumer: InferenceService | None, settings: PodSettings) -> Placement:
    """Return the placement of the consumer's pods: the fetch must tolerate the same taints and reach the same volume.

    Without a consumer, it is on any node.
    """
    if consumer is None:
        return Placement()
    spec = consumer.spec
    allowed = allowed_tolerations(spec.tolerations, settings.limits)
    tolerations = (*settings.vendors[accelerator_of(consumer, model)].tolerations, *allowed)
    selected = select_nodes(consumer, model, settings.vendors)
    return Placement(selected, tuple(msgspec.to_builtins(toleration) for toleration in tolerations))


def place_inspection(
    model: Model,
    consumer: InferenceService | None,
    find_undecided: Callable[[], InferenceService | None],
    settings: PodSettings,
) -> Placement:
    """Return the placement of an inspection: it tolerates the taints of the nodes where the Model will be served.

    These are the taints that pods of the `consumer` tolerate; without a consumer, those of the Model's accelerator; or
    those of all accelerators, and those that the service states, if `find_undecided` returns one whose accelerator is
    chosen after the inspection.
    Nodes are selected only if the weights are on the user's own claim, whose volume some nodes may not reach.
    """
    if consumer is not None:
        placement = place_fetch(model, consumer, settings)
        return placement if own_claim(model) else Placement(tolerations=placement.tolerations)

    # The vendors of accelerators whose taints it tolerates: that of the Model's, or all.
    vendor = settings.vendors.get(model.spec.hardware.accelerator)
    vendors = [vendor] if vendor is not None else []
    stated: list[Toleration] = []
    if (undecided := find_undecided()) is not None:
        vendors = list(settings.vendors.values())
        stated = allowed_tolerations(undecided.spec.tolerations, settings.limits)
    tolerations = [toleration for vendor in vendors for toleration in vendor.tolerations] + stated
    return Placement(tolerations=tuple(msgspec.to_builtins(toleration) for toleration in tolerations))


def new_claim(model: Model, facts: ModelFacts, name: str, path: str) -> tuple[Resource, Obj]:
    """Return the claim of this name for the weights at `path`, with the size that the user states or one that fits."""
    cache = model.spec.cache
    size = sufficient_size(facts) if cache.size is None else write_quantity(cache.size)
    spec: Obj = {"accessModes": [cache.access_mode], "resources": {"requests": {"storage": size}}}
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    labels = {LABEL_MODEL: model.metadata.name}
    resource, claim = child(PVCS, name, MODELS, model.metadata, labels, spec=spec)
    claim["metadata"]["annotations"] = {WEIGHTS: path}
    return resource, claim


def sufficient_size(facts: ModelFacts) -> str:
    """Return a size that is large enough for the weights and one tenth more, as a Kubernetes quantity."""
    needed_mib = divide_up((facts.size_bytes or 0) * 11, 10 * MIB)
    return f"{needed_mib + SPARE_MIB}Mi"


def is_settling(claim: PersistentVolumeClaim, now: datetime) -> bool:
    """Return whether a new claim may still bind by itself; the scheduler would back off from a pod created before."""
    age = (now - datetime.fromisoformat(claim.metadata.creation_timestamp)).total_seconds()
    return not claim.is_bound and 0 <= age < SETTLING_SECONDS


def _secret_name(model: Model) -> str:
    """Return the name of the Secret of a Model's source; empty if it has none."""
    return model.spec.source_secret_ref.name if model.spec.source_secret_ref else ""


def _secret_variables(model: Model) -> tuple[SecretVariable, ...]:
    """Return the environment variables by which `pomona` gets the credentials of the Model's source."""
    if scheme_of(model.spec.source) == "s3":
        required = (SecretVariable(name, name) for name in REQUIRED_VARIABLES)
        return (*required, *(SecretVariable(name, name, optional=True) for name in OPTIONAL_VARIABLES))
    variable = HUB_TOKEN_VARIABLE if scheme_of(model.spec.source) == "hf" else TOKEN_VARIABLE
    return (SecretVariable(variable, "token"),)
