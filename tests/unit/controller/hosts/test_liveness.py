"""Liveness of hosts: alive, expired or stopped, by the renewals of the Lease and through outages of the API."""

from datetime import datetime, timedelta

import pytest

from controller.hosts.liveness import (
    EXPIRIES_SECONDS,
    MOST_DURATION_SECONDS,
    HostDistrust,
    HostLiveness,
    Lease,
    build_stable_condition,
    read_lease,
)
from kube.time import micro_time
from tests.support.api_objects import NOW, as_host, host, lease


class SimulatedHosts:
    """Hosts that renew or not, an API server that is reachable or not, and a clock that a test advances."""

    def __init__(self) -> None:
        self.liveness = HostLiveness()
        self.clock = 1000.0
        self.leases: dict[str, Lease] = {}

    @property
    def today(self) -> datetime:
        return NOW + timedelta(seconds=self.clock - 1000)

    def renew(self, *hosts: str) -> None:
        for name in hosts:
            self.leases[name] = Lease(name, self.today.isoformat(), 40)

    def read(self, *registered: str) -> set[str]:
        return self.liveness.observe(registered, self.leases.values(), self.clock, self.today)

    def pass_seconds(self, seconds: int, *, renewing: tuple[str, ...] = (), api: bool = True) -> None:
        for _ in range(seconds):
            self.clock += 1
            if api:
                self.renew(*renewing)
                self.read()


def test_host_that_renews_stays_alive() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    assert hosts.read() == {"one"}
    hosts.pass_seconds(300, renewing=("one",))
    assert hosts.liveness.find_liveness("one") == "Alive"
    assert hosts.liveness.wait_seconds("one", hosts.clock) is None


@pytest.mark.parametrize("renewed", ["", "soon", NOW.replace(tzinfo=None).isoformat()])
def test_renewal_without_a_usable_time_proves_nothing_at_first(renewed: str) -> None:
    hosts = SimulatedHosts()
    hosts.leases["one"] = Lease("one", renewed, 40)
    hosts.read()
    assert hosts.liveness.find_liveness("one") == "Unproven"
    hosts.pass_seconds(10, renewing=("one",))
    assert hosts.liveness.find_liveness("one") == "Alive"


def test_host_expires_after_its_lease_duration_and_not_earlier() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one", "two")
    hosts.read()
    hosts.pass_seconds(39, renewing=("two",))
    assert hosts.liveness.find_liveness("one") == "Alive"
    hosts.pass_seconds(1, renewing=("two",))
    assert (hosts.liveness.find_liveness("one"), hosts.liveness.find_liveness("two")) == ("Expired", "Alive")


def test_processes_of_expired_host_count_as_stopped_after_another_lease_duration() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(40)
    assert hosts.liveness.wait_seconds("one", hosts.clock) == 40
    hosts.pass_seconds(30)
    assert hosts.liveness.wait_seconds("one", hosts.clock) == 10
    hosts.pass_seconds(30)
    assert hosts.liveness.wait_seconds("one", hosts.clock) == 0


def test_one_renewal_revives_an_expired_host() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(60)
    hosts.renew("one")
    assert hosts.read() == {"one"}
    assert hosts.liveness.find_liveness("one") == "Alive"


def test_api_outage_expires_no_host() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(30)
    hosts.pass_seconds(120, api=False)
    hosts.read()
    hosts.pass_seconds(39)
    assert hosts.liveness.find_liveness("one") == "Alive", "its time starts anew with the API server"
    hosts.pass_seconds(1)
    assert hosts.liveness.find_liveness("one") == "Expired"


def test_short_gap_between_reads_is_no_outage() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    for _ in range(4):
        hosts.pass_seconds(9, api=False)
        hosts.read()
    hosts.pass_seconds(4)
    assert hosts.liveness.find_liveness("one") == "Expired"


def test_outage_does_not_revive_an_expired_host() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(40)
    hosts.pass_seconds(60, api=False)
    assert hosts.read() == set()
    assert hosts.liveness.find_liveness("one") == "Expired"


def test_new_leader_gives_each_host_a_whole_lease_duration() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.clock += 500
    hosts.read()
    assert hosts.liveness.find_liveness("one") == "Unproven", "an old renewal at first sight proves nothing"
    hosts.pass_seconds(39)
    assert hosts.liveness.find_liveness("one") == "Unproven"
    hosts.pass_seconds(1)
    assert hosts.liveness.find_liveness("one") == "Expired"
    hosts.liveness.restart()
    hosts.read()
    assert hosts.liveness.find_liveness("one") == "Unproven"


def test_first_fresh_renewal_is_enough_to_be_bound() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.clock += 39
    hosts.read()
    assert hosts.liveness.find_liveness("one") == "Alive"


def test_registered_host_without_lease_expires() -> None:
    hosts = SimulatedHosts()
    hosts.read("one")
    assert hosts.liveness.find_liveness("one") == "Unproven"
    for _ in range(40):
        hosts.clock += 1
        hosts.read("one")
    assert hosts.liveness.find_liveness("one") == "Expired"


def test_removed_host_is_forgotten() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.leases.clear()
    assert hosts.read() == {"one"}
    assert hosts.liveness.find_liveness("one") == "Unproven"


def test_read_lease() -> None:
    renewed = micro_time(NOW)
    assert read_lease(lease("one", renewed, 15)) == Lease("one", renewed, 15.0)
    assert read_lease({"metadata": {"name": "one"}}) == Lease("one", "", 40.0)
    assert read_lease(lease("one", "x", 2**31 - 1)).duration_seconds == MOST_DURATION_SECONDS, "it would never end"


@pytest.mark.parametrize(("ahead_seconds", "liveness"), [(2, "Alive"), (3600, "Unproven")])
def test_renew_time_in_the_future_is_ignored(ahead_seconds: int, liveness: str) -> None:
    hosts = HostLiveness()
    hosts.observe([], [Lease("one", (NOW + timedelta(seconds=ahead_seconds)).isoformat(), 40)], 0, NOW)
    assert hosts.find_liveness("one") == liveness


def flap(hosts: SimulatedHosts, times: int) -> None:
    """Silence a host until it expires, and bring it back, so many times."""
    for _ in range(times):
        hosts.pass_seconds(41)
        assert hosts.liveness.find_liveness("one") == "Expired"
        hosts.renew("one")
        hosts.read()


def distrust(hosts: SimulatedHosts) -> HostDistrust | None:
    return hosts.liveness.find_distrust("one", hosts.clock, hosts.today)


@pytest.mark.parametrize(("times", "seconds"), [(1, 0), (2, 60), (3, 120), (5, 480), (6, 600), (20, 600)])
def test_host_that_flaps_is_trusted_after_a_growing_time(times: int, seconds: int) -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    flap(hosts, times)
    assert hosts.liveness.find_liveness("one") == "Alive"
    for _ in range(seconds):
        assert distrust(hosts) is not None
        hosts.pass_seconds(1, renewing=("one",))
    assert distrust(hosts) is None


def test_host_is_trusted_again_when_its_expiries_are_an_hour_old() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    flap(hosts, 1)
    hosts.pass_seconds(int(EXPIRIES_SECONDS), renewing=("one",))
    assert hosts.liveness.list_expiries("one", hosts.today) == ()
    flap(hosts, 1)
    assert distrust(hosts) is None


def test_new_leader_trusts_a_flapping_host_no_sooner() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    flap(hosts, 3)
    written = hosts.liveness.list_expiries("one", hosts.today)
    assert written is not None
    assert len(written) == 3
    hosts.liveness.restart()
    assert hosts.liveness.list_expiries("one", hosts.today) is None, "they stay as they are in the status"
    hosts.liveness.observe((), hosts.leases.values(), hosts.clock, hosts.today, lambda _host: written)
    assert hosts.liveness.list_expiries("one", hosts.today) == written
    assert distrust(hosts) == HostDistrust(3, 120.0, 120.0)


def test_expiry_that_an_earlier_leader_counted_is_not_counted_again() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(41)
    written = hosts.liveness.list_expiries("one", hosts.today)
    assert written is not None
    hosts.liveness.restart()
    for _ in range(41):
        hosts.clock += 1
        hosts.liveness.observe((), hosts.leases.values(), hosts.clock, hosts.today, lambda _host: written)
    assert hosts.liveness.find_liveness("one") == "Expired"
    assert hosts.liveness.list_expiries("one", hosts.today) == written


@pytest.mark.parametrize(
    "text", ["", "soon", (NOW + timedelta(days=1)).isoformat(), (NOW - timedelta(days=1)).isoformat()]
)
def test_expiry_that_cannot_be_is_ignored(text: str) -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.liveness.observe((), hosts.leases.values(), hosts.clock, hosts.today, lambda _host: [text, text])
    assert distrust(hosts) is None


def test_stable_condition_says_what_a_flapping_host_gets() -> None:
    observed = as_host(host("studio-1"))
    assert build_stable_condition(observed, [], None) is None
    flapping = build_stable_condition(observed, ["2026-11-21T12:00:00Z"], HostDistrust(3, 120.0, 50.0))
    assert flapping is not None
    assert (flapping["status"], flapping["reason"]) == ("False", "Flapping")
    assert "3 times within an hour" in flapping["message"]
    assert "alive for 120 seconds" in flapping["message"]
    later = build_stable_condition(observed, ["2026-11-21T12:00:00Z"], HostDistrust(3, 120.0, 10.0))
    assert later == flapping, "it is not written again every second"
    stable = build_stable_condition(observed, ["2026-11-21T12:00:00Z"], None)
    assert stable is not None
    assert stable["status"] == "True"
