"""The status of a running agent, as its control socket reports it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from metal_agent.holds.hold_gate import HostHold

if TYPE_CHECKING:
    from metal_agent.supervise.runner import Runner


class AgentProcessStatus(msgspec.Struct, frozen=True, rename="camel"):
    """One process of the host."""

    namespace: str
    service: str
    model: str
    runtime: str
    phase: str
    memory_bytes: int
    """Memory that its MetalProcess reserves."""
    message: str = ""


class ConnectionStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The agent's connection to the API server."""

    state: str
    """connected; unreachable: it does not answer; refused: it does not accept this host any more."""
    since: str
    """RFC 3339."""
    message: str = ""
    """The reason and the way out, if it is not connected."""


class IdentityStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The token of a host that has joined by a code; times in RFC 3339."""

    expires_at: str
    renews_at: str
    renewal_problem: str = ""
    """Why the last renewal failed, which is tried again; empty if it did not."""


class AgentStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The agent of one host."""

    host: str
    version: str
    """The version of the program, and a checksum of its modules."""
    pid: int
    started_at: str
    """RFC 3339."""
    address: str
    """The address at which the cluster reaches this host."""
    server: str
    """The URL of the API server."""
    connection: ConnectionStatus
    identity: IdentityStatus | None = None
    """None if the agent has a kubeconfig."""
    holds: list[HostHold] = []
    ready: bool
    """False until engines are adopted, and the Lease is renewed or the API server away."""
    stopping: bool
    """True while everything is drained and stopped, after which the agent ends for good."""
    budget_bytes: int
    available_bytes: int
    processes: list[AgentProcessStatus]


class StopAccepted(msgspec.Struct, frozen=True, rename="camel"):
    """The answer to a call that stops everything: the agent's process, whose end is the end of the work."""

    pid: int


def describe_processes(runners: "Iterable[Runner]") -> list[AgentProcessStatus]:
    """Describe the processes, sorted by namespace and service."""
    described = [
        AgentProcessStatus(
            namespace=runner.assignment.namespace,
            service=runner.assignment.spec.service_name or runner.assignment.name,
            model=runner.assignment.spec.model_name,
            runtime=runner.assignment.spec.runtime,
            phase=runner.state.phase,
            memory_bytes=runner.assignment.spec.memory_bytes,
            message=runner.state.message or runner.assignment.problem,
        )
        for runner in runners
    ]
    return sorted(described, key=lambda status: (status.namespace, status.service))
