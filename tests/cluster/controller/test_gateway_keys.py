"""GatewayKeys on a real control plane: the controller as its own ServiceAccount makes, replaces and withdraws keys."""

import base64
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from crds.gatewaykey import digest_key
from crds.meta import ROTATE_KEY
from kube.client import Client, Obj
from kube.errors import NotFound
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, MODELS, SECRETS
from kube.time import rfc3339
from tests.cluster.shared_controller import SharedController
from tests.support.eventually import eventually


class KeyNamespace:
    """One namespace, as a user handles it."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def make(self, name: str = "app", **spec: Any) -> None:
        metadata = {"name": name, "namespace": self.namespace}
        await self.client.create(GATEWAY_KEYS, {"metadata": metadata, "spec": spec})

    async def make_service(self, name: str = "chat", **spec: Any) -> None:
        spec = {"modelRef": "tiny", "replicas": 0, **spec}
        metadata = {"name": name, "namespace": self.namespace}
        await self.client.create(INFERENCE_SERVICES, {"metadata": metadata, "spec": spec})

    async def edit(self, name: str = "app", *, rotate: str | None = None, **spec: Any) -> None:
        operations = [{"op": "add", "path": f"/spec/{field}", "value": value} for field, value in spec.items()]
        if rotate is not None:
            operations.append({"op": "add", "path": "/metadata/annotations", "value": {ROTATE_KEY: rotate}})
        await self.client.patch_json(GATEWAY_KEYS, name, self.namespace, operations)

    async def secret(self, name: str = "app") -> Obj:
        return await self.client.get(SECRETS, f"{name}-key", self.namespace)

    async def text(self, name: str = "app") -> str:
        """Return the key in the Secret."""
        return base64.b64decode((await self.secret(name))["data"]["key"]).decode()

    async def put(self, text: str, name: str = "app") -> None:
        """Put a key into the Secret, as its user does."""
        operation = {"op": "add", "path": "/data/key", "value": base64.b64encode(text.encode()).decode()}
        await self.client.patch_json(SECRETS, f"{name}-key", self.namespace, [operation])

    async def reaches(self, reason: str, name: str = "app") -> Obj:
        """Wait until the present spec of a key has this reason, and return the status."""

        async def has_reached() -> Obj:
            key = await self.client.get(GATEWAY_KEYS, name, self.namespace)
            status: Obj = key.get("status", {})
            (ready,) = status["conditions"]
            assert ready["observedGeneration"] == key["metadata"]["generation"]
            assert ready["reason"] == reason, ready
            return status

        return await eventually(has_reached)

    async def has_digests(self, valid: str, *previous: str, name: str = "app") -> Obj:
        """Wait until the gateway accepts exactly these keys, of which the first is in the Secret."""

        async def has_them() -> Obj:
            status: Obj = (await self.client.get(GATEWAY_KEYS, name, self.namespace))["status"]
            digests = [status["digest"], *(entry["digest"] for entry in status.get("previous", ()))]
            assert digests == [digest_key(text) for text in (valid, *previous)]
            return status

        return await eventually(has_them)


@pytest.fixture
async def keys(client: Client, namespace: str, shared_controller: SharedController) -> KeyNamespace:
    await shared_controller.lend("--gateway")
    keys = KeyNamespace(client, namespace)
    metadata = {"name": "tiny", "namespace": namespace}
    await client.create(MODELS, {"metadata": metadata, "spec": {"source": "file:///m.gguf", "memoryBytes": 1}})
    await keys.make_service()
    return keys


@pytest.fixture
def restart(shared_controller: SharedController) -> Callable[[], Awaitable[object]]:
    """Start the controller anew, which reads all Secrets then: it is too early for the next regular reading."""
    return lambda: shared_controller.lend_new("--gateway")


async def test_key_is_made_and_recognised_by_its_digest(keys: KeyNamespace) -> None:
    await keys.make()
    status = await keys.reaches("Valid")
    secret = await keys.secret()
    assert (secret["type"], len(await keys.text())) == ("Opaque", 59)
    assert status["digest"] == digest_key(await keys.text())
    assert [owner["kind"] for owner in secret["metadata"]["ownerReferences"]] == ["GatewayKey"]
    await keys.client.delete(GATEWAY_KEYS, "app", keys.namespace)

    async def is_collected() -> bool:
        try:
            await keys.secret()
        except NotFound:
            return True
        return False

    await eventually(is_collected)


async def test_replaced_key_is_valid_for_the_overlap(keys: KeyNamespace) -> None:
    await keys.make(overlapSeconds=3)
    await keys.reaches("Valid")
    former = await keys.text()
    await keys.edit(rotate="monday")

    async def is_replaced() -> str:
        text = await keys.text()
        assert text != former
        return text

    text = await eventually(is_replaced)
    await keys.has_digests(text, former)
    await keys.has_digests(text)
    await keys.edit(overlapSeconds=0)
    await keys.edit(rotate="tuesday")

    async def is_replaced_again() -> str:
        again = await keys.text()
        assert again not in {text, former}
        return again

    await keys.has_digests(await eventually(is_replaced_again))


async def test_key_is_suspended_and_expires(keys: KeyNamespace) -> None:
    await keys.make(suspend=True)
    digest = (await keys.reaches("Suspended"))["digest"]
    await keys.edit(suspend=False)
    await keys.reaches("Valid")
    await keys.edit(expiresAt=rfc3339(datetime.now(UTC) + timedelta(seconds=5)))
    await keys.reaches("Valid")
    assert (await keys.reaches("Expired"))["digest"] == digest
    await keys.edit(expiresAt=rfc3339(datetime.now(UTC) + timedelta(hours=1)))
    await keys.reaches("Valid")


async def test_key_without_services_says_so_until_it_has_one(keys: KeyNamespace) -> None:
    await keys.make(services=["code-*"])
    await keys.reaches("NoService")
    await keys.make_service("code-1")
    await keys.reaches("Valid")
    await keys.client.delete(INFERENCE_SERVICES, "code-1", keys.namespace)
    await keys.reaches("NoService")


async def test_keys_and_secrets_of_users_are_followed(
    keys: KeyNamespace, restart: Callable[[], Awaitable[object]]
) -> None:
    foreign = {"metadata": {"name": "taken-key", "namespace": keys.namespace}, "data": {}}
    await keys.client.create(SECRETS, foreign)
    for name in ("own", "gone", "taken"):
        await keys.make(name)
    for name in ("own", "gone"):
        await keys.reaches("Valid", name)
    await keys.reaches("SecretTaken", "taken")
    own, gone = [await keys.text(name) for name in ("own", "gone")]
    await keys.put("k" * 32, "own")
    await keys.client.delete(SECRETS, "gone-key", keys.namespace)
    await restart()
    await keys.has_digests("k" * 32, own, name="own")

    async def is_made_anew() -> str:
        return await keys.text("gone")

    await keys.has_digests(await eventually(is_made_anew), gone, name="gone")
    assert (await keys.client.get(SECRETS, "taken-key", keys.namespace)).get("data") is None


async def test_key_of_another_is_taken_and_stays_theirs(
    keys: KeyNamespace, restart: Callable[[], Awaitable[object]]
) -> None:
    await keys.make("thief")
    await keys.make("victim")
    for name in ("thief", "victim"):
        await keys.reaches("Valid", name)
    stolen, former = await keys.text("victim"), await keys.text("thief")
    await keys.put(stolen, "thief")
    await restart()
    status = await keys.reaches("KeyTaken", "thief")
    assert "digest" not in status
    assert [entry["digest"] for entry in status["previous"]] == [digest_key(former)]
    await keys.has_digests(stolen, name="victim")
    assert (await keys.reaches("Valid", "victim"))["digest"] == digest_key(stolen)


async def test_controller_without_a_gateway_makes_no_key(
    keys: KeyNamespace, shared_controller: SharedController
) -> None:
    await shared_controller.lend()
    await keys.make()
    await keys.reaches("NoGateway")
    with pytest.raises(NotFound):
        await keys.secret()
