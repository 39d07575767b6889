"""The identity of a joined host renews itself while watches run, and recovers from a refusal, without a restart."""

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crds.meta import HOSTS_NAMESPACE
from kube.client import Client
from kube.lease import HostLease
from kube.resources import METAL_PROCESSES, ROLE_BINDINGS, SERVICE_ACCOUNTS
from kube.store import Store
from kube.transport import AiohttpTransport, Transport
from kube.watch import Selection, reflect
from metal_agent.cluster import host_identity
from metal_agent.cluster.api_connection import ApiConnection, ObservedTransport
from metal_agent.cluster.host_identity import HostIdentity, JoinedHost, read_joined_host
from metal_agent.join.exchange import join_cluster
from tests.cluster.join.conftest import HOST, Invite
from tests.cluster.policy.objects import build_process
from tests.support.api_faults import FaultyTransport
from tests.support.background import running
from tests.support.eventually import eventually

RENEWAL_SECONDS = 0.2


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_identity, "_CHECK_SECONDS", 0.1)


async def test_token_is_renewed_while_watch_and_lease_go_on(
    invite: Invite, client: Client, namespace: str, tmp_path: Path
) -> None:
    days = 0.0
    joined = await join_cluster(await invite(), tmp_path)
    identity = HostIdentity(tmp_path, joined, lambda: time.monotonic() + days * 86400)
    transport, store, renewed = FaultyTransport(AiohttpTransport(identity.credentials())), Store(), list[float]()
    host = Client(transport)
    selector = f"spec.hostName={HOST}"
    async with (
        closing(transport),
        running(
            identity.keep_renewed(host),
            reflect(host, store, Selection(METAL_PROCESSES, field_selector=selector)),
            HostLease(host, HOSTS_NAMESPACE, HOST, "a", "pomona-metal-agent").keep_renewed(
                RENEWAL_SECONDS, lambda: renewed.append(time.monotonic())
            ),
        ),
    ):
        tokens = {joined.token}
        for number in range(3):
            before = identity.expires_at
            days += 1.0
            await eventually(lambda: written(tmp_path).token not in tokens)
            await eventually(lambda: uses_what_is_written(identity, tmp_path))
            assert identity.expires_at >= before
            tokens.add(written(tmp_path).token)
            name = f"chat-{number}"
            await client.create(METAL_PROCESSES, build_process(namespace, name, HOST))
            await eventually(lambda: name in names(store))  # noqa: B023 - called at once
            renewals = len(renewed)
            await eventually(lambda: len(renewed) > renewals + 1)  # noqa: B023 - called at once
    assert len(tokens) == 4
    watches = [request for request in transport.sent if "watch" in request.query]
    assert len(watches) == 1, "the watch was never interrupted"


async def test_refused_identity_is_reported_and_another_join_ends_that(
    invite: Invite, client: Client, tmp_path: Path
) -> None:
    identity = HostIdentity(tmp_path, await join_cluster(await invite(), tmp_path))
    connection = ApiConnection(identity.credentials())
    transport = ObservedTransport(identity.credentials(), connection)
    host, store = Client(transport), Store()
    async with (
        closing(transport),
        running(
            identity.keep_renewed(host),
            reflect(host, store, Selection(METAL_PROCESSES, field_selector=f"spec.hostName={HOST}")),
            HostLease(host, HOSTS_NAMESPACE, HOST, "a", "pomona-metal-agent").keep_renewed(RENEWAL_SECONDS),
        ),
    ):
        await eventually(lambda: connection.status.state == "connected")
        await client.delete(ROLE_BINDINGS, HOST, HOSTS_NAMESPACE)
        await eventually(lambda: connection.status.state == "refused")
        refused = "this host has no right to its Lease any more (403): get a code by"
        await eventually(lambda: connection.status.message.startswith(refused))
        await client.delete(SERVICE_ACCOUNTS, HOST, HOSTS_NAMESPACE)
        await eventually(lambda: "does not accept the token of this host (401)" in connection.status.message)
        since = connection.status.since

        await join_cluster(await invite(), tmp_path)
        await eventually(lambda: connection.status.state == "connected")
        assert connection.status.message == ""
        assert connection.status.since >= since


@contextlib.asynccontextmanager
async def closing(transport: Transport) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await transport.close()


async def uses_what_is_written(identity: HostIdentity, folder: Path) -> bool:
    """Return whether the identity uses the token in its file, which is written first."""
    return await identity.authorization() == f"Bearer {written(folder).token}"


def names(store: Store) -> list[str]:
    return [process["metadata"]["name"] for process in store.list(METAL_PROCESSES)]


def written(folder: Path) -> JoinedHost:
    host = read_joined_host(folder)
    assert host
    return host
