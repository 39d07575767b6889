"""The tokens that this host needs: the data of its Secret, to which the controller copies them."""

import base64
import binascii
from collections.abc import Mapping

from crds.meta import HOSTS_NAMESPACE, host_secret_key
from kube.resources import SECRETS
from kube.store import Store


class HostTokens:
    """The tokens of `host`, from `store`; `last_known` is the data of its Secret until the store has it."""

    def __init__(self, store: Store, host: str, last_known: Mapping[str, str]) -> None:
        self._store = store
        self._host = host
        self._last_known = dict(last_known)

    def read(self, namespace: str, name: str) -> str | None:
        """Return the token in Secret `namespace/name`; None if it has not arrived or cannot be read."""
        try:
            token = self.data()[host_secret_key(namespace, name)]
            return base64.b64decode(token, validate=True).decode().strip() or None
        except (KeyError, binascii.Error, UnicodeDecodeError):
            return None

    def data(self) -> dict[str, str]:
        """Return the data of the host's Secret, or the last data without one: a missing Secret revokes no token."""
        if secret := self._store.get(SECRETS, self._host, HOSTS_NAMESPACE):
            self._last_known = secret.get("data") or {}
        return self._last_known
