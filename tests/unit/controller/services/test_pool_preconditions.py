"""Pools that a service names: what is wrong with them is said, and replicas that serve stay."""

from typing import Any

import msgspec
import pytest

from controller.pod_settings import TenantLimits, refuse_queue
from controller.reconcile.triggers import Trigger
from controller.services.reconciler import service_reconciler
from kube.client import Obj
from kube.resources import (
    ACCELERATOR_POOLS,
    INFERENCE_SERVICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
    ObjectKey,
)
from tests.support.api_objects import as_service, host, model, planned_condition, pool, process, service, store
from tests.support.service_decisions import METAL, SERVING, SETTINGS, decide_chat, plain_sources

TEAM_A: dict[str, Any] = {"nodeSelector": {"team": "a"}}
NVIDIA: dict[str, Any] = {"hardware": {"accelerator": "nvidia"}}


def ready_of(*pools: Obj, names: list[str], settings: Any = SETTINGS, **spec: Any) -> tuple[str, str]:
    scheduling = {"pools": names, **spec.pop("scheduling", {})}
    chat = service(**{**NVIDIA, **spec}, scheduling=scheduling)
    objects = [(ACCELERATOR_POOLS, pool) for pool in pools]
    plan = decide_chat((INFERENCE_SERVICES, chat), (MODELS, model()), *objects, settings=settings)
    condition = planned_condition(plan, "Ready")
    return condition["reason"], condition["message"]


def test_unknown_pool_is_named_with_those_that_exist() -> None:
    reason, message = ready_of(pool("team-a", **TEAM_A), pool("amd-a", "amd", **TEAM_A), names=["team-a", "team-b"])
    assert reason == "UnknownPool"
    assert message.startswith(
        "spec.scheduling.pools names team-b, which does not exist: use nvidia or team-a, or create AcceleratorPool"
    )


def test_pool_of_another_accelerator_is_named_with_it() -> None:
    reason, message = ready_of(pool("amd-a", "amd", **TEAM_A), names=["amd-a"])
    assert reason == "InvalidSpec"
    assert "names amd-a, which has accelerator amd, not nvidia: use nvidia" in message
    assert ready_of(names=["metal"])[0] == "InvalidSpec"


def test_refused_pool_does_not_exist() -> None:
    assert ready_of(pool("team-a", "cpu", **TEAM_A), names=["team-a"])[0] == "UnknownPool"


@pytest.mark.parametrize("names", [[], ["nvidia"], ["team-a", "nvidia"]])
def test_known_pools_are_no_obstacle(names: list[str]) -> None:
    assert ready_of(pool("team-a", **TEAM_A), names=names)[0] not in {"UnknownPool", "InvalidSpec"}


def test_pools_need_the_queue() -> None:
    native = msgspec.structs.replace(SETTINGS, scheduling_mode="Native")
    assert "set spec.scheduling.mode to Queue" in ready_of(names=["nvidia"], settings=native)[1]
    assert ready_of(names=["nvidia"], settings=native, scheduling={"mode": "Queue"})[0] != "InvalidSpec"
    assert ready_of(names=["metal"], settings=native, **METAL)[0] != "InvalidSpec", "hosts always go by the queue"


def test_pools_are_out_of_reach_of_a_controller_of_some_namespaces() -> None:
    limited = TenantLimits(hosts=False)
    refused = refuse_queue(as_service(service(scheduling={"pools": ["nvidia"]})), limited)
    assert refused is not None
    assert refused.message.startswith("spec.scheduling.pools is stated, and the queue belongs to the whole cluster")
    assert refuse_queue(as_service(service()), limited) is None


def test_replica_stays_when_its_pool_is_gone_and_serves_on_when_it_is_back() -> None:
    chat = service(hardware=METAL["hardware"], scheduling={"pools": ["macs"]}, status=SERVING)
    objects = (
        (INFERENCE_SERVICES, chat),
        (MODELS, model()),
        (METAL_HOSTS, host()),
        (METAL_PROCESSES, process("chat-1", host="studio-1", phase="Ready")),
    )
    plan = decide_chat(*objects)
    assert (plan.delete, planned_condition(plan, "Ready")["reason"]) == ((), "UnknownPool")
    back = decide_chat(*objects, (ACCELERATOR_POOLS, pool("macs", "metal", **TEAM_A)))
    assert planned_condition(back, "Ready")["reason"] != "UnknownPool"


def test_change_of_a_pool_enqueues_the_services_that_name_it() -> None:
    reconciler = service_reconciler(plain_sources(SETTINGS))
    (trigger,) = (each for each in reconciler.triggers if each.resource == ACCELERATOR_POOLS)
    assert isinstance(trigger, Trigger)
    cluster = store(
        (INFERENCE_SERVICES, service("one", scheduling={"pools": ["a", "b"]})),
        (INFERENCE_SERVICES, service("two", scheduling={"pools": ["b"]})),
        (INFERENCE_SERVICES, service("three")),
    )
    assert list(trigger.keys(cluster, pool("a"))) == [ObjectKey("team", "one")]
    assert list(trigger.keys(cluster, pool("gone"))) == []
    assert trigger.concerns(None, pool("a"))
    assert not trigger.concerns(pool("a"), pool("a", status={"cells": 3}))
