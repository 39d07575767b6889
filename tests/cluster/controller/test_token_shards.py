"""The Secrets of the gateway on a real control plane: they follow the tokens of services."""

import base64

import msgspec
import pytest

from controller.services.tokens import token_name
from crds.meta import (
    CONTROLLER_NAMESPACE,
    PREVIOUS_TOKENS_KEY,
    ROTATE_TOKEN,
    PreviousToken,
    gateway_shard,
    gateway_token_key,
)
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import INFERENCE_SERVICES, MODELS, SECRETS
from tests.cluster.shared_controller import SharedController
from tests.support.eventually import eventually


class ShardedNamespace:
    """One namespace with services, and the copies of their tokens."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def make_services(self, *names: str) -> None:
        metadata = {"name": "tiny", "namespace": self.namespace}
        await self.client.create(MODELS, {"metadata": metadata, "spec": {"source": "file:///m.gguf", "memoryBytes": 1}})
        for name in names:
            spec = {"modelRef": "tiny", "replicas": 0}
            await self.client.create(INFERENCE_SERVICES, {"metadata": metadata | {"name": name}, "spec": spec})

    async def token(self, name: str) -> str:
        """Return the token of a service."""
        secret = await self.client.get(SECRETS, token_name(name), self.namespace)
        return base64.b64decode(secret["data"]["token"]).decode()

    async def shard(self, name: str) -> Obj:
        """Return the data of the shard of a service."""
        shard = gateway_shard(self.namespace, name)
        data: Obj = (await self.client.get(SECRETS, shard, CONTROLLER_NAMESPACE)).get("data") or {}
        return data

    async def copies(self, name: str) -> tuple[str | None, str | None]:
        """Return the token of a service in its shard, and the one that it has replaced."""
        data, key = await self.shard(name), gateway_token_key(self.namespace, name)
        previous = base64.b64decode(data.get(PREVIOUS_TOKENS_KEY, "")) or b"{}"
        replaced = msgspec.json.decode(previous, type=dict[str, PreviousToken]).get(key)
        tokens = (data.get(key), replaced.token if replaced else None)
        token, former = (base64.b64decode(text).decode() if text else None for text in tokens)
        return token, former


@pytest.fixture
async def services(client: Client, namespace: str, shared_controller: SharedController) -> ShardedNamespace:
    await shared_controller.lend("--gateway")
    return ShardedNamespace(client, namespace)


async def test_shards_follow_the_tokens_of_services(
    services: ShardedNamespace, shared_controller: SharedController
) -> None:
    names = [f"chat-{number}" for number in range(12)]
    await services.make_services(*names)

    async def all_are_copied() -> dict[str, str]:
        tokens = {name: await services.token(name) for name in names}
        assert {name: (await services.copies(name))[0] for name in names} == tokens
        return tokens

    tokens = await eventually(all_are_copied)
    assert len({gateway_shard(services.namespace, name) for name in names}) > 1

    rotate = [{"op": "add", "path": "/metadata/annotations", "value": {ROTATE_TOKEN: "monday"}}]
    await services.client.patch_json(INFERENCE_SERVICES, names[0], services.namespace, rotate)

    async def is_replaced() -> bool:
        token = await services.token(names[0])
        return token != tokens[names[0]] and await services.copies(names[0]) == (token, tokens[names[0]])

    await eventually(is_replaced)

    await services.client.delete(INFERENCE_SERVICES, names[1], services.namespace)

    async def is_gone() -> bool:
        return gateway_token_key(services.namespace, names[1]) not in await services.shard(names[1])

    assert await eventually(is_gone)
    assert (await services.copies(names[2]))[0] == tokens[names[2]]

    # A new leader makes a shard anew that was deleted.
    await services.client.delete(SECRETS, gateway_shard(services.namespace, names[3]), CONTROLLER_NAMESPACE)
    await shared_controller.lend_new("--gateway")

    async def is_made_anew() -> bool:
        return (await services.copies(names[3]))[0] == tokens[names[3]]

    assert await eventually(is_made_anew)


async def test_controller_without_a_gateway_copies_no_token(
    services: ShardedNamespace, shared_controller: SharedController
) -> None:
    await shared_controller.lend()
    await services.make_services("chat")

    async def has_token() -> str:
        return await services.token("chat")

    assert await eventually(has_token)
    try:
        data = await services.shard("chat")
    except NotFound:
        return
    assert gateway_token_key(services.namespace, "chat") not in data
