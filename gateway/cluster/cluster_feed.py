"""The watches of the gateway: they keep its catalog and its keys equal to the cluster, for ever.

While the API server is away, what was read last stays: clients are served on, and an endpoint that is gone is found
out by the first request that it refuses.
"""

import asyncio
import base64
import binascii
from collections.abc import Mapping

import msgspec

from crds.meta import PREVIOUS_TOKENS_KEY, PreviousToken, read_gateway_token_key
from gateway.cluster.admission import Admissions
from gateway.cluster.catalog import Catalog, ServiceTokens
from gateway.cluster.keys import KeyTable
from gateway.cluster.limiter import Limiter
from gateway.cluster.watched_objects import (
    REPLICA_SELECTION,
    SELECTIONS,
    SHARD_SELECTIONS,
    WatchedShard,
    WatchedSlice,
    get_part,
)
from gateway.event_log import log
from kube.client import Client, Obj
from kube.resources import ObjectKey, Resource
from kube.store import Store
from kube.watch import reflect

_previous_tokens = msgspec.json.Decoder(dict[str, PreviousToken])


class ClusterFeed:
    """The catalog and the keys, as they follow from the cluster.

    Args:
        limiter: the limits of keys and namespaces.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._store = Store()
        # One for each shard: a reflection removes from its store what it does not select.
        self._shards = [Store() for _ in SHARD_SELECTIONS]
        self._listed = [asyncio.Event() for _ in (*SELECTIONS, *SHARD_SELECTIONS)]
        self.catalog = Catalog(self._store)
        self.admissions = Admissions(limiter)
        self.keys = KeyTable(self._store, self.catalog, self.admissions, lambda: self.is_complete)
        self._replicas = Store()
        self._replicas.subscribe(self._count_replicas)
        for shard in self._shards:
            shard.subscribe(self._take_shard)

    @property
    def is_complete(self) -> bool:
        """True once everything was listed."""
        return all(listed.is_set() for listed in self._listed)

    async def wait_until_complete(self) -> None:
        """Wait until everything was listed."""
        for listed in self._listed:
            await listed.wait()

    async def follow(self, client: Client) -> None:
        """Follow the cluster, and end the requests of keys that expire, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keys.end_expired())
            tasks.create_task(reflect(client, self._replicas, REPLICA_SELECTION))
            stores = [self._store] * len(SELECTIONS) + self._shards
            for store, selection, listed in zip(stores, (*SELECTIONS, *SHARD_SELECTIONS), self._listed, strict=True):
                tasks.create_task(reflect(client, store, selection, listed))

    def _count_replicas(self, *_: object) -> None:
        """Share the limits with the replicas of the gateway that are ready now; this one is one of them."""
        slices = [get_part(obj, WatchedSlice) for obj in self._replicas.list(REPLICA_SELECTION.resource)]
        ready = {address for found in slices if found is not None for address in found.find_ready_addresses()}
        self.admissions.limiter.replicas = max(1, len(ready))

    def _take_shard(self, _resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Give the tokens of a shard that differ to their services."""
        before, tokens = (read_tokens(get_part(shard, WatchedShard)) for shard in (old, new))
        differing = {key for key in before.keys() | tokens.keys() if before.get(key) != tokens.get(key)}
        self.catalog.set_tokens(tokens, differing)


def read_tokens(shard: WatchedShard | None) -> Mapping[ObjectKey, ServiceTokens]:
    """Return the tokens in a Secret by service; an entry that cannot be read is left out, and logged."""
    data = (shard.data if shard is not None else None) or {}
    try:
        previous = _previous_tokens.decode(base64.b64decode(data.get(PREVIOUS_TOKENS_KEY) or "e30="))
    except (binascii.Error, ValueError):  # msgspec's errors are ValueErrors
        previous = {}
    tokens = {}
    for key, value in data.items():
        try:
            if key != PREVIOUS_TOKENS_KEY:
                before = previous.get(key)
                former = _decode(before.token) if before else None
                tokens[ObjectKey(*read_gateway_token_key(key))] = ServiceTokens(_decode(value), former)
        except (binascii.Error, ValueError) as error:
            log.warning("token_not_read", entry=key, error=type(error).__name__)
    return tokens


def _decode(value: str) -> str:
    return base64.b64decode(value).decode("ascii").strip()
