"""The usage of a key: a sum over replicas that start, end and cannot be read, added by leaders that start anew."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from controller.gateway.key_usage import SHOWN_SECONDS, KeyCounts, add_counts, encode_usage, is_due
from crds.gatewaykey import MOST_COUNTED_REPLICAS, CountedReplica, GatewayKeyUsage
from crds.meta import LARGEST_AMOUNT
from gateway.cluster.usage import KeyCount
from kube.time import rfc3339
from tests.support.api_objects import NOW

MINUTE = timedelta(minutes=1)


def counts(*, known: bool = True, **by_replica: int) -> KeyCounts:
    """Return counts of replicas, with ten tokens for each request."""
    found = {name: KeyCount(requests, 10 * requests) for name, requests in by_replica.items() if requests}
    return KeyCounts(found, by_replica.keys() if known else None)


def test_usage_is_the_sum_over_replicas() -> None:
    usage = add_counts(None, counts(a=3, b=4), NOW)
    assert (usage.requests, usage.tokens, usage.last_used_at, usage.since) == (7, 70, rfc3339(NOW), rfc3339(NOW))
    later = add_counts(usage, counts(a=5, b=4), NOW + MINUTE)
    assert (later.requests, later.tokens, later.since) == (9, 90, rfc3339(NOW))


def test_addition_may_be_repeated_and_an_old_count_changes_nothing() -> None:
    usage = add_counts(None, counts(a=5), NOW)
    assert add_counts(usage, counts(a=5), NOW) == usage
    assert add_counts(usage, counts(a=3), NOW) == usage


def test_what_an_ended_replica_has_counted_stays_and_its_successor_counts_from_0() -> None:
    usage = add_counts(None, counts(a=5), NOW)
    usage = add_counts(usage, counts(b=2), NOW)
    assert (usage.requests, [entry.replica for entry in usage.counted]) == (7, ["b"])


def test_replica_that_comes_back_is_not_counted_anew() -> None:
    usage = add_counts(None, counts(a=5, b=1), NOW)
    usage = add_counts(usage, counts(b=2, known=False), NOW)
    assert usage.requests == 7
    assert add_counts(usage, counts(a=6, b=2), NOW).requests == 8


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["use", "restart", "hide", "write"])), max_size=40))
def test_no_request_is_lost_or_counted_twice(steps: list[tuple[str, str]]) -> None:
    """Whatever the order of uses, restarts, unread replicas and writes: what was read is in the sum, once."""
    usage: GatewayKeyUsage | None = None
    running = {"a": ("a0", 0), "b": ("b0", 0)}
    ended: dict[str, int] = {}
    hidden: set[str] = set()
    used = restarts = 0
    for replica, step in [*steps, ("a", "show"), ("a", "write")]:
        name, requests = running[replica]
        if step == "use":
            running[replica], used = (name, requests + 1), used + 1
        elif step == "restart" and replica not in hidden:
            ended[name], restarts = requests, restarts + 1  # it was read before it ended
            running[replica] = (f"{replica}{restarts}", 0)
        elif step == "hide":
            hidden.add(replica)
        elif step == "show":
            hidden.clear()
        elif step == "write":
            read = {name: count for place, (name, count) in running.items() if place not in hidden}
            usage = add_counts(usage, counts(known=not hidden, **ended, **read), NOW)
    assert usage is not None
    assert usage.requests == used


def test_last_use_is_when_the_controller_found_new_requests() -> None:
    """The clocks of replicas may be ahead or behind: neither changes how often a usage is written."""
    usage = add_counts(None, counts(a=1), NOW)
    assert add_counts(usage, counts(a=1), NOW + MINUTE).last_used_at == rfc3339(NOW)
    assert add_counts(usage, counts(a=2), NOW + MINUTE).last_used_at == rfc3339(NOW + MINUTE)


def test_sums_and_replicas_are_bounded() -> None:
    most = GatewayKeyUsage(
        since="", requests=LARGEST_AMOUNT, tokens=LARGEST_AMOUNT, counted=[CountedReplica(replica="a")]
    )
    usage = add_counts(most, counts(known=False, **{f"r{number}": 1 for number in range(MOST_COUNTED_REPLICAS)}), NOW)
    assert (usage.requests, usage.tokens, len(usage.counted)) == (LARGEST_AMOUNT, LARGEST_AMOUNT, MOST_COUNTED_REPLICAS)
    assert usage.counted[0].replica == "r0"


def test_replicas_beyond_the_limit_are_not_counted_again_and_make_no_writes() -> None:
    """60 processes within half an hour: 20 replicas and two rollouts, or three pods that crash each 90 s."""
    names = [f"r{number}" for number in range(MOST_COUNTED_REPLICAS + 10)]
    usage = add_counts(None, counts(known=True, **dict.fromkeys(names, 10)), NOW)
    for minutes in (10, 20):
        found, now = counts(known=True, **dict.fromkeys(names, 10)), NOW + timedelta(minutes=minutes)
        assert not is_due(usage, found, now)
        usage = add_counts(usage, found, now)
        names.reverse()  # another leader has read them in another order
    assert usage.requests == 10 * MOST_COUNTED_REPLICAS
    for name in [entry.replica for entry in usage.counted[:10]]:
        names.remove(name)  # they have ended long ago
    usage = add_counts(usage, counts(known=True, **dict.fromkeys(names, 10)), NOW)
    assert usage.requests == 10 * (MOST_COUNTED_REPLICAS + 10)


def test_replica_that_is_read_keeps_its_entry_while_another_one_cannot_be_read() -> None:
    usage: GatewayKeyUsage | None = None
    for number in range(MOST_COUNTED_REPLICAS + 10):  # each restart of another replica
        usage = add_counts(usage, counts(known=False, living=1000, **{f"r{number}": 1}), NOW)
    assert usage is not None
    assert usage.requests == 1000 + MOST_COUNTED_REPLICAS + 10


def test_usage_is_written_once_in_ten_minutes() -> None:
    assert is_due(None, counts(a=1), NOW)
    usage = add_counts(None, counts(a=1), NOW)
    assert not is_due(usage, counts(a=1), NOW + timedelta(days=1))
    assert not is_due(usage, counts(a=2), NOW + timedelta(seconds=SHOWN_SECONDS - 1))
    assert is_due(usage, counts(a=2), NOW + timedelta(seconds=SHOWN_SECONDS))


def test_unused_key_is_written_once_and_only_if_all_replicas_were_read() -> None:
    assert not is_due(None, counts(known=False), NOW)
    assert is_due(None, counts(a=0), NOW)
    usage = add_counts(None, counts(a=0), NOW)
    assert encode_usage(usage) == {"since": rfc3339(NOW), "requests": 0, "tokens": 0}
    assert not is_due(usage, counts(a=0), NOW + MINUTE)
    assert is_due(usage, counts(a=1), NOW + MINUTE)
