"""The process of the node agent: its agent, its metrics and its REST API."""

import asyncio
import contextlib

from devices.node_hardware import read_node_hardware
from kube.client import connect
from kube.credentials import Credentials
from node_agent.agent import NodeAgent
from node_agent.metrics import NodeMetrics
from node_agent.options import NodeAgentOptions
from node_agent.rest import EVERYWHERE, LOOPBACK, build_metrics_server, build_rest_server, serve


async def run(identity: Credentials, options: NodeAgentOptions, memory_bandwidth: int | None) -> None:
    """Run until this is cancelled. The facts stay, and are stale 150 s later.

    Args:
        identity: the API server, and the credentials for it.
        options: the options.
        memory_bandwidth: that of the processor, in bytes a second; None: unknown.
    """
    metrics = NodeMetrics(options.node_name, options.metric_prefix)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(identity, metrics.count_call))

        agent = NodeAgent(
            client,
            options,
            # The probe: it blocks while tools answer, so it runs in a thread.
            lambda labels: asyncio.to_thread(read_node_hardware, labels, options.roots),
            memory_bandwidth,
            metrics,
        )

        if options.metrics_port:
            server = build_metrics_server(metrics.render)
            await stack.enter_async_context(serve(server, "--metrics-port", EVERYWHERE, options.metrics_port))

        # Without a key, the REST API is served on loopback only.
        if options.rest_port:
            host = EVERYWHERE if options.api_key_file else LOOPBACK
            server = build_rest_server(options.node_name, lambda: agent.hardware, options.api_key_file)
            await stack.enter_async_context(serve(server, "--port", host, options.rest_port))

        await agent.run()
