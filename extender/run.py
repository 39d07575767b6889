"""The process of the extender: its watches, its answers and its listeners."""

import asyncio
import contextlib
import gc
from typing import Final, NamedTuple

import structlog

from devices.limits import raise_descriptor_limit
from devices.vendors import VENDORS, Vendors
from extender.answers import Answers
from extender.extender_metrics import ExtenderMetrics
from extender.feed import ExtenderFeed, open_view
from extender.node_facts import DEFAULT_ANNOTATION_PREFIX
from extender.score import ScoreWeights
from extender.server import list_probe_routes, listen_to_scheduler
from extender.speed_table import SpeedTable
from extender.subject import estimate_served_speed
from gateway.http.whole_answers import AnswerServer, serve_answers
from kube.client import Client

log = structlog.get_logger()

DEFAULT_PORT: Final = 8888
LOOPBACK: Final = "127.0.0.1"
_GC_THRESHOLD: Final = (50_000, 50, 50)
"""Objects of requests are freed without the collector; with its usual thresholds it would halt answers for
milliseconds."""


class ExtenderOptions(NamedTuple):
    """The options of the extender."""

    port: int = DEFAULT_PORT
    """Port of the scheduler's requests."""
    address: str = LOOPBACK
    """Address of it; empty: all addresses."""
    weights: ScoreWeights = ScoreWeights()
    vendors: Vendors = VENDORS
    annotation_prefix: str = DEFAULT_ANNOTATION_PREFIX
    """Prefix of the annotations with utilization and cost of nodes."""
    metrics_address: tuple[str, int] | None = None
    """Further address and port of health and metrics alone; None: none."""


async def run(client: Client, options: ExtenderOptions) -> None:
    """Answer schedulers until cancelled. Until the cluster was read once, every node passes.

    Raises:
        OSError: a port cannot be opened.
    """
    raise_descriptor_limit()

    # The view follows the cluster, the feed puts its nodes into the table of speeds, and answers are read from there.
    view = open_view(options.vendors, options.annotation_prefix)
    table = SpeedTable(options.vendors, options.weights, estimate_served_speed, view.measured)
    feed = ExtenderFeed(table, view, options.annotation_prefix)
    metrics = ExtenderMetrics(table)
    answers = Answers(feed.find_board, options.weights, metrics)
    probe_routes = list_probe_routes(metrics, lambda: view.is_complete)

    # Listen at once, and read the cluster meanwhile.
    async with contextlib.AsyncExitStack() as listeners:
        listening = listen_to_scheduler(answers, probe_routes, options.address, options.port)
        _, port = await listeners.enter_async_context(listening)
        if options.metrics_address is not None:
            await listeners.enter_async_context(serve_answers(AnswerServer(probe_routes), *options.metrics_address))
        log.info("extender_listening", address=options.address, port=port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run(client))
            await view.wait_until_complete()
            keep_lists_out_of_collection()
            log.info("store_complete", nodes=table.node_count)


def keep_lists_out_of_collection() -> None:
    """Keep the garbage collector from the lists: it looks at requests only, and seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)
