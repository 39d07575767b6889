"""The status of an InferenceService on hosts: the influence of its processes and of the hosts."""

import re

import pytest

from controller.reconcile.plan import Snapshot
from controller.services.reconciler import decide_service
from controller.services.service_view import ServiceInputs
from kube.client import Obj
from kube.resources import (
    ENDPOINT_SLICES,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODELS,
)
from tests.support.api_objects import (
    GIB,
    NOW,
    condition,
    host,
    model,
    planned_condition,
    process,
    slice_of,
    store,
)
from tests.support.service_decisions import (
    KEY,
    METAL,
    OK,
    SERVING,
    bound_process,
    chat_service,
    decide_chat,
    ready_outcome,
)

SHORT = [condition("Ready", "True", "LeaseRenewed"), condition("MemoryPressure", "True", "MemoryPressure")]
PAUSE = [condition("Ready", "True", "LeaseRenewed"), condition("Paused", "True", "OwnerActive", "typing")]
UNSTABLE = [
    condition("Ready", "True", "LeaseRenewed"),
    condition("Stable", "False", "Flapping", "the Lease of host studio-1 expired 3 times"),
]
TAINTED: Obj = {"spec": {"taints": [{"key": "dedicated", "value": "research", "effect": "NoSchedule"}]}}
CORDONED: Obj = {"spec": {"unschedulable": True}}
DISPLACED = [condition("DisruptionTarget", "True", "MemoryPressure")]


def test_answering_process_makes_the_service_ready() -> None:
    there = (
        chat_service(**METAL),
        (MODELS, model()),
        (METAL_HOSTS, host()),
        bound_process(),
        (ENDPOINT_SLICES, slice_of("chat", "x")),
    )
    plan = decide_chat(*there, answer=OK)
    assert ready_outcome(plan) == ("Ready", "True", "Serving")
    assert (plan.create, plan.delete) == ((), ())


OTHERS: Obj = {"spec": {"namespaces": ["other"]}}


@pytest.mark.parametrize(
    ("hosts", "expected", "says"),
    [
        ([], ("Pending", "NoHost"), "pomona agent"),
        ([host(ready="False")], ("Pending", "NoHost"), "no live host"),
        ([host(runtimes=["mlx"])], ("Pending", "NoHost"), "llama.cpp"),
        (
            [host(free_bytes=GIB, budgetBytes=4 * GIB), host("studio-2", GIB // 2, budgetBytes=GIB)],
            ("Pending", "NoHostFits"),
            "studio-1, has 4.0 GiB for models, of which too little is free now",
        ),
        ([host()], ("Pending", "Binding"), "studio-1"),
        (
            [
                host(
                    conditions=[
                        condition("Ready", "True"),
                        condition("AddressAccepted", "False", message="status.address is that of a node"),
                    ]
                )
            ],
            ("Pending", "NoHost"),
            "no endpoint of host studio-1 is accepted: status.address is that of a node",
        ),
        (
            [host() | OTHERS],
            ("Pending", "NoHost"),
            "none of the 1 live hosts is given to namespace team: an administrator may add it to spec.namespaces",
        ),
        (
            [host(free_bytes=GIB), host("studio-2") | OTHERS],
            ("Pending", "NoHostFits"),
            "; 1 more live hosts are not given to namespace team",
        ),
        (
            [host() | TAINTED],
            ("Pending", "NoHost"),
            "taint dedicated=research:NoSchedule of host studio-1, and no other host can run it: add the taint to",
        ),
        ([host() | TAINTED, host("studio-2")], ("Pending", "Binding"), "studio-2"),
        ([host(conditions=SHORT)], ("Pending", "MemoryPressure"), "host studio-1 is short of memory"),
        (
            [host(conditions=SHORT), host("studio-2", GIB, budgetBytes=GIB)],
            ("Pending", "NoHostFits"),
            "studio-2, has 1.0 GiB for models, which is too little: ",
        ),
    ],
)
def test_unbound_process_reports_the_reason_of_its_wait(hosts: list[Obj], expected: tuple[str, str], says: str) -> None:
    base = (chat_service(**METAL), (MODELS, model()), *((METAL_HOSTS, machine) for machine in hosts))
    ((_, made),) = decide_chat(*base).create
    plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
    assert ready_outcome(plan) == (expected[0], "False", expected[1])
    assert says in planned_condition(plan, "Ready")["message"]
    if expected[1] == "NoHostFits":
        assert "needs 2.0 GiB (1.0 GiB weights, " in planned_condition(plan, "Ready")["message"]


@pytest.mark.parametrize(
    ("hosts", "reason", "says"),
    [
        (
            [host() | CORDONED],
            "NoHostFits",
            ["host studio-1 is cordoned; no other host can run it: `pomona host uncordon studio-1`, or run `pomona"],
        ),
        (
            [host() | CORDONED, host("studio-2", GIB, budgetBytes=GIB)],
            "NoHostFits",
            ["the largest host, studio-2, has 1.0 GiB", "; host studio-1 is cordoned"],
        ),
        ([host(name) | CORDONED for name in "abcde"], "NoHostFits", ["hosts a, b, c and more are cordoned"]),
        (
            [host(conditions=PAUSE)],
            "HostPaused",
            ["host studio-1 is paused by its owner (typing)", "wait for the end of the pause"],
        ),
        (
            [host(conditions=UNSTABLE)],
            "Flapping",
            ["the Lease of host studio-1 expired 3 times; no other host can run it: wait until it is stable"],
        ),
        (
            [host(conditions=SHORT), host("studio-2", conditions=PAUSE), host("studio-3") | CORDONED],
            "MemoryPressure",
            ["studio-1 is short of memory", "; host studio-2 is paused by its owner", "; host studio-3 is cordoned"],
        ),
    ],
)
def test_unbound_process_names_the_hosts_that_take_nothing(hosts: list[Obj], reason: str, says: list[str]) -> None:
    base = (chat_service(**METAL), (MODELS, model()), *((METAL_HOSTS, machine) for machine in hosts))
    ((_, made),) = decide_chat(*base).create
    plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
    assert ready_outcome(plan) == ("Pending", "False", reason)
    message = planned_condition(plan, "Ready")["message"]
    assert all(say in message for say in says), message


@pytest.mark.parametrize(
    ("labels", "expected", "says"),
    [
        ({}, "NoHost", "host studio-1 lacks room=lab: run `kubectl label metalhost studio-1 room=lab`"),
        ({"room": "attic"}, "NoHost", "lacks room=lab"),
        ({"room": "lab"}, "Binding", "studio-1"),
    ],
)
def test_unbound_process_names_the_label_that_no_host_has(labels: dict[str, str], expected: str, says: str) -> None:
    labelled = host()
    labelled["metadata"]["labels"] = labels
    base = (chat_service(**METAL, nodeSelector={"room": "lab"}), (MODELS, model()), (METAL_HOSTS, labelled))
    ((_, made),) = decide_chat(*base).create
    plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
    assert ready_outcome(plan) == ("Pending", "False", expected)
    assert says in planned_condition(plan, "Ready")["message"]


def test_tolerations_and_selected_labels_are_not_in_the_spec_of_a_process() -> None:
    demands = {"nodeSelector": {"room": "lab"}, "tolerations": [{"key": "dedicated", "operator": "Exists"}]}
    labelled = host()
    labelled["metadata"]["labels"] = {"room": "lab"}
    made = [
        decide_chat(chat_service(**METAL, **spec), (MODELS, model()), (METAL_HOSTS, labelled)).create
        for spec in ({}, demands)
    ]
    assert made[0] == made[1]


def test_next_cordoned_host_rewrites_no_status() -> None:
    def decide(closed: str) -> str:
        small = [host("a-first", GIB, budgetBytes=GIB), *(host(name, 0, budgetBytes=0) for name in "bcdefg")]
        hosts = [machine | (CORDONED if machine["metadata"]["name"] in closed else {}) for machine in small]
        base = (chat_service(**METAL), (MODELS, model()), *((METAL_HOSTS, machine) for machine in hosts))
        ((_, made),) = decide_chat(*base).create
        plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
        message: str = planned_condition(plan, "Ready")["message"]
        return message

    assert "hosts b, c, d and more are cordoned" in decide("bcde")
    assert decide("bcde") == decide("bcdef") == decide("bcdefg")


def test_message_of_a_waiting_service_does_not_follow_the_free_memory() -> None:
    def message(free_bytes: int) -> str:
        base = (chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host(free_bytes=free_bytes, budgetBytes=GIB)))
        ((_, made),) = decide_chat(*base).create
        plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
        return str(planned_condition(plan, "Ready")["message"])

    assert message(GIB // 2) == message(GIB // 3)


def test_message_of_a_waiting_service_names_the_same_one_of_equal_hosts() -> None:
    def message(free_bytes: int) -> str:
        equal = [
            (METAL_HOSTS, host(name, free_bytes=free, budgetBytes=GIB))
            for name, free in (("studio-1", GIB // 2), ("studio-2", free_bytes))
        ]
        base = (chat_service(**METAL), (MODELS, model()), *equal)
        ((_, made),) = decide_chat(*base).create
        plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
        return str(planned_condition(plan, "Ready")["message"])

    assert message(GIB // 3) == message(2 * GIB // 3)


@pytest.mark.parametrize(
    ("fields", "budget_bytes", "says"),
    [
        ({"contextLength": 1_048_576}, 2 * GIB, r"a contextLength of \d{6} would fit"),
        (
            {"contextLength": 1_048_576},
            GIB,
            r"a quantization with weights of at most \d\d% of the size and a context.*",
        ),
        ({"contextLength": 8192}, 2**26, r"no quantization of this model would fit: .*"),
    ],
)
def test_settings_that_would_fit_are_suggested(fields: Obj, budget_bytes: int, says: str) -> None:
    made, small = chat_service(**METAL, **fields), host(free_bytes=budget_bytes, budgetBytes=budget_bytes)
    ((_, waiting),) = decide_chat(made, (MODELS, model()), (METAL_HOSTS, small)).create
    there = process(waiting["metadata"]["name"], memoryBytes=waiting["spec"]["memoryBytes"])
    message = planned_condition(
        decide_chat(made, (MODELS, model()), (METAL_HOSTS, small), (METAL_PROCESSES, there)), "Ready"
    )["message"]
    assert re.search(f": {says}$", message), message


def test_stated_memory_is_not_broken_down() -> None:
    stated = model(memoryBytes=2 * GIB)
    ((_, waiting),) = decide_chat(chat_service(**METAL), (MODELS, stated)).create
    there = (METAL_PROCESSES, process(waiting["metadata"]["name"], gib=2))
    message = planned_condition(
        decide_chat(chat_service(**METAL), (MODELS, stated), (METAL_HOSTS, host(free_bytes=GIB)), there), "Ready"
    )["message"]
    assert "a replica needs 2.0 GiB; the largest host" in message
    assert message.endswith("too little: lower contextLength or parallel")


@pytest.mark.parametrize(
    ("phase", "fields", "expected", "says"),
    [
        ("Failed", {"reason": "CrashLoop", "message": "bad magic"}, ("Failed", "CrashLoop"), "studio-1: bad magic"),
        ("Failed", {}, ("Failed", "ProcessFailed"), "studio-1"),
        (
            "Fetching",
            {"progress": {"bytes": GIB, "totalBytes": 4 * GIB}},
            ("Downloading", "Fetching"),
            "1.0 GiB of 4.0 GiB",
        ),
        ("Starting", {}, ("Progressing", "Starting"), "0 of 1 replicas are ready"),
    ],
)
def test_reason_why_a_process_does_not_serve_is_reported(
    phase: str, fields: Obj, expected: tuple[str, str], says: str
) -> None:
    plan = decide_chat(chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host()), bound_process(phase, **fields))
    assert ready_outcome(plan) == (expected[0], "False", expected[1])
    assert says in planned_condition(plan, "Ready")["message"]


def test_rejection_by_the_only_host_is_reported_with_its_message() -> None:
    rejected = bound_process("Rejected", message="needs 9.0 GiB")
    base = (chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host()), rejected)
    ((_, made),) = decide_chat(*base).create
    plan = decide_chat(*base, (METAL_PROCESSES, process(made["metadata"]["name"])))
    assert ready_outcome(plan) == ("Failed", "False", "Rejected")
    assert "host studio-1 rejected it: needs 9.0 GiB" in planned_condition(plan, "Ready")["message"]


def test_displaced_process_counts_while_it_answers() -> None:
    there = (chat_service(**METAL, status=SERVING), (MODELS, model()), (ENDPOINT_SLICES, slice_of("chat", "x")))
    hosts = ((METAL_HOSTS, host(conditions=SHORT)), (METAL_HOSTS, host("studio-2")))
    asked = decide_chat(*there, *hosts, bound_process(conditions=DISPLACED), answer=OK)
    assert [resource for resource, _ in asked.create] == [METAL_PROCESSES]
    assert ready_outcome(asked) == ("Ready", "True", "Serving")
    assert asked.status
    assert asked.status["readyReplicas"] == 1


def test_evicted_process_reports_the_reason_of_its_wait() -> None:
    there = (chat_service(**METAL), (MODELS, model()), (METAL_HOSTS, host(conditions=SHORT)))
    evicted = bound_process("Pending", reason="MemoryPressure", conditions=DISPLACED)
    ((_, made),) = decide_chat(*there, evicted).create
    plan = decide_chat(*there, evicted, (METAL_PROCESSES, process(made["metadata"]["name"], gib=2)))
    assert (plan.create, plan.delete) == ((), ())
    assert ready_outcome(plan) == ("Pending", "False", "MemoryPressure")
    assert "no other host can run it" in planned_condition(plan, "Ready")["message"]


def test_lost_host_has_no_ready_replicas() -> None:
    plan = decide_chat(
        chat_service(**METAL, status=SERVING), (MODELS, model()), (METAL_HOSTS, host(ready="False")), bound_process()
    )
    assert len(plan.create) == 1
    assert plan.status is not None
    assert (plan.status["readyReplicas"], plan.status["availableReplicas"]) == (0, 0)
    assert planned_condition(plan, "Ready")["status"] == "False"


def test_result_of_another_probe_is_ignored() -> None:
    there = (
        chat_service(**METAL),
        (MODELS, model()),
        (METAL_HOSTS, host()),
        bound_process(),
        (ENDPOINT_SLICES, slice_of("chat", "x")),
    )
    snapshot = Snapshot(store(*there), NOW, ServiceInputs(answer=OK))
    assert planned_condition(decide_service(snapshot, KEY), "Ready")["reason"] == "Probing"
