"""Controller and agent go on, without a restart, when their kubeconfig gets a new token after the old one has ended."""

from datetime import datetime

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client, Obj
from kube.resources import LEASES, METAL_HOSTS, MODELS, Resource
from tests.cluster.conftest import StartMetalHost
from tests.controlplane.members import CONTROLLER_ACCOUNT, CONTROLLER_NAMESPACE
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually

ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")


async def test_new_token_in_a_kubeconfig_is_used_without_a_restart(
    plane: ControlPlane, client: Client, namespace: str, controller: Process, metal_host: StartMetalHost
) -> None:
    host = await metal_host("studio-1")
    identities = ((CONTROLLER_NAMESPACE, CONTROLLER_ACCOUNT, controller), (HOSTS_NAMESPACE, "studio-1", host.agent))
    before = [process.pid for _, _, process in identities]
    for place, name, _ in identities:
        # As after the end of its life: no token of this account is accepted any more.
        await client.delete(ACCOUNTS, name, place)
        await client.create(ACCOUNTS, {"metadata": {"namespace": place, "name": name}})
    for _, _, process in identities:
        await eventually(lambda: "token_refused" in process.tail(1000), timeout=60)  # noqa: B023 - called at once
    model = {
        "metadata": {"namespace": namespace, "name": "late"},
        "spec": {"source": "file:///a.gguf", "memoryBytes": 5},
    }
    await client.create(MODELS, model)
    stopped = await renewed_at(client)

    for place, name, _ in identities:
        await plane.service_account_kubeconfig(place, name)  # written in the place of the one that is in use

    async def goes_on() -> bool:
        conditions = [await conditions_of(client, MODELS, "late", namespace), await conditions_of(client, METAL_HOSTS)]
        return all(conditions) and await renewed_at(client) > stopped

    await eventually(goes_on, timeout=60)
    assert [process.pid for _, _, process in identities] == before


async def conditions_of(client: Client, kind: Resource, name: str = "studio-1", place: str | None = None) -> list[Obj]:
    conditions: list[Obj] = (await client.get(kind, name, place)).get("status", {}).get("conditions", [])
    return conditions


async def renewed_at(client: Client) -> datetime:
    lease = await client.get(LEASES, "studio-1", HOSTS_NAMESPACE)
    return datetime.fromisoformat(lease["spec"]["renewTime"])
