"""The tokens in a host's Secret, and those that they replaced."""

import base64
import json

import pytest

from controller.services.token_copies import keep_previous_tokens
from crds.meta import HOSTS_NAMESPACE, PreviousToken, host_secret_key
from kube.resources import SECRETS
from kube.store import Store
from metal_agent.cluster.host_tokens import HostTokens
from tests.support.api_objects import NOW

KEY = host_secret_key("team", "chat-token")


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def tokens(data: dict[str, str]) -> HostTokens:
    store = Store()
    metadata = {"name": "studio-1", "namespace": HOSTS_NAMESPACE, "uid": "u", "resourceVersion": "1"}
    store.put(SECRETS, {"metadata": metadata, "data": data})
    return HostTokens(store, "studio-1", {})


def test_token_that_the_controller_replaced_is_read() -> None:
    host_tokens = tokens(keep_previous_tokens({KEY: encode("new")}, [KEY], {KEY: encode("old")}, NOW))
    assert host_tokens.read("team", "chat-token") == "new"
    assert host_tokens.read_previous("team", "chat-token") == PreviousToken("old", int(NOW.timestamp()) + 600)
    assert host_tokens.read_previous("team", "other-token") is None


@pytest.mark.parametrize(
    "previous",
    ["", encode("{"), encode("[]"), encode(json.dumps({KEY: {"token": "!", "validUntil": 1}})), encode("{}"), "!"],
)
def test_unreadable_previous_token_is_none(previous: str) -> None:
    host_tokens = tokens({KEY: encode("new"), "previous_tokens": previous})
    assert host_tokens.read("team", "chat-token") == "new"
    assert host_tokens.read_previous("team", "chat-token") is None
