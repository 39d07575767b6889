"""The usage of a GatewayKey in its status: the sum of the counts of all replicas of the gateway.

Each replica counts from 0 when it starts. The status notes how much of each replica its sums include, so that an
addition may be repeated, by another leader, too: it adds only what that replica has counted since. Billing has another
source, the log of the gateway: the last requests of a replica that dies are not in here.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from crds.gatewaykey import MOST_COUNTED_REPLICAS, CountedReplica, GatewayKeyUsage
from crds.meta import LARGEST_AMOUNT, without_defaults
from gateway.cluster.usage import KeyCount
from kube.client import Obj
from kube.time import rfc3339

SHOWN_SECONDS: Final = 600.0
"""Time after the last use that a status shows before a later one is written."""


class KeyCounts(NamedTuple):
    """The counts of one key, of all replicas of the gateway."""

    by_replica: Mapping[str, KeyCount]
    replicas: Collection[str] | None
    """All replicas, also those that have ended of late; None: one could not be read."""


def add_counts(shown: GatewayKeyUsage | None, counts: KeyCounts, now: datetime) -> GatewayKeyUsage:
    """Return the usage of a key with all that was counted; `shown` is that of its status, None if it has none."""
    usage = shown or GatewayKeyUsage(since=rfc3339(now))
    requests, tokens, used_at = usage.requests, usage.tokens, usage.last_used_at or ""
    counted = {entry.replica: entry for entry in usage.counted}

    for replica, count in counts.by_replica.items():
        before = counted.get(replica, CountedReplica(replica=replica))
        # A count is never less than before, unless it is an old one.
        entry = CountedReplica(
            replica=replica,
            requests=max(count.requests, before.requests),
            tokens=max(count.tokens, before.tokens),
        )
        requests += entry.requests - before.requests
        tokens += entry.tokens - before.tokens
        # The clock of another node may be ahead.
        used_at = max(used_at, rfc3339(datetime.fromtimestamp(min(count.used_at, now.timestamp()), UTC)))
        counted[replica] = entry

    # A replica that could not be read may come back, and must not be counted anew.
    kept = [entry for name, entry in counted.items() if counts.replicas is None or name in counts.replicas]
    return GatewayKeyUsage(
        since=usage.since,
        requests=min(requests, LARGEST_AMOUNT),
        tokens=min(tokens, LARGEST_AMOUNT),
        last_used_at=used_at or None,
        counted=kept[-MOST_COUNTED_REPLICAS:],
    )


def is_due(shown: GatewayKeyUsage | None, counts: KeyCounts, now: datetime) -> bool:
    """Return whether the usage of a key is to be written.

    It is if requests have come and the last use that the status shows is ten minutes old. That a key was not used is
    written once: when all replicas of the gateway could be read.
    """
    if shown is None:
        return bool(counts.by_replica) or counts.replicas is not None
    # Texts of this form sort by their time.
    if (shown.last_used_at or "") > rfc3339(now - timedelta(seconds=SHOWN_SECONDS)):
        return False
    counted = {entry.replica: entry.requests for entry in shown.counted}
    return any(count.requests > counted.get(replica, 0) for replica, count in counts.by_replica.items())


def encode_usage(usage: GatewayKeyUsage) -> Obj:
    """Return the usage as the status has it: also a sum that is 0, which is not unknown."""
    return without_defaults(usage) | {"requests": usage.requests, "tokens": usage.tokens}
