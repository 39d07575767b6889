"""The usage of a GatewayKey in its status: the sum of the counts of all replicas of the gateway.

Each replica counts from 0 when it starts. The status notes how much of each replica its sums include, so that an
addition may be repeated, by another leader, too: it adds only what that replica has counted since. Billing has another
source, the log of the gateway: the last requests of a replica that dies are not in here.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
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
    requests, tokens, counted = usage.requests, usage.tokens, []
    included = {entry.replica: entry for entry in usage.counted}

    # Only replicas with an entry are counted: of more than the limit, the last of this list. A replica that is read
    # keeps its entry, without which it would be counted anew; one that could not be read may come back, or has ended.
    known = included if counts.replicas is None else counts.replicas
    unread = [name for name in included if name in known and name not in counts.by_replica]
    for name in [*unread, *sorted(counts.by_replica, key=included.__contains__)][-MOST_COUNTED_REPLICAS:]:
        before = included.get(name, CountedReplica(replica=name))
        count = counts.by_replica.get(name, KeyCount(0, 0))
        # A count is never less than before, unless it is an old one.
        entry = CountedReplica(
            replica=name, requests=max(count.requests, before.requests), tokens=max(count.tokens, before.tokens)
        )
        requests += entry.requests - before.requests
        tokens += entry.tokens - before.tokens
        counted.append(entry)

    return GatewayKeyUsage(
        since=usage.since,
        requests=min(requests, LARGEST_AMOUNT),
        tokens=min(tokens, LARGEST_AMOUNT),
        last_used_at=rfc3339(now) if requests > usage.requests else usage.last_used_at,
        counted=counted,
    )


def is_due(shown: GatewayKeyUsage | None, counts: KeyCounts, now: datetime) -> bool:
    """Return whether the usage of a key is to be written.

    It is if requests have come and the last use that the status shows is ten minutes old. That a key was not used is
    written once: when all replicas of the gateway could be read.
    """
    if shown is None:
        return bool(counts.by_replica) or counts.replicas is not None
    # Texts of this form sort by their time.
    is_recent = (shown.last_used_at or "") > rfc3339(now - timedelta(seconds=SHOWN_SECONDS))
    return not is_recent and add_counts(shown, counts, now).requests > shown.requests


def encode_usage(usage: GatewayKeyUsage) -> Obj:
    """Return the usage as the status has it: also a sum that is 0, which is not unknown."""
    return without_defaults(usage) | {"requests": usage.requests, "tokens": usage.tokens}
