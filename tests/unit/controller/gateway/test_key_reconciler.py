"""The life of a key: how it is made, replaced, shared out among GatewayKeys, and what its condition says."""

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gateway.key_reconciler import PROBLEM_SECONDS, decide_key, list_keys_of_service
from controller.gateway.key_usage import KeyCounts
from controller.reconcile.plan import Snapshot
from crds.gatewaykey import MOST_PREVIOUS_KEYS, digest_key
from gateway.cluster.usage import KeyCount
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, ObjectKey
from tests.support.api_objects import NAMESPACE, NOW, service
from tests.unit.controller.gateway.key_objects import KEY, gateway_key, key_secret
from tests.unit.controller.gateway.key_world import APP, CrashError, KeyWorld

DAY = 86_400
OTHER = ObjectKey("others", "thief")


async def test_key_is_made_and_its_digest_reported() -> None:
    world = KeyWorld()
    first = await world.reconcile()
    assert (world.reason(), first.again_seconds) == ("WaitingForKey", 0)
    await world.settle()
    assert world.status()["digest"] == digest_key(world.text())
    assert (world.reason(), "previous" in world.status()) == ("Valid", False)
    assert world.message() == "the gateway accepts the key in Secret app-key"
    assert world.text() not in str(world.object())


async def test_secret_is_read_every_few_minutes() -> None:
    world = KeyWorld()
    plan = await world.settle()
    assert plan.again_seconds is not None
    assert 300 <= plan.again_seconds <= 600
    reads = world.reads
    world.wait(plan.again_seconds - 1)
    await world.settle()
    assert world.reads == reads
    world.wait(1)
    await world.settle()
    assert world.reads == reads + 1


async def test_new_value_of_the_annotation_replaces_the_key_once() -> None:
    world = KeyWorld()
    await world.settle()
    former = world.text()
    world.change(rotate="monday")
    await world.settle()
    after = world.text()
    assert after != former
    assert world.accepts(former)
    assert world.accepts(after)
    rotation = world.status()["rotation"]
    assert (await world.settle()).events == ()
    assert (world.text(), world.status()["rotation"]) == (after, rotation)
    world.wait(DAY)
    await world.settle()
    assert not world.accepts(former)
    assert world.accepts(after)


async def test_replacement_is_an_event_with_the_time_of_the_former_key() -> None:
    world = KeyWorld(gateway_key(overlapSeconds=60))
    await world.settle()
    world.edit()
    world.wait(600)
    plan = await world.reconcile()
    assert [(event.type, event.reason) for event in plan.events] == [("Normal", "KeyReplaced")]
    assert plan.events[0].note == "the key was replaced: the former key is valid until 2026-11-21T12:11:00Z"


async def test_replaced_key_is_dropped_when_its_time_is_over() -> None:
    world = KeyWorld(gateway_key(overlapSeconds=60))
    await world.settle()
    world.change(rotate="monday")
    plan = await world.settle()
    assert plan.again_seconds == 60
    world.wait(60)
    await world.settle()
    assert "previous" not in world.status()


async def test_key_of_the_user_is_followed_before_it_is_replaced() -> None:
    """An edit and a request for another key at once: a client may have the user's key already."""
    world = KeyWorld()
    await world.settle()
    former = world.text()
    world.edit()
    world.change(rotate="monday")
    await world.settle()
    assert world.text() not in {KEY, former}
    assert all(world.accepts(text) for text in (KEY, former, world.text()))


async def test_deleted_secret_is_made_anew_and_its_key_stays_valid_for_the_overlap() -> None:
    world = KeyWorld(gateway_key(rotate="monday"))
    await world.settle()
    former = world.text()
    world.delete_secret()
    world.wait(600)
    await world.settle()
    assert world.text() != former
    assert world.accepts(former)
    assert world.accepts(world.text())


async def test_secret_of_another_owner_is_left_alone() -> None:
    world = KeyWorld()
    foreign = key_secret(owner_uid="uid-other", name="other")
    foreign["metadata"]["name"] = "app-key"
    world.secrets[ObjectKey(NAMESPACE, "app-key")] = foreign
    plan = await world.settle()
    assert (plan.create, plan.patch, world.reason()) == ((), (), "SecretTaken")
    assert "delete it, or choose another name" in world.message()
    assert world.accepted() == set()
    world.delete_secret()
    world.wait(PROBLEM_SECONDS)
    await world.settle()
    assert world.reason() == "Valid"


async def test_secret_that_a_user_made_is_left_alone() -> None:
    world = KeyWorld()
    secret = key_secret()
    del secret["metadata"]["ownerReferences"]
    world.secrets[ObjectKey(NAMESPACE, "app-key")] = secret
    await world.settle()
    assert world.reason() == "SecretTaken"


async def test_secret_of_a_former_key_of_the_name_is_waited_for() -> None:
    world = KeyWorld()
    world.secrets[ObjectKey(NAMESPACE, "app-key")] = key_secret(owner_uid="uid-former")
    plan = await world.settle()
    assert (world.reason(), plan.again_seconds) == ("WaitingForKey", 2)
    assert world.accepted() == set()


async def test_key_whose_secret_may_not_be_read_is_to_be_made_and_keeps_its_digest() -> None:
    """Where the controller is held to other namespaces, the creation is refused, and that is reported."""
    world = KeyWorld()
    await world.settle()
    accepted, world.is_forbidden = world.accepted(), True
    world.wait(600)
    plan = await world.reconcile()
    assert [obj["metadata"]["name"] for _, obj in plan.create] == ["app-key"]
    assert world.accepted() == accepted


async def test_short_key_of_a_user_is_refused_in_words() -> None:
    world = KeyWorld()
    await world.settle()
    former = world.text()
    world.edit("too-short")
    world.wait(600)
    plan = await world.settle()
    assert (world.reason(), plan.again_seconds) == ("InvalidKey", PROBLEM_SECONDS)
    assert "at least 32 printable" in world.message()
    assert world.accepted() == {digest_key(former)}
    world.edit("k" * 32)
    world.wait(PROBLEM_SECONDS)
    await world.settle()
    assert (world.reason(), world.status()["digest"]) == ("Valid", digest_key("k" * 32))


async def test_suspended_and_expired_key_keeps_its_digest() -> None:
    """The gateway answers that the key is suspended, and not that it is unknown."""
    world = KeyWorld(gateway_key(expiresAt="2026-11-21T13:00:00Z"))
    await world.settle()
    digest = world.status()["digest"]
    world.change(suspend=True)
    assert [event.type for event in (await world.reconcile()).events] == ["Normal"]
    assert (world.reason(), world.status()["digest"]) == ("Suspended", digest)
    world.change(suspend=False)
    await world.settle()
    assert world.reason() == "Valid"
    world.wait(3595)
    plan = await world.settle()
    assert plan.again_seconds == 5
    world.wait(5)
    await world.settle()
    assert (world.reason(), world.status()["digest"]) == ("Expired", digest)
    assert "set a later time" in world.message()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "namespace team has no service, and no other one admits it: make an InferenceService, or have"),
        ({"services": ["others/*"]}, "spec.services fits no service that namespace team may use: correct it"),
    ],
)
async def test_key_that_opens_no_service_says_so(spec: dict[str, Any], words: str) -> None:
    world = KeyWorld(gateway_key(**spec), has_service=False)
    await world.settle()
    assert world.reason() == "NoService"
    assert words in world.message()
    admitted = service("chat", access={"namespaces": ["team"]})
    admitted["metadata"]["namespace"] = "others"
    world.store.put(INFERENCE_SERVICES, admitted)
    await world.settle()
    assert world.reason() == "Valid"


async def test_hostile_patterns_hold_nothing_up() -> None:
    """Nothing is said about a key with many patterns that fit none of many services."""
    patterns = ["*/" + "*a" * 58 + "*" + "b" * (number % 7) for number in range(64)]
    world = KeyWorld(gateway_key(services=patterns), has_service=False)
    for number in range(2000):
        shared = service(f"service-{'a' * 25}{number}", access={"namespaces": ["*"]})
        shared["metadata"]["namespace"] = "others"
        world.store.put(INFERENCE_SERVICES, shared)
    await world.settle()
    started = time.process_time()
    await world.settle()
    assert time.process_time() - started < 0.5
    assert world.reason() == "Valid"
    world.change(services=["none"])
    await world.settle()
    assert world.reason() == "NoService"


def test_keys_that_open_a_service_follow_it() -> None:
    world = KeyWorld(
        gateway_key("all"),
        gateway_key("one", services=["chat"]),
        gateway_key("two", services=["code-*"]),
        gateway_key("far", namespace="others"),
        gateway_key("far-one", namespace="others", services=["team/chat"]),
        gateway_key("strange", namespace="strangers"),
    )

    def find(*namespaces: str) -> set[str]:
        keys = list_keys_of_service(world.store, service(access={"namespaces": list(namespaces)}))
        assert len(keys) == len(set(keys))
        return {key.name for key in keys}

    assert find() == {"all", "one"}
    assert find("others", "team") == {"all", "one", "far", "far-one"}
    assert find("*", "others") == {"all", "one", "far", "far-one", "strange"}
    (trigger,) = world.reconciler.triggers
    assert trigger.concerns(None, service())
    assert trigger.concerns(service(), service(access={"namespaces": ["a"]}))
    assert not trigger.concerns(service(), service(replicas=3, status={"phase": "Ready"}))


async def test_without_a_gateway_the_key_says_so_and_has_no_secret() -> None:
    world = KeyWorld()
    plan = decide_key(Snapshot(world.store, NOW), APP, has_gateway=False)
    assert plan.status is not None
    assert (plan.create, plan.status["conditions"][0]["reason"]) == ((), "NoGateway")


async def two_keys() -> KeyWorld:
    """Return a world with a key of team and an older GatewayKey of others."""
    world = KeyWorld(gateway_key(), gateway_key("thief", namespace="others", created="2020-01-01T00:00:00Z"))
    foreign = service()
    foreign["metadata"]["namespace"] = "others"
    world.store.put(INFERENCE_SERVICES, foreign)
    await world.settle(OTHER)
    await world.settle()
    return world


async def two_keys_of_their_own() -> KeyWorld:
    """Return such a world whose team has chosen its key itself: one that was made opens nothing for others."""
    world = await two_keys()
    world.edit(KEY)
    world.wait(600)
    await world.settle()
    return world


async def test_made_key_of_another_is_no_key() -> None:
    world = await two_keys()
    world.edit(world.text(), OTHER)
    world.wait(600)
    await world.settle(OTHER)
    assert world.reason(OTHER) == "InvalidKey"


async def test_key_of_another_is_no_key_of_ones_own() -> None:
    """Else requests with the victim's key would count as the thief's, whose services answer them."""
    world = await two_keys_of_their_own()
    former = world.text(OTHER)
    world.edit(world.text(), OTHER)
    world.wait(600)
    plan = await world.settle(OTHER)
    assert (world.reason(OTHER), plan.again_seconds) == ("KeyTaken", PROBLEM_SECONDS)
    assert "team" not in world.message(OTHER)
    assert "app" not in world.message(OTHER).replace("app-key", "")
    assert world.accepted(OTHER) == {digest_key(former)}
    await world.settle()
    assert (world.reason(), world.accepts(world.text())) == ("Valid", True)


async def test_key_that_another_has_replaced_is_taken_until_its_time_is_over() -> None:
    world = await two_keys_of_their_own()
    victims = world.text()
    world.change(rotate="monday")
    await world.settle()
    world.edit(victims, OTHER)
    world.wait(600)
    await world.settle(OTHER)
    assert (world.reason(OTHER), world.accepts(victims)) == ("KeyTaken", True)
    world.wait(DAY)
    await world.settle()
    await world.settle(OTHER)
    assert (world.reason(OTHER), world.accepts(victims)) == ("Valid", False)


async def test_same_key_in_two_secrets_at_once_belongs_to_one() -> None:
    """Both are decided about before the status of either is stored."""
    world = await two_keys()
    for key in (APP, OTHER):
        world.edit(KEY, key)
    world.wait(600)
    observe = world.reconciler.observe
    assert observe is not None
    inputs = [await observe(world, Snapshot(world.store, world.now), key) for key in (APP, OTHER)]
    assert [found.is_taken for found in inputs if found is not None] == [False, True]
    world.edit("n" * 40)
    world.wait(600)
    await world.settle()
    await world.settle(OTHER)
    assert (world.reason(OTHER), world.accepts(KEY, OTHER)) == ("Valid", True)


async def test_key_that_two_report_belongs_to_the_older_one() -> None:
    """As after the restoration of a backup."""
    world = await two_keys()
    for key in (APP, OTHER):
        world.edit(KEY, key)
        old = world.object(key)
        metadata = old["metadata"] | {"resourceVersion": world.next_version()}
        world.store.put(GATEWAY_KEYS, old | {"metadata": metadata, "status": {"digest": digest_key(KEY)}})
    world.start()
    for key in (APP, OTHER, APP):
        await world.settle(key)
    assert (world.reason(), world.reason(OTHER)) == ("KeyTaken", "Valid")
    assert world.accepted() == set()


async def test_deletion_of_a_key_frees_it_for_others() -> None:
    world = await two_keys_of_their_own()
    victims = world.text()
    world.edit(victims, OTHER)
    world.store.remove(GATEWAY_KEYS, NAMESPACE, "app")
    await world.reconcile()
    world.wait(600)
    await world.settle(OTHER)
    assert (world.reason(OTHER), world.accepts(victims, OTHER)) == ("Valid", True)


async def test_key_of_the_user_is_not_lost_when_the_controller_dies_while_it_is_replaced() -> None:
    world = KeyWorld()
    await world.settle()
    world.edit()
    world.change(rotate="monday")
    for writes in range(3):
        world.writes_left = writes
        with contextlib.suppress(CrashError):
            await world.settle()
        world.start()
        if KEY in world.overwritten:
            assert world.accepts(KEY)
    world.writes_left = None
    await world.settle()
    assert world.accepts(KEY)


STEPS = st.one_of(
    st.tuples(st.just("rotate"), st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("edit"), st.sampled_from(["x" * 40, "y" * 40, "z" * 40])),
    st.tuples(st.just("delete"), st.just("")),
    st.tuples(st.just("edit and crash"), st.sampled_from(["0", "1", "2", "3"])),
    st.tuples(st.just("delete and crash"), st.sampled_from(["0", "1", "2", "3"])),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=12))
async def test_no_step_and_no_crash_loses_a_key_before_its_time(steps: list[tuple[str, str]]) -> None:
    """Each key that was accepted is, for its overlap; in the end the status has what the Secret has."""
    world = KeyWorld(gateway_key(overlapSeconds=DAY))
    await world.settle()

    def check(before: set[str]) -> None:
        """Check that no key was lost, unless for others that were replaced later."""
        kept, replaced = world.accepted(), {digest_key(text) for text in world.overwritten}
        assert before | replaced <= kept or len(kept) == 1 + MOST_PREVIOUS_KEYS

    for step, value in steps:
        before = world.accepted()
        match step.split():
            case ["rotate"]:
                world.change(rotate=value)
            case ["edit"]:
                world.edit(value)
            case ["delete"]:
                world.delete_secret()
            case [change, "and", "crash"]:
                world.edit(world.next_version() * 20) if change == "edit" else world.delete_secret()
                world.change(rotate=world.next_version())
                world.writes_left = int(value)
        world.overwritten.clear()
        world.wait(600)
        try:
            await world.settle()
        except CrashError:
            world.start()
            check(before)
            world.writes_left = None
            await world.settle()
        world.writes_left = None
        check(before)
        assert (world.status()["digest"], world.reason()) == (digest_key(world.text()), "Valid")


async def test_usage_is_written_when_it_is_due_and_kept_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    world = KeyWorld()
    await world.settle()
    assert "usage" not in world.status()
    due = [KeyCounts({"a": KeyCount(3, 40)}, {"a"})]
    monkeypatch.setattr(world.usage, "take_counts", lambda uid: due.pop() if due and uid == "uid-app" else None)
    await world.settle()
    usage = {
        "since": "2026-11-21T12:00:00Z",
        "requests": 3,
        "tokens": 40,
        "lastUsedAt": "2026-11-21T12:00:00Z",
        "counted": [{"replica": "a", "requests": 3, "tokens": 40}],
    }
    assert (world.status()["usage"], due) == (usage, [])
    world.change(suspend=True)
    await world.settle()
    assert (world.status()["usage"], world.reason()) == (usage, "Suspended")
    due.append(KeyCounts({"a": KeyCount(3, 40)}, {"a"}))  # a decision that is repeated
    await world.settle()
    assert world.status()["usage"] == usage
