"""`pomona key` against a real control plane: keys are made, listed, replaced and deleted as by a user."""

import json

import pytest

from crds.gatewaykey import digest_key
from kube.client import Client
from kube.errors import NotFound
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, SECRETS
from tests.cluster.shared_controller import SharedController
from tests.controlplane.plane import ControlPlane
from tests.support.eventually import eventually
from tests.support.pomona_command import Pomona


@pytest.fixture
async def pomona(plane: ControlPlane, namespace: str, client: Client, shared_controller: SharedController) -> Pomona:
    """The command, in a namespace with a service, and a controller that knows of a gateway."""
    await shared_controller.lend("--gateway")
    metadata = {"name": "chat", "namespace": namespace}
    await client.create(INFERENCE_SERVICES, {"metadata": metadata, "spec": {"modelRef": "tiny", "replicas": 0}})
    return Pomona(plane, namespace)


async def test_key_is_made_listed_replaced_and_deleted(pomona: Pomona, client: Client, namespace: str) -> None:
    limits = ("--requests-per-minute=600", "--tokens-per-minute=200000", "--concurrent-requests=8")
    made = await pomona.run("key", "create", "app", "--services=chat", "--expires=30d", "--overlap=12h", *limits)
    assert made.code == 0, made
    text = made.output.strip()
    assert made.output == f"{text}\n", "the key alone is on standard output"
    assert (text.startswith("pomona-"), text in made.errors) == (True, False)
    assert made.errors.splitlines() == [
        f"made GatewayKey app in namespace {namespace}",
        f"the key is in Secret app-key in namespace {namespace}, and here:",
    ]
    key = await client.get(GATEWAY_KEYS, "app", namespace)
    assert key["status"]["digest"] == digest_key(text)
    assert key["spec"].pop("expiresAt")
    assert key["spec"] == {
        "services": ["chat"],
        "suspend": False,
        "overlapSeconds": 43_200,
        "requestsPerMinute": 600,
        "tokensPerMinute": 200_000,
        "concurrentRequests": 8,
    }

    listed = await pomona.succeed("key", "list", "-o", "wide")
    head, row = listed.splitlines()
    assert head.split()[:5] == ["NAME", "READY", "REASON", "SERVICES", "EXPIRES"]
    assert row.split()[:6] == ["app", "True", "Valid", "chat", "in", "29d"]
    everything = await pomona.succeed("key", "list", "-A", "-o", "json")
    assert "app" in [item["metadata"]["name"] for item in json.loads(everything)["items"]]
    assert text not in listed + everything

    replaced = await pomona.run("key", "rotate", "app")
    assert replaced.code == 0, replaced
    second = replaced.output.strip()
    assert second not in {text, ""}
    assert "the former key is valid until " in replaced.errors
    third = (await pomona.run("key", "rotate", "app", "--overlap=0")).output.strip()
    key = await client.get(GATEWAY_KEYS, "app", namespace)
    assert (key["status"]["digest"], "previous" in key["status"]) == (digest_key(third), False)
    assert key["spec"]["overlapSeconds"] == 0

    refused = await pomona.run("key", "delete", "app")
    assert refused.code == 1
    assert "the gateway accepts app" in refused.errors
    assert "add --yes" in refused.errors
    assert await pomona.succeed("key", "delete", "app", "--yes") == f"deleted GatewayKey app in namespace {namespace}\n"

    async def is_collected() -> bool:
        try:
            await client.get(SECRETS, "app-key", namespace)
        except NotFound:
            return True
        return False

    await eventually(is_collected)


async def test_way_out_is_told(pomona: Pomona, client: Client, namespace: str) -> None:
    made = await pomona.run("key", "create", "none", "--services=code-*")
    assert made.code == 0, made
    assert "the gateway does not accept it now: NoService: spec.services fits no service" in made.errors
    again = await pomona.run("key", "create", "none")
    assert again.code == 1
    assert f"or replace its key: pomona key rotate none{pomona.options}" in again.errors
    missing = await pomona.run("key", "rotate", "nono")
    assert "GatewayKey nono does not exist" in missing.errors
    assert "did you mean none?" in missing.errors
    await client.create(SECRETS, {"metadata": {"name": "taken-key", "namespace": namespace}})
    taken = await pomona.run("key", "create", "taken")
    assert (taken.code, taken.output) == (1, "")
    assert "GatewayKey taken gets no key: Secret taken-key was not made for this GatewayKey: delete it" in taken.errors
    invalid = await pomona.run("key", "create", "bad", "--services=a b")
    assert invalid.code == 1
    assert "spec.services[0]" in invalid.errors
