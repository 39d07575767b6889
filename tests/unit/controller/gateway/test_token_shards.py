"""The Secrets with copies of tokens for the gateway: when they are written, and what they have."""

import asyncio
import base64
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from controller.gateway.token_shards import OVERLAP_SECONDS, READ_SECONDS, TokenShards
from controller.reconcile.plan import FIELD_MANAGER, Leading
from controller.services.token_copies import MOST_TOKENS_BYTES
from controller.services.tokens import KnownTokens, token_secret
from crds.meta import GATEWAY_SHARDS, PREVIOUS_TOKENS_KEY, PreviousToken, gateway_shard, gateway_token_key
from kube.client import Client, Obj
from kube.errors import NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey, Resource
from tests.support import virtual_time
from tests.support.api_objects import NAMESPACE, NOW, as_service, service, store
from tests.support.background import running

SHARD = gateway_shard(NAMESPACE, "chat")
KEY = gateway_token_key(NAMESPACE, "chat")


class ShardWorld(Client):
    """An API with the Secrets of the gateway, and a leader that knows services and tokens.

    Attributes:
        secrets: the Secrets of the gateway.
        reads: number of Secrets that were read.
        writes: the Secrets that were written, by name.
        fails: no call succeeds.
    """

    def __init__(self, *names: str) -> None:
        self.store = store(*((INFERENCE_SERVICES, service(name)) for name in names or ("chat",)))
        self.tokens = KnownTokens()
        self.secrets: dict[str, Obj] = {}
        self.reads = 0
        self.writes: list[str] = []
        self.fails = False
        self.shards = TokenShards(self.store, self.tokens, self._read_clock)

    def _read_clock(self) -> datetime:
        return NOW + timedelta(seconds=asyncio.get_running_loop().time())

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, namespace) == (SECRETS, "pomona-system")
        self.reads += 1
        if self.fails:
            raise Unreachable("get: try again")
        if name not in self.secrets:
            raise NotFound("get", status=404)
        return self.secrets[name]

    async def apply(self, resource: Resource, obj: Mapping[str, Any], *, field_manager: str, **_: Any) -> Obj:
        assert (resource, field_manager) == (SECRETS, FIELD_MANAGER)
        if self.fails:
            raise Unreachable("apply: try again")
        name = obj["metadata"]["name"]
        self.writes.append(name)
        owned = {
            "f:metadata": {"f:labels": {f"f:{label}": {} for label in obj["metadata"]["labels"]}},
            "f:type": {},
            "f:data": {f"f:{key}": {} for key in obj["data"]},
        }
        entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": owned}
        self.secrets[name] = {**obj, "metadata": {**obj["metadata"], "managedFields": [entry]}}
        return self.secrets[name]

    def leads(self) -> Any:
        return running(self.shards.run(Leading(self, self.store, None, lambda *_: None)))  # type: ignore[arg-type]

    def learn(self, token: str, name: str = "chat") -> None:
        """Note a token as the reconciler of services does once it has read it."""
        _, secret = token_secret(as_service(service(name)), token)
        self.tokens.remember(SECRETS, secret)

    def copied(self, name: str = "chat") -> str | None:
        """Return the token of a service in its shard."""
        data = self.secrets.get(gateway_shard(NAMESPACE, name), {}).get("data", {})
        value = data.get(gateway_token_key(NAMESPACE, name))
        return base64.b64decode(value).decode() if value else None

    def previous(self) -> dict[str, PreviousToken]:
        data = self.secrets[SHARD]["data"]
        if PREVIOUS_TOKENS_KEY not in data:
            return {}
        return msgspec.json.decode(base64.b64decode(data[PREVIOUS_TOKENS_KEY]), type=dict[str, PreviousToken])


def in_virtual_time(test: Callable[[], Any]) -> None:
    virtual_time.run(test())


def test_token_is_copied_once_it_is_known() -> None:
    async def test() -> None:
        world = ShardWorld()
        async with world.leads():
            await asyncio.sleep(5)
            assert world.writes == []
            world.learn("first")
            await asyncio.sleep(2)
            assert (world.copied(), world.writes) == ("first", [SHARD])
            assert world.secrets[SHARD]["type"] == "Opaque"
            world.learn("first")
            await asyncio.sleep(100)
            assert world.writes == [SHARD]

    in_virtual_time(test)


def test_replaced_token_stays_beside_its_successor_for_a_day() -> None:
    async def test() -> None:
        world = ShardWorld()
        async with world.leads():
            world.learn("first")
            await asyncio.sleep(2)
            world.learn("second")
            await asyncio.sleep(2)
            assert world.copied() == "second"
            assert [base64.b64decode(token.token) for token in world.previous().values()] == [b"first"]
            await asyncio.sleep(OVERLAP_SECONDS - 10)
            assert world.previous().keys() == {KEY}
            await asyncio.sleep(READ_SECONDS + 10)
            assert (world.previous(), world.copied()) == ({}, "second")

    in_virtual_time(test)


def test_new_leader_keeps_the_tokens_that_it_does_not_know_yet() -> None:
    async def test() -> None:
        names = [f"service-{number}" for number in range(100)]
        before = ShardWorld(*names)
        async with before.leads():
            for name in names:
                before.learn(name, name)
            await asyncio.sleep(2)
        world = ShardWorld(*names)
        world.secrets = before.secrets
        async with world.leads():
            world.learn("changed", names[0])
            await asyncio.sleep(5)
            assert world.writes == [gateway_shard(NAMESPACE, names[0])]
            assert [world.copied(name) for name in names] == ["changed", *names[1:]]

    in_virtual_time(test)


def test_token_of_a_deleted_service_goes() -> None:
    async def test() -> None:
        world = ShardWorld("chat", "code")
        async with world.leads():
            world.learn("first")
            world.learn("second", "code")
            await asyncio.sleep(2)
            world.store.remove(INFERENCE_SERVICES, NAMESPACE, "chat")
            world.tokens.forget(ObjectKey(NAMESPACE, "chat"))
            await asyncio.sleep(2)
            assert (world.copied("chat"), world.copied("code")) == (None, "second")

    in_virtual_time(test)


def test_changes_of_a_second_are_one_write_of_each_shard() -> None:
    async def test() -> None:
        names = [f"service-{number}" for number in range(2000)]
        world = ShardWorld(*names)
        async with world.leads():
            await asyncio.sleep(2)
            for name in names:
                world.learn(name, name)
            await asyncio.sleep(3)
            assert sorted(world.writes) == sorted(GATEWAY_SHARDS)
            assert all(world.copied(name) == name for name in names)
            assert max(len(str(secret)) for secret in world.secrets.values()) < 100_000

    in_virtual_time(test)


def test_shard_that_was_edited_or_deleted_is_written_again() -> None:
    async def test() -> None:
        world = ShardWorld()
        async with world.leads():
            world.learn("first")
            await asyncio.sleep(2)
            del world.secrets[SHARD]
            await asyncio.sleep(READ_SECONDS + 10)
            assert world.copied() == "first"
            assert world.reads <= 3 * len(GATEWAY_SHARDS)

    in_virtual_time(test)


def test_failed_write_is_tried_again() -> None:
    async def test() -> None:
        world = ShardWorld()
        async with world.leads():
            await asyncio.sleep(2)
            world.fails = True
            world.learn("first")
            await asyncio.sleep(60)
            assert world.reads < 100
            world.fails = False
            await asyncio.sleep(2)
            assert world.copied() == "first"

    in_virtual_time(test)


def test_huge_tokens_crowd_out_no_others() -> None:
    async def test() -> None:
        names = [
            name for name in (f"service-{number}" for number in range(500)) if gateway_shard(NAMESPACE, name) == SHARD
        ]
        world = ShardWorld("chat", *names)
        async with world.leads():
            for name in names:
                world.learn("x" * 8000, name)
            world.learn("first")
            await asyncio.sleep(2)
            assert world.copied() == "first"
            sizes = [len(value) for value in world.secrets[SHARD]["data"].values()]
            assert sum(sizes) <= MOST_TOKENS_BYTES

    in_virtual_time(test)


def test_names_of_shards_and_keys_are_what_the_gateway_expects() -> None:
    """A change of them would leave the gateways of the former release without tokens."""
    assert {(name, gateway_shard("team", name)) for name in ("chat", "code")} == {
        ("chat", "pomona-gateway-6"),
        ("code", "pomona-gateway-4"),
    }
    assert gateway_token_key("team", "chat") == "team_chat_token"
    assert set(GATEWAY_SHARDS) == {gateway_shard("team", f"service-{number}") for number in range(200)}


def test_token_of_a_former_service_of_the_name_is_not_known() -> None:
    tokens = KnownTokens()
    tokens.remember(SECRETS, token_secret(as_service(service("chat")), "first")[1])
    assert tokens.known_token(ObjectKey(NAMESPACE, "chat"), "uid-former") is None
    assert tokens.known_token(ObjectKey(NAMESPACE, "chat"), "uid-chat") is not None
