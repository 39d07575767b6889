"""The readings of the counts of the gateway's replicas, for the usage in the status of GatewayKeys.

The leader reads every replica, and enqueues the keys whose usage is to be written, a few in a second: whatever the
clients of all keys do, there are no more writes than that. The reconciler takes the counts of those keys only. A
replica that cannot be read changes nothing: the status of the keys stays.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

import aiohttp
import msgspec
import structlog

from controller.gateway.key_usage import KeyCounts, is_due
from controller.reconcile.plan import Leading, decode_stored
from controller.services.endpoints import Endpoint
from controller.services.pod_answer import open_session, read_answer
from crds.gatewaykey import MOST_COUNTED_REPLICAS, GatewayKey
from crds.meta import CONTROLLER_NAMESPACE
from gateway.cluster.usage import USAGE_PATH, KeyCount, ReplicaUsage
from kube.client import Client, Obj
from kube.errors import ApiError, Unreachable
from kube.resources import GATEWAY_KEYS, PODS, ObjectKey
from kube.store import Store

READ_SECONDS: Final = 15.0
"""Time from one reading of all replicas to the next."""
WRITES_PER_SECOND: Final = 5
"""Keys that are enqueued in a second. In ten minutes that is 3,000."""
KEPT_SECONDS: Final = 1800.0
"""Time for which the last counts of a replica that has ended are kept: until all keys have them."""
MOST_BYTES: Final = 4 << 20
"""The longest answer that is read. Of 10,000 keys in use it has 0.7 MB."""
_KEYS_PER_PASS: Final = 100
"""Keys after which other work gets a turn."""
_PODS: Final = "app.kubernetes.io/name=pomona,app.kubernetes.io/component=gateway"
"""Selector of the gateway's pods, as the chart labels them."""
_PORT: Final = "metrics"

log = structlog.get_logger()


class _Reading(NamedTuple):
    at: float
    """By the clock of the event loop, in seconds."""
    keys: dict[str, KeyCount]
    """By uid of the GatewayKey."""


class UsageReader:
    """The last counts of all replicas.

    Args:
        store: the watch cache with the GatewayKeys.
        now: the wall clock.
    """

    def __init__(self, store: Store, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._store = store
        self._now = now
        self._readings: dict[str, _Reading] = {}
        """By identifier of the replica's process."""
        self._unread: set[str] = set()
        """Names of the pods that could not be read in the last round."""
        self._replicas: frozenset[str] | None = None
        """All replicas, also those that have ended of late; None: one could not be read in the last round."""
        self._due: dict[str, KeyCounts] = {}
        """The counts that the next decision adds, by uid of the GatewayKey."""

    def restart(self) -> None:
        """Forget all counts: they are of an earlier leadership."""
        self._readings.clear()
        self._due.clear()
        self._replicas = None

    def take_counts(self, key_uid: str) -> KeyCounts | None:
        """Return what was counted of a GatewayKey if its usage is to be written now; else None."""
        return self._due.pop(key_uid, None)

    async def run(self, leading: Leading) -> None:
        """Read the replicas, and enqueue the keys whose usage is to be written, while this replica leads."""
        loop = asyncio.get_running_loop()
        async with open_session() as session:
            while True:
                next_round = loop.time() + READ_SECONDS
                await self._read_replicas(session, leading.client, loop.time())
                self._due.clear()
                for key, counts in await self._list_due():
                    self._due[key.metadata.uid] = counts
                    leading.enqueue(GATEWAY_KEYS, ObjectKey(key.metadata.namespace, key.metadata.name))
                    await asyncio.sleep(1 / WRITES_PER_SECOND)
                    if loop.time() >= next_round:
                        break
                await asyncio.sleep(max(0.0, next_round - loop.time()))

    async def _list_due(self) -> list[tuple[GatewayKey, KeyCounts]]:
        """Return the GatewayKeys whose usage is to be written, with their counts: first those in use.

        Namespaces take turns, so that none delays the keys of others. Of each the least recently written key is first.
        """
        due: list[tuple[bool, str, GatewayKey, KeyCounts]] = []
        for number, stored in enumerate(list(self._store.list(GATEWAY_KEYS))):
            if number % _KEYS_PER_PASS == 0:
                await asyncio.sleep(0)
            uid = stored["metadata"]["uid"]
            found = {name: reading.keys[uid] for name, reading in self._readings.items() if uid in reading.keys}
            counts = KeyCounts(found, self._replicas)
            for key in decode_stored(self._store, GATEWAY_KEYS, [stored], GatewayKey):
                usage = key.status.usage
                if is_due(usage, counts, self._now()):
                    due.append((not found, (usage and usage.last_used_at) or "", key, counts))

        due.sort(key=lambda entry: entry[:2])
        turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        due.sort(key=lambda entry: (entry[0], next(turns[entry[2].metadata.namespace])))
        return [entry[2:] for entry in due]

    async def _read_replicas(self, session: aiohttp.ClientSession, client: Client, now: float) -> None:
        """Read all replicas, and forget those that have ended long ago."""
        try:
            pods = (await client.list(PODS, CONTROLLER_NAMESPACE, label_selector=_PODS)).items
        except (ApiError, Unreachable) as error:
            log.warning("gateway_pods_not_listed", error=str(error))
            self._replicas = None
            return
        # A pod that is asked to stop still counts.
        urls = {pod["metadata"]["name"]: find_usage_url(pod) for pod in pods if pod["status"].get("phase") == "Running"}
        names = list(urls)[:MOST_COUNTED_REPLICAS]
        answers = dict(
            zip(names, await asyncio.gather(*(_read_usage(session, urls[name]) for name in names)), strict=True)
        )

        unread = {name for name in urls if answers.get(name) is None}
        for name in unread - self._unread:
            log.warning("gateway_usage_not_read", pod=name, url=urls[name])
        self._unread = unread

        for answer in answers.values():
            if answer is not None:
                self._readings[answer.replica] = _Reading(now, answer.keys)
        self._readings = {name: reading for name, reading in self._readings.items() if reading.at >= now - KEPT_SECONDS}
        self._replicas = frozenset(self._readings) if urls and not unread else None


def find_usage_url(pod: Obj) -> str | None:
    """Return where a replica of the gateway says what it has counted; None if its pod has no such port."""
    ports = [port for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    numbers = [port["containerPort"] for port in ports if port.get("name") == _PORT]
    address = pod["status"].get("podIP")
    return f"{Endpoint(address, numbers[0]).url}{USAGE_PATH}" if numbers and address else None


async def _read_usage(session: aiohttp.ClientSession, url: str | None) -> ReplicaUsage | None:
    text = await read_answer(session, url, MOST_BYTES) if url is not None else None
    try:
        return msgspec.json.decode(text, type=ReplicaUsage) if text is not None else None
    except msgspec.MsgspecError:
        return None
