"""Liveness of hosts: alive, expired or stopped, by the renewals of the Lease and through outages of the API."""

from datetime import timedelta

import pytest

from controller.hosts.liveness import MOST_DURATION_SECONDS, HostLiveness, Lease, read_lease
from kube.time import micro_time
from tests.support.api_objects import NOW, lease


class SimulatedHosts:
    """Hosts that renew or not, an API server that is reachable or not, and a clock that a test advances."""

    def __init__(self) -> None:
        self.liveness = HostLiveness()
        self.clock = 1000.0
        self.leases: dict[str, Lease] = {}

    def renew(self, *hosts: str) -> None:
        for host in hosts:
            renewed = (NOW + timedelta(seconds=self.clock - 1000)).isoformat()
            self.leases[host] = Lease(host, renewed, 40)

    def read(self, *registered: str) -> set[str]:
        today = NOW + timedelta(seconds=self.clock - 1000)
        return self.liveness.observe(registered, self.leases.values(), self.clock, today)

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
    assert hosts.liveness.state("one") == "Alive"
    assert hosts.liveness.wait_seconds("one", hosts.clock) is None


@pytest.mark.parametrize("renewed", ["", "soon", NOW.replace(tzinfo=None).isoformat()])
def test_renewal_without_a_usable_time_proves_nothing_at_first(renewed: str) -> None:
    hosts = SimulatedHosts()
    hosts.leases["one"] = Lease("one", renewed, 40)
    hosts.read()
    assert hosts.liveness.state("one") == "Unproven"
    hosts.pass_seconds(10, renewing=("one",))
    assert hosts.liveness.state("one") == "Alive"


def test_host_expires_after_its_lease_duration_and_not_earlier() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one", "two")
    hosts.read()
    hosts.pass_seconds(39, renewing=("two",))
    assert hosts.liveness.state("one") == "Alive"
    hosts.pass_seconds(1, renewing=("two",))
    assert (hosts.liveness.state("one"), hosts.liveness.state("two")) == ("Expired", "Alive")


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
    assert hosts.liveness.state("one") == "Alive"


def test_api_outage_expires_no_host() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(30)
    hosts.pass_seconds(120, api=False)
    hosts.read()
    hosts.pass_seconds(39)
    assert hosts.liveness.state("one") == "Alive", "its time starts anew with the API server"
    hosts.pass_seconds(1)
    assert hosts.liveness.state("one") == "Expired"


def test_short_gap_between_reads_is_no_outage() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    for _ in range(4):
        hosts.pass_seconds(9, api=False)
        hosts.read()
    hosts.pass_seconds(4)
    assert hosts.liveness.state("one") == "Expired"


def test_outage_does_not_revive_an_expired_host() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.pass_seconds(40)
    hosts.pass_seconds(60, api=False)
    assert hosts.read() == set()
    assert hosts.liveness.state("one") == "Expired"


def test_new_leader_gives_each_host_a_whole_lease_duration() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.clock += 500
    hosts.read()
    assert hosts.liveness.state("one") == "Unproven", "an old renewal at first sight proves nothing"
    hosts.pass_seconds(39)
    assert hosts.liveness.state("one") == "Unproven"
    hosts.pass_seconds(1)
    assert hosts.liveness.state("one") == "Expired"
    hosts.liveness.restart()
    hosts.read()
    assert hosts.liveness.state("one") == "Unproven"


def test_first_fresh_renewal_is_enough_to_be_bound() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.clock += 39
    hosts.read()
    assert hosts.liveness.state("one") == "Alive"


def test_registered_host_without_lease_expires() -> None:
    hosts = SimulatedHosts()
    hosts.read("one")
    assert hosts.liveness.state("one") == "Unproven"
    for _ in range(40):
        hosts.clock += 1
        hosts.read("one")
    assert hosts.liveness.state("one") == "Expired"


def test_removed_host_is_forgotten() -> None:
    hosts = SimulatedHosts()
    hosts.renew("one")
    hosts.read()
    hosts.leases.clear()
    assert hosts.read() == {"one"}
    assert hosts.liveness.state("one") == "Unproven"


def test_read_lease() -> None:
    renewed = micro_time(NOW)
    assert read_lease(lease("one", renewed, 15)) == Lease("one", renewed, 15.0)
    assert read_lease({"metadata": {"name": "one"}}) == Lease("one", "", 40.0)


@pytest.mark.parametrize(("ahead_seconds", "liveness"), [(2, "Alive"), (3600, "Unproven")])
def test_renew_time_in_the_future_is_ignored(ahead_seconds: int, liveness: str) -> None:
    hosts = HostLiveness()
    hosts.observe([], [Lease("one", (NOW + timedelta(seconds=ahead_seconds)).isoformat(), 40)], 0, NOW)
    assert hosts.state("one") == liveness


def test_missing_renew_time_is_not_fresh() -> None:
    hosts = HostLiveness()
    hosts.observe([], [Lease("one", "soon", 40)], 0, NOW)
    assert hosts.state("one") == "Unproven"


def test_lease_without_an_end_expires_like_any_other() -> None:
    stated = {"metadata": {"name": "studio-1"}, "spec": {"renewTime": "x", "leaseDurationSeconds": 2**31 - 1}}
    assert read_lease(stated).duration_seconds == MOST_DURATION_SECONDS
