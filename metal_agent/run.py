"""Start the agent of one host: check its options first, then own the state folder, then serve."""

import asyncio

import aiohttp
import structlog

from devices import host, limits
from kube.credentials import Credentials
from kube.resources import METAL_PROCESSES
from metal_agent.agent import Agent, EverythingStopped
from metal_agent.cluster.address import find_address
from metal_agent.cluster.api_connection import ApiConnection, connect_observed
from metal_agent.memory.ledger import Ledger, budget_bytes
from metal_agent.options import AgentOptions, StartError
from metal_agent.state_folder import own_folder, take_over
from metal_agent.traffic import certificate

log = structlog.get_logger()


async def run(credentials: Credentials, options: AgentOptions) -> None:
    """Serve as host `options.name` until cancelled; engines and proxy keep running, for the next agent to adopt.

    1. Find the address and the memory budget, and check the certificate: without them the agent cannot start.
    2. Take over from a `pomona up` that serves here, and own the state folder.
    3. Run the agent.

    The token of a host that has joined by a code (`HostIdentity`) is renewed meanwhile. It returns after everything
    was drained and stopped, which a call of the control socket can request.

    Raises:
        StartError: the state folder is in use or cannot be read, address, budget or certificate cannot be found or
            used, or another agent has this name.
    """
    address = find_address(options, credentials.server)  # step 1
    if options.tls:
        await asyncio.to_thread(certificate.check_certificate, options.tls, address)
    facts = await asyncio.to_thread(host.read)

    allowed_bytes = budget_bytes(facts, options.memory_budget_bytes)
    if allowed_bytes is None:
        raise StartError("the memory of this host is not known: give --memory-budget, such as 12GiB")

    connection = ApiConnection(credentials)

    async def check_api_access() -> None:
        """Check that the API server answers this host."""
        async with connect_observed(credentials, connection) as client:
            await client.list(METAL_PROCESSES, field_selector=f"spec.hostName={options.name}")

    # After all checks: an agent that cannot start must not make a `pomona up` that serves here end.
    await take_over(options.folder, check_api_access)  # step 2
    with own_folder(options.folder):
        limits.raise_descriptor_limit()
        async with connect_observed(credentials, connection) as client, aiohttp.ClientSession() as session:
            try:
                agent = Agent(
                    client,
                    session,
                    options,
                    connection=connection,
                    address=address,
                    host_facts=facts,
                    ledger=Ledger(allowed_bytes, memory_bytes=facts.memory_bytes),
                )
            except OSError as error:
                raise StartError(f"cannot use what is in --state-dir {options.folder}: {error}") from error
            try:
                await agent.run()  # step 3
            except ExceptionGroup as group:
                # A group of the errors of the agent's tasks: a start that was refused, a stop on request, or a defect.
                if refused := group.subgroup(StartError):
                    raise refused.exceptions[0] from None
                _, other_errors = group.split(EverythingStopped)  # which is no error: a stop was requested
                if other_errors is not None:
                    raise
                log.info("agent_stopped", host=options.name)
