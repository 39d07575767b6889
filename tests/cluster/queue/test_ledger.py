"""The ledger on the real API server: of two leaders only the last may write, and a damaged ledger loses nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from controller.placement.ledger import LEDGER, Claim, FreedPlace, LedgerLost, QueueLedger
from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Client, Obj
from kube.errors import Conflict
from kube.resources import CONFIG_MAPS
from tests.controlplane.plane import ControlPlane

CLAIMS = {"uid-1": Claim(kind="pod", namespace="team", names=("chat-1",), cells=("node/n1",), service="chat")}
FREED = (
    FreedPlace(service="uid-s", unit="uid-2", namespace="team", name="chat-2", enqueued_at="2026-01-01T00:00:00Z"),
)


@pytest_asyncio.fixture(autouse=True)
async def no_ledger(plane: ControlPlane) -> AsyncIterator[None]:
    """Begin and end without a ledger; the controller of other tests is not running."""
    path = CONFIG_MAPS.path(CONTROLLER_NAMESPACE, LEDGER)
    await plane.request("DELETE", path, accept={404})
    yield
    await plane.request("DELETE", path, accept={404})


async def test_a_leader_finds_what_the_last_one_had_begun(client: Client) -> None:
    first = QueueLedger(client, "one")
    await first.take_over()
    await first.write(CLAIMS, FREED)
    content = await QueueLedger(client, "two").take_over()
    assert (content.claims, content.freed, content.leader) == (CLAIMS, FREED, "one")


async def test_a_leader_that_was_overtaken_writes_nothing_more(client: Client) -> None:
    first, second = QueueLedger(client, "one"), QueueLedger(client, "two")
    await first.take_over()
    await second.take_over()
    with pytest.raises(LedgerLost):
        await first.write(CLAIMS, ())
    with pytest.raises(LedgerLost, match="not taken over"):
        await first.write(CLAIMS, ())
    await second.write({}, FREED)
    assert (await QueueLedger(client, "three").take_over()).claims == {}


async def test_of_two_leaders_that_create_the_ledger_at_once_one_has_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, both_looked = client.get, asyncio.Barrier(2)

    async def get_together(*arguments: Any) -> Obj:
        try:
            return await get(*arguments)
        finally:
            await both_looked.wait()

    ledgers = QueueLedger(client, "one"), QueueLedger(client, "two")
    with monkeypatch.context() as patched:
        patched.setattr(client, "get", get_together)
        answers = await asyncio.gather(*(ledger.take_over() for ledger in ledgers), return_exceptions=True)
    winner, loser = ledgers if isinstance(answers[1], Conflict) else reversed(ledgers)
    assert sorted(type(answer).__name__ for answer in answers) == ["Conflict", "LedgerContent"]
    with pytest.raises(LedgerLost, match="not taken over"):
        await loser.write({}, ())
    await winner.write(CLAIMS, FREED)
    assert (await loser.take_over()).claims == CLAIMS
    with pytest.raises(LedgerLost):
        await winner.write({}, ())


async def test_of_two_leaders_that_take_over_in_turn_the_last_one_has_the_ledger(client: Client) -> None:
    first, second = QueueLedger(client, "one"), QueueLedger(client, "two")
    await first.take_over()
    await first.write(CLAIMS, ())
    await second.take_over()
    await second.write(CLAIMS, FREED)
    await first.take_over()
    with pytest.raises(LedgerLost):
        await second.write({}, ())


@pytest.mark.parametrize("text", ["", "{", '{"claims": 7}', '{"generation": "x"}', "\u0000"])
async def test_a_damaged_ledger_counts_as_empty_and_is_replaced(client: Client, text: str) -> None:
    ledger = QueueLedger(client, "one")
    await ledger.take_over()
    operation = {"op": "add", "path": "/data", "value": {"ledger.json": text}}
    await client.patch_json(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE, [operation])
    with pytest.raises(LedgerLost):
        await ledger.write(CLAIMS, ())
    state = await ledger.take_over()
    assert (state.claims, state.is_incomplete) == ({}, True)
    state = await QueueLedger(client, "two").take_over()
    assert (state.claims, state.is_incomplete) == ({}, True), "the first one has not said otherwise"
    third = QueueLedger(client, "three")
    await third.take_over()
    await third.write(CLAIMS, ())
    state = await QueueLedger(client, "two").take_over()
    assert (state.claims, state.is_incomplete) == (CLAIMS, False)


async def test_a_deleted_ledger_begins_anew(client: Client) -> None:
    ledger = QueueLedger(client, "one")
    await ledger.take_over()
    await client.delete(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE)
    with pytest.raises(LedgerLost):
        await ledger.write(CLAIMS, ())
    content = await ledger.take_over()
    assert (content.claims, content.is_incomplete) == ({}, True)
    await ledger.write(CLAIMS, ())
    assert not (await QueueLedger(client, "two").take_over()).is_incomplete


LARGE = Claim(kind="gang", namespace="n" * 63, names=("p" * 253,) * 256, cells=("node/" + "n" * 63,) * 256)
"""Two of it are all that may be claimed at once. Tenants choose the names of pods."""


async def test_the_oldest_freed_places_are_dropped_before_the_object_is_too_large(client: Client) -> None:
    ledger = QueueLedger(client, "one")
    await ledger.take_over()
    many = tuple(
        FreedPlace(
            service="0" * 36,
            unit=f"{number:036}",
            namespace="n" * 63,
            name="p" * 253,
            enqueued_at="2026-01-01T00:00:00Z",
        )
        for number in range(5000)
    )
    large = {f"gang-{number}": LARGE for number in range(2)}
    await ledger.write(large, many)
    content = await QueueLedger(client, "two").take_over()
    assert content.claims == large
    kept = content.freed
    assert (kept[-1], len(kept) < len(many)) == (many[-1], True)
