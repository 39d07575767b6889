"""The verdict on a service, and the tree of what it waits for, in 80 columns."""

from pathlib import Path
from typing import Any

import pytest

from cli.api_objects import may_be_on_hosts
from cli.cluster_options import ClusterOptions
from cli.service.service_tree import ServiceObjects, describe_host_state, render_status
from cli.service.verdict import judge_service
from crds.meta import QUEUE_GATE
from tests.support.api_objects import condition

Obj = dict[str, Any]
LONG = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption."


def service(phase: str, reason: str, message: str, *, ready: str = "False", observed: int = 1, **spec: Any) -> Obj:
    return {
        "metadata": {"name": "chat", "namespace": "team", "generation": 1},
        "spec": {"modelRef": "tiny", "replicas": 2, **spec},
        "status": {
            "observedGeneration": observed,
            "phase": phase,
            "readyReplicas": 1 if ready == "True" else 0,
            "accelerator": "metal",
            "runtime": "llama.cpp",
            "memory": "5.4 GiB",
            "conditions": [condition("Ready", ready, reason, message)],
        },
    }


@pytest.mark.parametrize(
    ("phase", "reason", "ready", "state"),
    [
        ("Ready", "Serving", "True", "serves"),
        ("Degraded", "NoHostFits", "True", "serves partly"),
        ("Degraded", "InvalidSpec", "True", "cannot serve"),
        ("Failed", "ImagePullBackOff", "False", "cannot serve"),
        ("Downloading", "Downloading", "False", "on its way"),
        ("Pending", "ModelNotReady", "False", "on its way"),
        ("Pending", "Unschedulable", "False", "waits"),
        ("Pending", "NoHost", "False", "waits"),
        ("Suspended", "ScaledToZero", "False", "suspended"),
    ],
)
def test_verdict_follows_phase_and_reason(phase: str, reason: str, ready: str, state: str) -> None:
    assert judge_service(service(phase, reason, "m", ready=ready)).state == state


def test_service_that_no_controller_has_seen_points_to_the_controller() -> None:
    for unseen in (service("Ready", "Serving", "m", observed=0), {"metadata": {"name": "chat", "generation": 1}}):
        verdict = judge_service(unseen)
        assert verdict.state == "not seen"
        assert "kubectl get pods -n pomona-system" in verdict.next_step


def test_next_step_names_the_program_as_it_was_called() -> None:
    verdict = judge_service(service("Ready", "Serving", "m", ready="True"), "kubectl pomona")
    assert verdict.next_step == "ask it: kubectl pomona chat chat"


def test_next_step_leads_to_the_cluster_and_namespace_that_were_given() -> None:
    given = ClusterOptions(Path("/a b/config"), "mine", "team")
    where = " --context mine --kubeconfig '/a b/config'"
    assert given.render() == f" -n team{where}"
    assert ClusterOptions().render() == ""
    for phase, reason, command in (
        ("Ready", "Serving", "pomona chat chat -n team"),
        ("Failed", "InvalidSpec", "kubectl edit isvc chat -n team"),
        ("Failed", "ModelFailed", "kubectl edit mdl tiny -n team"),
        ("Suspended", "ScaledToZero", "kubectl edit isvc chat -n team"),
        ("Downloading", "Probing", "pomona logs chat -n team"),
    ):
        assert judge_service(service(phase, reason, "m"), target=given).next_step.endswith(command + where)
    unseen = judge_service(service("Ready", "Serving", "m", observed=0), target=given)
    assert unseen.next_step.endswith(f"kubectl get pods -n pomona-system{where}")


def test_next_step_names_the_model_that_failed() -> None:
    failed = service("Failed", "ModelFailed", "Model house-style: no such file", adapters=[{"modelRef": "house-style"}])
    assert judge_service(failed).next_step == "edit the Model: kubectl edit mdl house-style"


def test_service_in_pods_has_no_process_that_a_tenant_could_miss() -> None:
    seen = service("Ready", "Serving", "m")
    assert may_be_on_hosts(seen)
    assert may_be_on_hosts({"metadata": {}, "spec": {}})
    assert not may_be_on_hosts({**seen, "status": {**seen["status"], "accelerator": "nvidia"}})


@pytest.mark.parametrize(
    ("reason", "message", "command"),
    [
        ("ModelFailed", "Model tiny: http://x/a.gguf: expected sha256 00, ...", "kubectl edit mdl tiny -n team"),
        ("ChecksumMismatch", "0 of 1 replicas are ready: host studio-1: ...", "kubectl edit mdl tiny -n team"),
        ("EngineExited", "host studio-1: the engine exited with SIGKILL", "pomona logs chat -n team"),
        ("CrashLoopBackOff", "pod chat-1: llama-server ended with exit code 1", "pomona logs chat -n team"),
        ("ImagePullBackOff", "pod chat-1: no such image", "kubectl edit isvc chat -n team"),
    ],
)
def test_next_step_of_a_failure_leads_to_its_cause(reason: str, message: str, command: str) -> None:
    given = ClusterOptions(namespace="team")
    assert judge_service(service("Failed", reason, message), target=given).next_step.endswith(f": {command}")


@pytest.mark.parametrize(
    ("phase", "ready", "state"), [("Progressing", "True", "waits"), ("Failed", "False", "cannot serve")]
)
def test_refused_write_is_the_verdict_even_while_a_service_serves(phase: str, ready: str, state: str) -> None:
    obj = service(phase, "Progressing", "the latest spec is not rolled out yet", ready=ready)
    said = "apply deployments.apps team/chat: exceeded quota"
    obj["status"]["conditions"].append(condition("Reconciled", "False", "Forbidden", said))
    verdict = judge_service(obj)
    assert (verdict.state, verdict.message, verdict.reason) == (state, said, "Forbidden")
    assert "tries again by itself" in verdict.next_step
    assert ("still serves" in verdict.next_step) == (ready == "True")


def render(objects: ServiceObjects, width: int = 80) -> list[str]:
    return render_status(objects, judge_service(objects.service), width)


def test_tree_of_a_service_on_hosts() -> None:
    message = "0 of 2 replicas are ready: host studio-1: downloaded 1.0 GiB of 4.7 GiB of the weights"
    process: Obj = {
        "metadata": {"name": "chat-1a2b-0"},
        "spec": {"hostName": "studio-1"},
        "status": {
            "phase": "Fetching",
            "progress": {"bytes": 1 << 30, "totalBytes": 4 << 30},
            "restarts": 2,
        },
    }
    unbound: Obj = {"metadata": {"name": "chat-1a2b-1"}, "spec": {}, "status": {}}
    host: Obj = {
        "spec": {"unschedulable": True},
        "status": {"available": "20.5 GiB", "conditions": [condition("Ready", "True", "LeaseRenewed")]},
    }
    model: Obj = {
        "status": {
            "phase": "Ready",
            "size": "4.7 GiB",
            "parameters": "8.2B",
            "gguf": {"quantization": "Q4_K_M"},
            "conditions": [condition("Ready", "True"), condition("Cached", "False", "NoConsumers")],
        }
    }
    objects = ServiceObjects(
        service=service("Downloading", "Fetching", message),
        models={"tiny": model},
        processes=[process, unbound],
        hosts={"studio-1": host},
    )
    assert render(objects) == [
        "chat is on its way: 0 of 2 replicas are ready: host studio-1: downloaded 1.0 GiB",
        "of 4.7 GiB of the weights",
        "next: wait, or see its log: pomona logs chat",
        "",
        "InferenceService chat  Downloading",
        "├─ Model tiny  Ready",
        "│     4.7 GiB, Q4_K_M, 8.2B parameters",
        "└─ replicas: 0 of 2 ready, on metal with llama.cpp",
        "   │  each takes 5.4 GiB",
        "   ├─ MetalProcess chat-1a2b-0  Fetching",
        "   │  │  downloaded 1.0 GiB of 4.0 GiB, 25 %",
        "   │  │  its engine was restarted 2 times",
        "   │  └─ MetalHost studio-1  Ready,Cordoned, 20.5 GiB free",
        "   └─ MetalProcess chat-1a2b-1  Pending",
        "         on no host yet",
    ]


def test_tree_shows_what_a_hostile_host_writes_as_text() -> None:
    hostile = "\x1b]52;c;Y3Vy\x07\x9b1A\r\nInferenceService chat  Ready"
    process: Obj = {
        "metadata": {"name": "chat-1a2b-0"},
        "spec": {"hostName": "studio-1"},
        "status": {"phase": "Pending", "reason": hostile},
    }
    host: Obj = {"spec": {}, "status": {"available": hostile}}
    objects = ServiceObjects(
        service=service("Pending", "Starting", "host studio-1: starting"),
        models={},
        processes=[process],
        hosts={"studio-1": host},
    )
    shown = r"\x1b]52;c;Y3Vy\x07\x9b1A InferenceService chat  Ready"
    assert render(objects)[-2:] == [
        f"   └─ MetalProcess chat-1a2b-0  Pending ({shown})",
        f"      └─ MetalHost studio-1  Unknown, {shown} free",
    ]


def test_tree_names_what_holds_up_a_host_and_nothing_that_is_well() -> None:
    process: Obj = {"metadata": {"name": "chat-0"}, "spec": {"hostName": "studio-1"}, "status": {"phase": "Ready"}}
    well = [condition("Ready", "True"), condition("Reachable", "True", "Answers", "well"), condition("Paused", "False")]
    ill = [
        condition("Reachable", "False", "NoAnswer", "the controller does not reach it"),
        condition("Drained", "False", "DrainBlocked", "1 process is held on this host"),
        condition("Paused", "True", "QuietHours", "paused until 18:00"),
    ]
    moving = [condition("Drained", "False", "Draining", "1 process is still on this host")]
    done = [condition("Drained", "True", "Drained", "no process is left")]

    def describe(conditions: list[Obj]) -> list[str]:
        host: Obj = {"spec": {}, "status": {"conditions": conditions}}
        objects = ServiceObjects(
            service=service("Ready", "Serving", "m", ready="True"),
            models={},
            processes=[process],
            hosts={"studio-1": host},
        )
        lines = render(objects, 200)
        first = next(number for number, line in enumerate(lines) if "MetalHost studio-1" in line)
        return [line.strip() for line in lines[first + 1 :]]

    assert describe(ill) == [
        "Reachable is False (NoAnswer): the controller does not reach it",
        "Drained is False (DrainBlocked): 1 process is held on this host",
        "Paused is True (QuietHours): paused until 18:00",
    ]
    for conditions in (well, moving, done):
        assert describe(conditions) == []


def test_tree_of_a_service_in_pods_names_what_scheduler_and_kubelet_say() -> None:
    waiting: Obj = {
        "metadata": {"name": "chat-x"},
        "spec": {},
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": LONG}],
        },
    }
    crashing: Obj = {
        "metadata": {"name": "chat-y"},
        "spec": {"nodeName": "gpu-1"},
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {
                    "name": "vllm",
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                    "lastState": {"terminated": {"exitCode": 1, "message": "no CUDA\ndevice"}},
                }
            ],
        },
    }
    objects = ServiceObjects(
        service=service("Failed", "CrashLoopBackOff", "m"), models={"tiny": None}, pods=[waiting, crashing]
    )
    lines = render(objects)
    assert all(len(line) <= 80 for line in lines), lines
    said = " ".join(line.strip(" │├└─") for line in lines)
    assert "Model tiny does not exist" in " ".join(said.split())
    assert f"on no node yet Unschedulable: {LONG}" in said
    assert "on node gpu-1 vllm waits: CrashLoopBackOff back-off 10s" in said
    assert "vllm ended before with exit code 1: no CUDA device" in said


def test_pod_in_the_queue_is_said_to_wait_there() -> None:
    reason = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
    pod: Obj = {"metadata": {"name": "chat-x"}, "spec": {"schedulingGates": [{"name": QUEUE_GATE}]}}
    pod["status"] = {"phase": "Pending", "conditions": [reason]}
    waiting = service("WaitingForGPU", "InsufficientDevices", "m")
    said = "\n".join(render(ServiceObjects(service=waiting, models={"tiny": None}, pods=[pod])))
    assert "next: see what would help: pomona queue explain chat" in said
    assert "waits in the queue" in said
    assert "SchedulingGated" not in said
    assert "queue explain" not in judge_service(service("WaitingForGPU", "WaitingForKueue", "m")).next_step


def test_hidden_parts_are_named() -> None:
    lines = render(
        ServiceObjects(
            service=service("Ready", "Serving", "m"), models={}, hidden=("not shown: eve may not list pods",)
        )
    )
    assert lines[-1] == "not shown: eve may not list pods"


@pytest.mark.parametrize(
    ("spec", "conditions", "state"),
    [
        ({}, [], "Unknown"),
        ({}, [condition("Ready", "False")], "NotReady"),
        ({"unschedulable": True, "drain": True}, [condition("Ready", "True")], "Ready,Draining"),
        ({}, [condition("Ready", "True"), condition("Stable", "False")], "Ready,Flapping"),
        ({}, [condition("Ready", "True"), condition("Stable", "True")], "Ready"),
        (
            {},
            [condition("Ready", "True"), condition("MemoryPressure", "True")],
            "Ready,MemoryPressure",
        ),
    ],
)
def test_state_of_a_host_is_one_word(spec: Obj, conditions: list[Obj], state: str) -> None:
    assert describe_host_state({"spec": spec, "status": {"conditions": conditions}}) == state


def test_status_says_where_a_replica_was_placed_and_why() -> None:
    placed = service("Ready", "Serving", "m", ready="True")
    placed["status"]["placement"] = {
        "place": "node/gpu-1",
        "tokensPerSecond": "42.1",
        "source": "Estimated",
        "reason": "84 points",
    }
    placed["status"]["conditions"].append(condition("Fits", "True", "Fits", "fits on 1 of 2 device classes"))
    text = " ".join(" ".join(render(ServiceObjects(service=placed, models={}))).split())
    assert "placed on node/gpu-1 at 42.1 tokens/s (estimated): 84 points" in text
    assert "fits on 1 of 2" not in text


def test_status_says_that_a_replica_is_slower_than_its_hardware() -> None:
    slow = service("Ready", "Serving", "m", ready="True")
    slow["status"]["conditions"].append(condition("SpeedDegraded", "True", "NoBetterPlace", "40 of 140 tokens/s"))
    text = " ".join(" ".join(render(ServiceObjects(service=slow, models={}))).split())
    assert "SpeedDegraded is True (NoBetterPlace): 40 of 140 tokens/s" in text


def test_status_says_that_a_replica_fits_nowhere() -> None:
    waiting = service("WaitingForGPU", "NoSuchHardware", "m")
    waiting["status"]["conditions"].append(condition("Fits", "False", "TooTight", "short 18 GiB"))
    assert any(
        "Fits is False (TooTight): short 18 GiB" in line for line in render(ServiceObjects(service=waiting, models={}))
    )
