"""Leader election and host leases against a real API server."""

import asyncio
import contextlib
from datetime import UTC, datetime

import pytest

from kube.client import Client
from kube.errors import LeadershipLost
from kube.lease import Elector, HeldElsewhereError, HostLease
from kube.resources import LEASES
from kube.time import micro_time
from kube.transport import Request
from tests.support.api_faults import Fault, FaultyTransport, nth
from tests.support.background import running
from tests.support.eventually import eventually

MANAGER = "pomona-test"
LONG_SECONDS = 600
"""Duration of a lease that is neither lost nor taken over however long a busy machine stops one of its processes."""


def elector(client: Client, namespace: str, identity: str, duration_seconds: int = 5) -> Elector:
    return Elector(
        client,
        namespace,
        "leader",
        identity,
        duration_seconds=duration_seconds,
        renew_deadline_seconds=duration_seconds - 2.0,
        retry_seconds=0.2,
    )


async def holder(client: Client, namespace: str) -> str:
    return str((await client.get(LEASES, "leader", namespace))["spec"]["holderIdentity"])


class Work:
    """Work that never ends; `going` is True while it runs."""

    going = False

    async def __call__(self) -> None:
        self.going = True
        try:
            await asyncio.Event().wait()
        finally:
            self.going = False


async def test_next_elector_leads_at_once_when_the_leader_stops(client: Client, namespace: str) -> None:
    # The Lease does not expire during this test: the second elector leads because the first has released it.
    first, second = (elector(client, namespace, name, LONG_SECONDS) for name in ("first", "second"))
    first_work, second_work = Work(), Work()
    leading = asyncio.create_task(first.run(first_work))
    await eventually(lambda: first_work.going)
    async with running(second.run(second_work)):
        assert not second_work.going
        leading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leading
        assert await holder(client, namespace) in ("", "second"), "released"
        await eventually(lambda: second_work.going)
        assert not first_work.going
    lease = await client.get(LEASES, "leader", namespace)
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("", 2)


async def test_a_leader_cut_off_stops_before_another_takes_over(
    faulty: Client, transport: FaultyTransport, client: Client, namespace: str
) -> None:
    first, second = elector(faulty, namespace, "first"), elector(client, namespace, "second")
    stopped_at = took_at = 0.0
    leads = asyncio.Event()
    now = asyncio.get_running_loop().time

    async def first_work() -> None:
        nonlocal stopped_at
        try:
            leads.set()
            await asyncio.Event().wait()
        finally:
            stopped_at = now()

    async def second_work() -> None:
        nonlocal took_at
        took_at = now()
        await asyncio.Event().wait()

    leading = asyncio.create_task(first.run(first_work))
    await leads.wait()
    async with running(second.run(second_work)):
        await asyncio.sleep(0.5)
        transport.plan = lambda _: Fault.HANG
        with pytest.raises(LeadershipLost, match="was not renewed"):
            await leading
        assert stopped_at
        await eventually(lambda: took_at)
    assert 0 < stopped_at < took_at


async def test_led_work_of_a_suspended_process_is_told_before_it_is_cancelled(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = elector(client, namespace, "first", LONG_SECONDS)
    with pytest.raises(LeadershipLost):
        first.require_leadership()

    async def work() -> None:
        first.require_leadership()
        resumed = asyncio.get_running_loop().time() + LONG_SECONDS
        monkeypatch.setattr("kube.lease._now", lambda: resumed)
        with pytest.raises(LeadershipLost, match=f"lease {namespace}/leader was not renewed for 598"):
            first.require_leadership()

    await first.run(work)
    monkeypatch.undo()
    with pytest.raises(LeadershipLost):
        first.require_leadership()


async def test_a_renewal_with_a_lost_answer_keeps_the_leadership(
    faulty: Client, transport: FaultyTransport, namespace: str
) -> None:
    first = elector(faulty, namespace, "first", LONG_SECONDS)
    writes = 0

    def mostly_unlucky(request: Request) -> Fault | None:
        nonlocal writes
        if request.method != "PATCH":
            return None
        writes += 1
        return (None, Fault.CUT, Fault.TWICE)[writes % 3]

    transport.plan = mostly_unlucky
    work = Work()
    async with running(first.run(work)):
        await eventually(lambda: writes > 12)
        assert work.going
        transport.plan = lambda _: None


async def test_a_leader_that_stops_during_a_renewal_releases_the_lease(
    faulty: Client, transport: FaultyTransport, client: Client, namespace: str
) -> None:
    work, renewing = Work(), asyncio.Event()
    leading = asyncio.create_task(elector(faulty, namespace, "first", LONG_SECONDS).run(work))
    await eventually(lambda: work.going)
    before = (await client.get(LEASES, "leader", namespace))["metadata"]["resourceVersion"]

    async def renewed() -> bool:
        return bool((await client.get(LEASES, "leader", namespace))["metadata"]["resourceVersion"] != before)

    def unanswered(request: Request) -> Fault | None:
        renewing.set()
        return Fault.MUTE if request.method == "PATCH" else None

    transport.plan = unanswered
    await renewing.wait()
    await eventually(renewed)
    transport.plan = lambda _: None
    leading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leading
    assert await holder(client, namespace) == ""


async def test_a_lease_taken_by_force_is_given_up(client: Client, namespace: str) -> None:
    first = elector(client, namespace, "first", LONG_SECONDS)
    work = Work()
    leading = asyncio.create_task(first.run(work))
    await eventually(lambda: work.going)
    thief = {"metadata": {"namespace": namespace, "name": "leader"}, "spec": {"holderIdentity": "thief"}}
    await client.apply(LEASES, thief, field_manager="thief")
    with pytest.raises(LeadershipLost, match="is held by thief"):
        await leading
    assert await holder(client, namespace) == "thief", "not released by who does not hold it"


async def test_failing_work_releases_the_lease_and_raises_its_error(client: Client, namespace: str) -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await elector(client, namespace, "first").run(work)
    assert await holder(client, namespace) == ""


async def test_a_hosts_lease_is_renewed_through_failures(
    faulty: Client, transport: FaultyTransport, client: Client, namespace: str
) -> None:
    renewals = 0

    def renewed() -> None:
        nonlocal renewals
        renewals += 1

    transport.plan = nth(2, Fault.HANG)
    async with running(HostLease(faulty, namespace, "host", "a", MANAGER).keep_renewed(0.2, renewed)):
        await eventually(lambda: renewals >= 2)
        before, seen = await client.get(LEASES, "host", namespace), renewals
        await eventually(lambda: renewals >= seen + 2)
        after = await client.get(LEASES, "host", namespace)
    assert after["spec"]["holderIdentity"] == "a"
    assert after["spec"]["leaseDurationSeconds"] == 40
    assert after["spec"]["renewTime"] > before["spec"]["renewTime"]


async def test_a_hosts_lease_that_was_taken_over_is_not_taken_back(client: Client, namespace: str) -> None:
    renewals = 0

    def renewed() -> None:
        nonlocal renewals
        renewals += 1

    first = asyncio.create_task(HostLease(client, namespace, "host", "a", MANAGER).keep_renewed(0.1, renewed))
    await eventually(lambda: renewals)
    lease = {"metadata": {"namespace": namespace, "name": "host"}}
    spec = {"holderIdentity": "b", "leaseDurationSeconds": 40}
    await client.apply(LEASES, lease | {"spec": spec | {"renewTime": "2026-11-21T12:00:00.000000Z"}}, field_manager="b")

    async def renews_until_it_is_noticed() -> bool:
        now = micro_time(datetime.now(UTC))
        await client.apply(LEASES, lease | {"spec": spec | {"renewTime": now}}, field_manager="b")
        return first.done()

    await eventually(renews_until_it_is_noticed)
    with pytest.raises(HeldElsewhereError, match="held by b"):
        await first
