"""The Secret with a service's bearer token: its name, its content, and its owner.

Pods read the token from the Secret itself; hosts get a copy of it (`controller.hosts.secrets`), and the readiness probe
sends it.
"""

import base64
from typing import Final

from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import child
from crds.inferenceservice import InferenceService
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, SECRETS, Resource

TOKEN_KEY: Final = "token"  # noqa: S105 - the name of a key


def token_name(service: str) -> str:
    """Return the name of the Secret with the bearer token of a service."""
    return f"{service}-token"


def token_secret(service: InferenceService, token: str) -> tuple[Resource, Obj]:
    """Return the Secret that holds the service's bearer token; it is created once and never applied."""
    owner = service.metadata
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    return child(SECRETS, token_name(owner.name), INFERENCE_SERVICES, owner, {}, type="Opaque", data=data)


def is_token_secret(secret: Obj, service_uid: str) -> bool:
    """Return whether the controller made this Secret for this service: another owner's Secret is never used."""
    owner = controller_of(secret)
    return owner is not None and owner["uid"] == service_uid
