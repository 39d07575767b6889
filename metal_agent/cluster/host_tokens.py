"""The tokens that this host needs: the data of its Secret, to which the controller copies them."""

import base64
import binascii
from collections.abc import Mapping

import msgspec

from crds.meta import HOSTS_NAMESPACE, PREVIOUS_TOKENS_KEY, PreviousToken, host_secret_key
from kube.resources import SECRETS
from kube.store import Store


class HostTokens:
    """The tokens of `host`, from `store`; `last_known` is the data of its Secret until the store has it."""

    def __init__(self, store: Store, host: str, last_known: Mapping[str, str]) -> None:
        self._store = store
        self._host = host
        self._last_known = dict(last_known)

    def read(self, namespace: str, name: str) -> str | None:
        """Return the token of Secret `namespace/name`, by its copy in the host's Secret, the only one it may read.

        None if the copy has not arrived, is empty or cannot be read.
        """
        try:
            token = self.data()[host_secret_key(namespace, name)]  # from the host's Secret
            return base64.b64decode(token, validate=True).decode().strip() or None
        except (KeyError, binascii.Error, UnicodeDecodeError):
            return None

    def read_previous(self, namespace: str, name: str) -> PreviousToken | None:
        """Return the token that the one in Secret `namespace/name` replaced, decoded; None if there is none.

        All replaced tokens are in one key of the host's Secret: JSON, with one entry for each Secret of a service. Like
        every value of a Secret it is base64, and so is each token in it.
        """
        try:
            encoded = base64.b64decode(self.data()[PREVIOUS_TOKENS_KEY], validate=True)
            previous = msgspec.json.decode(encoded, type=dict[str, PreviousToken])[host_secret_key(namespace, name)]
            token = base64.b64decode(previous.token, validate=True).decode().strip()
        except (KeyError, binascii.Error, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return PreviousToken(token, previous.valid_until) if token else None

    def data(self) -> dict[str, str]:
        """Return the data of the host's Secret; while there is none, the last data, since that revokes no token."""
        if secret := self._store.get(SECRETS, self._host, HOSTS_NAMESPACE):
            self._last_known = secret.get("data") or {}
        return self._last_known
