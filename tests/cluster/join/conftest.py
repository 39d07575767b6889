"""A host's identity and join code on the real API server with all policies, without an agent."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from kube import credentials
from kube.client import Client, connect
from kube.credentials import Credentials, StaticToken, build_tls
from metal_agent.join.invitation import invite_host
from metal_agent.join.join_code import JoinCode, decode_join_code
from metal_agent.join.removal import remove_host
from tests.controlplane.plane import ControlPlane

HOST = "studio-1"
Invite = Callable[..., Awaitable[JoinCode]]
"""`await invite(host)` returns a new join code."""


@pytest.fixture
def admin(plane: ControlPlane) -> Credentials:
    """The administrator's credentials."""
    return credentials.load(plane.kubeconfig())


@pytest.fixture
async def invite(admin: Credentials, client: Client) -> AsyncIterator[Invite]:
    """Invite hosts, which are removed afterwards."""
    hosts: set[str] = set()

    async def make(host: str = HOST) -> JoinCode:
        hosts.add(host)
        return decode_join_code(await invite_host(client, admin, host))

    yield make
    for host in hosts:
        await remove_host(client, host)


@contextlib.asynccontextmanager
async def connect_with(admin: Credentials, token: str) -> AsyncIterator[Client]:
    """Connect with a token, as whoever has it can."""
    async with connect(replace(admin, identity=StaticToken(token), tls=build_tls(admin.authority))) as client:
        yield client
