"""Copies of all services' tokens in the Secrets that the gateway reads, and only these: the token shards.

The gateway must not read the Secrets of tenants. A shard is written when the token of one of its services becomes
known, or another one, and when a service is gone; all changes of a second make one write. Tokens come from the
reconciler of services, which reads each Secret anyway: here, none is read but the shards themselves.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import structlog

from controller.reconcile.indexes import SHARD_INDEX
from controller.reconcile.plan import FIELD_MANAGER, Leading
from controller.services.token_copies import MOST_TOKENS_BYTES, fit_tokens, keep_previous_tokens, read_secret
from controller.services.tokens import KnownTokens
from crds.meta import (
    CONTROLLER_NAMESPACE,
    GATEWAY_SHARDS,
    LABEL_MANAGED_BY,
    MANAGED_BY,
    gateway_shard,
    gateway_token_key,
)
from kube.apply import is_applied
from kube.client import Obj
from kube.errors import ApiError, Unreachable
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey, Resource, object_key
from kube.store import Store

PAUSE_SECONDS: Final = 1.0
"""Pause after each round of writes, whose changes are written together in the next one."""
READ_SECONDS: Final = 600.0
"""Time after which the shards are read again, as others may have edited them."""
OVERLAP_SECONDS: Final = 24 * 3600
"""Time for which a replaced token is kept: pods that load a large model for their successors have it for long."""

log = structlog.get_logger()


class TokenShards:
    """The shards of a leader: a task that writes those whose tokens have changed.

    Args:
        store: the watch cache, whose services have their tokens in the shards.
        tokens: the tokens, as the reconciler of services knows them.
        now: the wall clock.
    """

    def __init__(
        self, store: Store, tokens: KnownTokens, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._now = now
        self._stale: set[str] = set()
        """Shards that may have to be written."""
        self._changed = asyncio.Event()
        self._stored: dict[str, Obj] = {}
        """The shards that exist, as they were read or written last."""
        tokens.subscribe(self._mark)
        store.subscribe(self._take_change)

    async def run(self, leading: Leading) -> None:
        """Write the shards while this replica leads; one that cannot be written is tried again."""
        self._read_again()
        while True:
            self._changed.clear()
            stale, self._stale = sorted(self._stale), set()
            for shard in stale:
                try:
                    await self._write(leading, shard)
                except (ApiError, Unreachable) as error:
                    log.warning("token_shard_not_written", shard=shard, error=str(error))
                    self._stored.pop(shard, None)
                    self._stale.add(shard)
            await asyncio.sleep(PAUSE_SECONDS)
            if not self._stale:
                await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait until a shard may have to be written, or until it is time to read all of them again."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            self._read_again()

    def _read_again(self) -> None:
        self._stored.clear()
        self._stale.update(GATEWAY_SHARDS)

    def _mark(self, service: ObjectKey) -> None:
        self._stale.add(gateway_shard(*service))
        self._changed.set()

    def _take_change(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """Mark the shard of a service that is gone; the token of a new one becomes known by and by."""
        if resource == INFERENCE_SERVICES and old is not None and new is None:
            self._mark(object_key(old))

    async def _write(self, leading: Leading, shard: str) -> None:
        """Write a shard if it differs. Raises as `Client`, or LeadershipLost."""
        stored = self._stored.get(shard) or await read_secret(leading.client, CONTROLLER_NAMESPACE, shard)
        existing: Mapping[str, str] = (stored or {}).get("data") or {}
        tokens = self._list_tokens(shard, existing)
        secret = _build_secret(shard, keep_previous_tokens(tokens, tokens, existing, self._now(), OVERLAP_SECONDS))
        if stored is None and not tokens:
            return
        if stored is None or not is_applied(SECRETS, secret, stored, FIELD_MANAGER):
            leading.require_leadership()
            stored = await leading.client.apply(SECRETS, secret, field_manager=FIELD_MANAGER)
        self._stored[shard] = stored

    def _list_tokens(self, shard: str, existing: Mapping[str, str]) -> dict[str, str]:
        """Return the tokens of the services of a shard; one that is not known now stays as the shard has it."""
        tokens: dict[str, str] = {}
        for service in self._store.by_index(INFERENCE_SERVICES, SHARD_INDEX, shard):
            key, uid = object_key(service), service["metadata"]["uid"]
            data_key = gateway_token_key(*key)
            if token := self._tokens.known_token(key, uid) or existing.get(data_key):
                tokens[data_key] = token
        fitting = fit_tokens(tokens)
        if left_out := sorted(tokens.keys() - fitting.keys()):
            log.warning("tokens_left_out", shard=shard, keys=left_out, most_bytes=MOST_TOKENS_BYTES)
        return fitting


def _build_secret(shard: str, data: Mapping[str, str]) -> Obj:
    """Return a shard. Applying it removes the tokens of services that are gone."""
    metadata = {"name": shard, "namespace": CONTROLLER_NAMESPACE, "labels": {LABEL_MANAGED_BY: MANAGED_BY}}
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": metadata,
        "type": "Opaque",
        "data": dict(data),
    }
