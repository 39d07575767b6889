from datetime import timedelta

import pytest

from controller.lives import Lease, Lives, read_lease
from kube.time import micro_time
from tests.serving import NOW, lease


class World:
    """Hosts that renew or do not, an API server that is there or not, and a clock that a test moves."""

    def __init__(self) -> None:
        self.lives = Lives()
        self.clock = 1000.0
        self.leases: dict[str, Lease] = {}

    def renew(self, *hosts: str) -> None:
        for host in hosts:
            renewed = (NOW + timedelta(seconds=self.clock - 1000)).isoformat()
            self.leases[host] = Lease(host, renewed, 40)

    def read(self, *registered: str) -> set[str]:
        today = NOW + timedelta(seconds=self.clock - 1000)
        return self.lives.observe(registered, self.leases.values(), self.clock, today)

    def pass_seconds(self, seconds: int, *, renewing: tuple[str, ...] = (), api: bool = True) -> None:
        for _ in range(seconds):
            self.clock += 1
            if api:
                self.renew(*renewing)
                self.read()


def test_a_host_that_renews_lives() -> None:
    world = World()
    world.renew("one")
    assert world.read() == {"one"}
    world.pass_seconds(300, renewing=("one",))
    assert world.lives.life("one") == "Alive"
    assert world.lives.wait_seconds("one", world.clock) is None


def test_a_host_that_stops_renewing_expires_after_its_duration_and_not_earlier() -> None:
    world = World()
    world.renew("one", "two")
    world.read()
    world.pass_seconds(39, renewing=("two",))
    assert world.lives.life("one") == "Alive"
    world.pass_seconds(1, renewing=("two",))
    assert (world.lives.life("one"), world.lives.life("two")) == ("Expired", "Alive")


def test_what_it_ran_counts_as_stopped_after_as_long_again() -> None:
    world = World()
    world.renew("one")
    world.read()
    world.pass_seconds(40)
    assert world.lives.wait_seconds("one", world.clock) == 40
    world.pass_seconds(30)
    assert world.lives.wait_seconds("one", world.clock) == 10
    world.pass_seconds(30)
    assert world.lives.wait_seconds("one", world.clock) == 0


def test_one_renewal_brings_it_back() -> None:
    world = World()
    world.renew("one")
    world.read()
    world.pass_seconds(60)
    world.renew("one")
    assert world.read() == {"one"}
    assert world.lives.life("one") == "Alive"


def test_an_api_outage_withdraws_nobody() -> None:
    world = World()
    world.renew("one")
    world.read()
    world.pass_seconds(30)
    world.pass_seconds(120, api=False)
    world.read()
    world.pass_seconds(39)
    assert world.lives.life("one") == "Alive", "its time starts anew with the API server"
    world.pass_seconds(1)
    assert world.lives.life("one") == "Expired"


def test_a_short_gap_is_no_outage() -> None:
    world = World()
    world.renew("one")
    world.read()
    for _ in range(4):
        world.pass_seconds(9, api=False)
        world.read()
    world.pass_seconds(4)
    assert world.lives.life("one") == "Expired"


def test_an_outage_does_not_bring_back_who_was_expired() -> None:
    world = World()
    world.renew("one")
    world.read()
    world.pass_seconds(40)
    world.pass_seconds(60, api=False)
    assert world.read() == set()
    assert world.lives.life("one") == "Expired"


def test_a_new_leader_gives_everyone_a_whole_duration() -> None:
    world = World()
    world.renew("one")
    world.clock += 500
    world.read()
    assert world.lives.life("one") == "Unproven", "an old renewal at first sight proves nothing"
    world.pass_seconds(39)
    assert world.lives.life("one") == "Unproven"
    world.pass_seconds(1)
    assert world.lives.life("one") == "Expired"
    world.lives.restart()
    world.read()
    assert world.lives.life("one") == "Unproven"


def test_a_fresh_renewal_at_first_sight_is_enough_to_be_bound() -> None:
    world = World()
    world.renew("one")
    world.clock += 39
    world.read()
    assert world.lives.life("one") == "Alive"


def test_a_registered_host_without_a_lease_expires_too() -> None:
    world = World()
    world.read("one")
    assert world.lives.life("one") == "Unproven"
    for _ in range(40):
        world.clock += 1
        world.read("one")
    assert world.lives.life("one") == "Expired"


def test_who_is_gone_is_forgotten() -> None:
    world = World()
    world.renew("one")
    world.read()
    world.leases.clear()
    assert world.read() == {"one"}
    assert world.lives.life("one") == "Unproven"


def test_read_lease() -> None:
    renewed = micro_time(NOW)
    assert read_lease(lease("one", renewed, 15)) == Lease("one", renewed, 15.0)
    assert read_lease({"metadata": {"name": "one"}}) == Lease("one", "", 40.0)


@pytest.mark.parametrize(("ahead_seconds", "life"), [(2, "Alive"), (3600, "Unproven")])
def test_a_renewal_from_the_future_proves_nothing(ahead_seconds: int, life: str) -> None:
    lives = Lives()
    lives.observe([], [Lease("one", (NOW + timedelta(seconds=ahead_seconds)).isoformat(), 40)], 0, NOW)
    assert lives.life("one") == life


def test_a_renew_time_that_is_none_is_not_fresh() -> None:
    lives = Lives()
    lives.observe([], [Lease("one", "soon", 40)], 0, NOW)
    assert lives.life("one") == "Unproven"
