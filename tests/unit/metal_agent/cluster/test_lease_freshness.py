"""The time in which a host may make an endpoint ready, by both clocks."""

from metal_agent.cluster.endpoint_slices import LEASE_SECONDS, Clocks, Freshness


def at(seconds: float, wall: float | None = None) -> Clocks:
    return Clocks(seconds, 1_700_000_000 + (seconds if wall is None else wall))


def test_host_may_serve_only_after_first_renewal_and_fresh_list() -> None:
    fresh = Freshness()
    assert not fresh.may_serve(at(0))
    assert fresh.note_renewal(at(0))
    assert not fresh.may_serve(at(0))
    fresh.has_fresh_list = True
    assert fresh.may_serve(at(1))
    assert not fresh.note_renewal(at(10))


def test_host_may_not_serve_with_an_expired_lease() -> None:
    fresh = Freshness(at(0), has_fresh_list=True)
    assert fresh.may_serve(at(LEASE_SECONDS - 1))
    assert not fresh.may_serve(at(LEASE_SECONDS))


def test_gap_requires_a_fresh_list() -> None:
    fresh = Freshness(at(0), has_fresh_list=True)
    assert fresh.note_renewal(at(60))
    assert not fresh.may_serve(at(60))


def test_sleep_is_a_gap_although_the_monotonic_clock_stood_still() -> None:
    fresh = Freshness(at(0), has_fresh_list=True)
    assert not fresh.may_serve(at(1, wall=3600))
    assert fresh.note_renewal(at(1, wall=3600))
