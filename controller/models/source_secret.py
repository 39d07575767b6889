"""The Secret with the token of a Model's source: its owner has to give it to sources, by its type or by a label.

Whoever may create Models names the Secret and the server that gets its token. So a Secret that was made for something
else is refused, and the token of a ServiceAccount always is. The Docker configuration of an image pull Secret names the
registry of each login, so it goes to no other server; but it opens whatever its user may pull, so its owner has to
label it as well.
"""

from typing import Final, NamedTuple

from artifacts.repositories.registry_login import DOCKER_CONFIG_KEY, PASSWORD_KEY, TOKEN_KEY, USERNAME_KEY
from artifacts.repositories.s3_access import REQUIRED_VARIABLES
from artifacts.source import scheme_of
from controller.reconcile.conditions import condition, find
from crds.meta import GROUP
from crds.model import Model
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import SECRETS

TYPE: Final = f"{GROUP}/source"
"""Type of a Secret that was made for sources."""
LABEL: Final = f"{GROUP}/source"
"""Label with which the owner gives an Opaque Secret to sources; its value is "true"."""
ACCEPTED: Final = "SourceSecretAccepted"
"""Condition of a Model with a Secret."""
KEY: Final = TOKEN_KEY
DOCKER_CONFIG_TYPE: Final = "kubernetes.io/dockerconfigjson"
READ_AGAIN_SECONDS: Final = 15.0
"""Time within which a Secret that was created or labelled is noticed: Secrets are not watched."""


_LABELLED: Final = ("Opaque", DOCKER_CONFIG_TYPE)
"""Types that a label gives to sources."""


KeyAlternatives = tuple[tuple[str, ...], ...]
"""Sets of keys, one of which a Secret has to have."""


class SecretVerdict(NamedTuple):
    """The result of reading a Secret; `reason` and `message` explain a refusal."""

    accepted: bool
    reason: str = "Accepted"
    message: str = "the Secret is meant for sources"


def is_source_secret(secret: Obj) -> bool:
    """Return whether the token in a Secret may be sent to a source."""
    labels = secret["metadata"].get("labels") or {}
    kind = secret.get("type", "Opaque")
    return kind == TYPE or (kind in _LABELLED and labels.get(LABEL) == "true")


def required_keys(model: Model) -> KeyAlternatives:
    """Return the alternative sets of keys, one of which the Secret of a Model needs."""
    if scheme_of(model.spec.source) == "s3":
        return (REQUIRED_VARIABLES,)
    if scheme_of(model.spec.source) == "oci":
        return ((KEY,), (USERNAME_KEY, PASSWORD_KEY), (DOCKER_CONFIG_KEY,))
    return ((KEY,),)


def judge_secret(namespace: str, name: str, secret: Obj | None, required: KeyAlternatives = ((KEY,),)) -> SecretVerdict:
    """Decide whether a Secret may be sent to sources; the verdict explains what its owner can do.

    `secret` is None if there is none of this name, and `required` is the result of `required_keys`.
    """
    # The commands that the messages propose, with the first of the alternative sets of keys.
    field = f"spec.sourceSecretRef {name}"
    literals = " ".join(f"--from-literal={key}={_example(key)}" for key in required[0])
    create = f"kubectl -n {namespace} create secret generic NAME --type={TYPE} {literals}"

    # 1. It does not exist, or lacks keys.
    if secret is None:
        message = f"{field}: there is no such Secret: {create.replace('NAME', name)}"
        return SecretVerdict(accepted=False, reason="SecretNotFound", message=message)
    keys = (secret.get("data") or {}).keys()
    if not any(keys >= set(alternative) for alternative in required):
        added = ", ".join(f'"{key}": "{_example(key)}"' for key in required[0])
        patch = f"kubectl -n {namespace} patch secret {name} -p '{{\"stringData\": {{{added}}}}}'"
        missing = " and no ".join(" with ".join(f"`{key}`" for key in alternative) for alternative in required)
        message = f"{field}: the Secret has no key {missing}: {patch}"
        return SecretVerdict(accepted=False, reason="SecretNotFound", message=message)

    # 2. Its owner has given it to sources, by its type or by a label.
    if is_source_secret(secret):
        return SecretVerdict(accepted=True)

    # 3. Its owner has not. A label helps only if it is Opaque or a Docker configuration.
    kind = secret.get("type", "Opaque")
    if kind not in _LABELLED:
        message = f"{field}: a Secret of type {kind} is never sent to a source: name another one, made with: {create}"
        return SecretVerdict(accepted=False, reason="SecretRefused", message=message)
    message = (
        f"{field}: the Secret is not marked for sources, and its token would be sent to the server of spec.source: if "
        f"that is wanted: kubectl -n {namespace} label secret {name} {LABEL}=true"
    )
    return SecretVerdict(accepted=False, reason="SecretNotMarked", message=message)


async def read_verdict(client: Client, model: Model, *, has_work: bool = False) -> SecretVerdict | None:
    """Read the Secret of a Model and judge it; None if it was not read, because the Model has none or needs none now.

    It is needed for Jobs and hosts. Once it is accepted for this generation of a Model that is Ready, it is read again
    only if `has_work`: if a Job is due. Secrets are not watched. Raises as `Client`.
    """
    # 1. None if the Model has no Secret, or needs none now.
    reference, metadata = model.spec.source_secret_ref, model.metadata
    if reference is None:
        return None
    last = find(model.status.conditions, ACCEPTED)
    is_accepted = last is not None and last.status == "True" and last.observed_generation == metadata.generation
    if is_accepted and model.status.phase == "Ready" and not has_work:
        return None

    # 2. Read and judge it.
    try:
        secret: Obj | None = await client.get(SECRETS, reference.name, metadata.namespace)
    except Forbidden as error:
        message = f"spec.sourceSecretRef {reference.name}: the controller may not read it: {error.message}"
        return SecretVerdict(accepted=False, reason="SecretForbidden", message=message)
    except NotFound:
        secret = None
    return judge_secret(metadata.namespace, reference.name, secret, required_keys(model))


def list_conditions(model: Model, verdict: SecretVerdict | None) -> list[Obj]:
    """Return the condition about the Model's Secret, if it has one; without a verdict the last one stays."""
    if model.spec.source_secret_ref is None:
        return []
    if verdict is None:
        last = find(model.status.conditions, ACCEPTED)
        if last is None:
            return []
        verdict = SecretVerdict(last.status == "True", last.reason, last.message)
    accepted, reason, message = verdict
    return [condition(ACCEPTED, true=accepted, reason=reason, message=message, generation=model.metadata.generation)]


def _example(key: str) -> str:
    """Return the placeholder for a value in a command."""
    return "TOKEN" if key == KEY else key.removeprefix("AWS_")
