"""A host that is removed is refused at its next request, nothing of it is left, and a removal may be interrupted."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crds.meta import HOSTS_NAMESPACE, LABEL_HOST, LABEL_SLICE_MANAGED_BY, SLICE_MANAGED_BY
from kube.client import Client, Obj, WatchEvent
from kube.credentials import Credentials
from kube.errors import Forbidden, NotFound, Unauthorized, Unreachable
from kube.resources import ENDPOINT_SLICES, LEASES, METAL_PROCESSES, SECRETS, SERVICE_ACCOUNTS
from kube.transport import AiohttpTransport
from metal_agent.cluster.host_identity import JoinedHost
from metal_agent.join.exchange import join_cluster
from metal_agent.join.removal import list_bound_processes, removal_steps, remove_host
from tests.cluster.join.conftest import HOST, Invite, connect_with
from tests.cluster.policy.objects import ADDRESSES, build_lease, build_process, build_slice
from tests.support.agent_objects import lease_of_host
from tests.support.api_faults import Fault, FaultyTransport, nth
from tests.support.eventually import eventually
from tests.support.host_grants import grant_host, register_host

MANAGER = "pomona-metal-agent"


@pytest.fixture
async def joined(invite: Invite, tmp_path: Path) -> JoinedHost:
    """Host studio-1, which has joined by a code."""
    return await join_cluster(await invite(), tmp_path)


async def serve(client: Client, host: Client, namespace: str) -> Obj:
    """Write all that a host with one process writes; return the process."""
    process = await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", HOST))
    await client.create(SECRETS, {"metadata": {"namespace": HOSTS_NAMESPACE, "name": HOST}})
    await eventually(lambda: register_host(host, HOST))
    await grant_host(client, HOST, [ADDRESSES[HOST]])
    await host.apply(*build_lease(process), field_manager=MANAGER)

    async def is_published() -> bool:
        try:
            await host.apply(*build_slice(process), field_manager=MANAGER)
        except Forbidden:  # the API server does not know the grant yet
            return False
        return True

    await eventually(is_published)
    return process


async def test_removed_host_is_refused_and_nothing_of_it_is_left(
    joined: JoinedHost, admin: Credentials, client: Client, namespace: str
) -> None:
    async with connect_with(admin, joined.token) as host:
        process = await serve(client, host, namespace)
        assert [bound_process["metadata"]["name"] for bound_process in await list_bound_processes(client, HOST)] == [
            "chat-1"
        ]

        deleted = await remove_host(client, HOST)
        assert deleted[:3] == [
            "ClusterRoleBinding/pomona-metal-host-studio-1",
            "RoleBinding/studio-1",
            "RoleBinding/grants:studio-1",
        ]
        assert {"ServiceAccount/studio-1", "EndpointSlice/chat.studio-1", "MetalHost/studio-1"} <= {*deleted}

        async def is_refused(*errors: type[Exception]) -> bool:
            try:
                await host.list(METAL_PROCESSES)
            except errors:
                return True
            except Forbidden:  # the API server remembers for ten seconds whose token it is
                return False
            return False

        await eventually(lambda: is_refused(Forbidden, Unauthorized))
        for written in (build_lease(process), build_slice(process)):
            with pytest.raises((Forbidden, Unauthorized)):
                await host.apply(*written, field_manager=MANAGER)
        await eventually(lambda: is_refused(Unauthorized))
    await assert_nothing_left(client, namespace)
    assert await remove_host(client, HOST) == []


async def test_open_watch_of_a_removed_host_goes_on_and_no_other_is_opened(
    joined: JoinedHost, admin: Credentials, client: Client, namespace: str
) -> None:
    """That is Kubernetes' doing, which no removal changes: docs/security.md says what follows for the administrator."""
    async with connect_with(admin, joined.token) as host:
        await eventually(lambda: register_host(host, HOST))
        listed = await host.list(METAL_PROCESSES, namespace)
        watch = host.watch(METAL_PROCESSES, namespace, resource_version=listed.resource_version)
        async with contextlib.aclosing(watch):
            await client.create(METAL_PROCESSES, build_process(namespace, "chat-1", HOST))
            assert await next_name(watch) == "chat-1"
            await remove_host(client, HOST)

            async def is_forgotten() -> bool:
                try:
                    await anext(host.watch(METAL_PROCESSES, namespace, resource_version=listed.resource_version))
                except Unauthorized:
                    return True
                except Forbidden:  # the API server remembers for ten seconds whose token it is
                    return False
                return False

            await eventually(is_forgotten)
            await client.create(METAL_PROCESSES, build_process(namespace, "chat-2", HOST))
            assert await next_name(watch) == "chat-2"


async def next_name(watch: AsyncIterator[WatchEvent]) -> str:
    """Return the name of the next object of a watch, whatever bookmarks come before it."""
    async for event in watch:
        if event.type != "BOOKMARK":
            return str(event.object["metadata"]["name"])
    raise AssertionError("the API server has ended the watch")


@pytest.mark.parametrize("number", [0, 4, 7])
async def test_removal_that_was_interrupted_is_continued(
    joined: JoinedHost, admin: Credentials, client: Client, namespace: str, number: int
) -> None:
    async with connect_with(admin, joined.token) as host:
        await serve(client, host, namespace)
    transport = FaultyTransport(AiohttpTransport(admin), nth(number, Fault.CUT))
    try:
        with pytest.raises(Unreachable):
            await remove_host(Client(transport), HOST)
    finally:
        await transport.close()
    await remove_host(client, HOST)
    await assert_nothing_left(client, namespace)


async def test_removal_finds_endpoints_by_their_name_and_the_lease_of_a_minute(
    joined: JoinedHost, admin: Credentials, client: Client, namespace: str
) -> None:
    async with connect_with(admin, joined.token) as host:
        process = await serve(client, host, namespace)
        await host.apply(LEASES, lease_of_host(HOST, duration_seconds=60), field_manager=MANAGER)
    label = f"/metadata/labels/{LABEL_HOST.replace('/', '~1')}"
    await client.patch_json(ENDPOINT_SLICES, f"chat.{HOST}", namespace, [{"op": "remove", "path": label}])
    foreign = build_slice(process, name=f"mail.{HOST}", labels={LABEL_SLICE_MANAGED_BY: "someone.example"})
    ours = {LABEL_SLICE_MANAGED_BY: SLICE_MANAGED_BY}
    # A host with a kubeconfig may have a dot in its name.
    alike = [build_slice(process, name=f"chat.{host}", labels=ours) for host in (f"my-{HOST}", f"my.{HOST}")]
    for arguments in (foreign, *alike):
        await client.create(*arguments)
    deleted = await remove_host(client, HOST)
    assert {f"EndpointSlice/chat.{HOST}", f"Lease/{HOST}"} <= {*deleted}
    await assert_nothing_left(client, namespace)
    for _, kept in (foreign, *alike):
        assert await client.get(ENDPOINT_SLICES, kept["metadata"]["name"], namespace)


async def test_what_is_written_behind_a_removal_is_removed_by_the_next_one(
    joined: JoinedHost, admin: Credentials, client: Client, namespace: str
) -> None:
    """A request that was on its way, or a controller that had decided before; `pomona host remove` removes twice."""
    async with connect_with(admin, joined.token) as host:
        process = await serve(client, host, namespace)
    await remove_host(client, HOST)
    await client.create(*build_slice(process))
    await client.create(*build_lease(process))
    await client.create(SECRETS, {"metadata": {"namespace": HOSTS_NAMESPACE, "name": HOST}})
    assert {*await remove_host(client, HOST)} == {f"EndpointSlice/chat.{HOST}", f"Lease/{HOST}", f"Secret/{HOST}"}
    await assert_nothing_left(client, namespace)


async def assert_nothing_left(client: Client, namespace: str) -> None:
    left: list[str] = []
    for resource, name, place in (step for steps in removal_steps(HOST) for step in steps):
        try:
            left.append(str(await client.get(resource, name, place)))
        except NotFound:
            continue
    assert left == []
    with pytest.raises(NotFound):
        await client.get(ENDPOINT_SLICES, f"chat.{HOST}", namespace)


async def test_removal_of_a_host_that_has_not_joined_ends_its_code(invite: Invite, client: Client) -> None:
    await invite()
    deleted = await remove_host(client, HOST)
    assert "PodTemplate/studio-1.join" in deleted
    names = [item["metadata"]["name"] for item in (await client.list(SERVICE_ACCOUNTS, HOSTS_NAMESPACE)).items]
    assert not {HOST, f"{HOST}.join"} & {*names}
