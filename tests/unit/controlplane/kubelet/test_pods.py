"""Promises of the documentation about phases, conditions, restarts and back-off."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controlplane.kubelet.pods import (
    Backoff,
    ContainerState,
    PodState,
    Running,
    Terminated,
    Waiting,
    conditions,
    container_status,
    crashes_in_a_row,
    find_user,
    hostname,
    merge_conditions,
    phase,
    restarts,
    status,
    taken_over,
    unsupported,
)

NOW = datetime(2026, 11, 21, 13, 0, tzinfo=UTC)
WAITING, RUNNING = Waiting("ContainerCreating"), Running(NOW)
POD: dict[str, Any] = {"metadata": {"name": "p", "uid": "u", "generation": 3}, "spec": {"containers": []}}


def ended(code: int) -> Terminated:
    return Terminated(code, "Error" if code else "Completed", "", NOW, NOW, "process://1")


def container(state: Waiting | Running | Terminated, **more: Any) -> ContainerState:
    return ContainerState("c", "pomona-test", state, **more)


def pod(*containers: ContainerState, init: tuple[ContainerState, ...] = (), **more: Any) -> PodState:
    return PodState(started_at=NOW, init=init, containers=containers, **more)


def test_pending_until_every_container_was_started() -> None:
    assert phase(pod(container(RUNNING), container(WAITING))) == "Pending"
    assert phase(pod(container(RUNNING), container(RUNNING))) == "Running"


def test_pending_while_init_containers_run() -> None:
    assert phase(pod(container(WAITING), init=(container(RUNNING),))) == "Pending"


def test_running_while_a_container_waits_for_its_restart() -> None:
    assert phase(pod(container(Waiting("CrashLoopBackOff"), last=ended(1)))) == "Running"


def sidecar(state: Waiting | Running | Terminated, **more: Any) -> ContainerState:
    return container(state, sidecar=True, **more)


def test_pending_until_every_sidecar_has_started() -> None:
    assert values(pod(container(WAITING), init=(sidecar(RUNNING),)))["Initialized"] is False
    assert values(pod(container(WAITING), init=(sidecar(RUNNING, started=True),)))["Initialized"] is True


def test_running_while_a_sidecar_is_restarted() -> None:
    crashed = sidecar(Waiting("CrashLoopBackOff"), last=ended(1))
    state = pod(container(RUNNING, ready=True, container_id="process://1"), init=(crashed,), pod_ip="10.0.0.1")
    assert phase(state) == "Running"
    assert values(state) == {
        "PodReadyToStartContainers": True,
        "Initialized": True,
        "ContainersReady": False,
        "Ready": False,
    }


def test_readiness_of_a_sidecar_counts_for_the_pod() -> None:
    main = container(RUNNING, ready=True, container_id="process://1")
    for ready in (False, True):
        state = pod(main, init=(sidecar(RUNNING, started=True, ready=ready),))
        assert values(state)["ContainersReady"] is values(state)["Ready"] is ready


def test_exit_code_of_a_sidecar_does_not_count_for_the_phase() -> None:
    main = container(ended(0), container_id="process://1")
    assert phase(pod(main, init=(sidecar(ended(137)),), finished=True)) == "Succeeded"


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), "Succeeded"), ((0, 1), "Failed"), ((137,), "Failed")])
def test_final_phase_follows_from_all_exit_codes(codes: tuple[int, ...], expected: str) -> None:
    assert phase(pod(*(container(ended(code)) for code in codes), finished=True)) == expected


STATES = st.sampled_from([WAITING, RUNNING, ended(0), ended(1)])


@given(st.lists(STATES), st.lists(STATES, min_size=1), st.booleans())
def test_phase_is_final_exactly_when_nothing_runs_any_more(
    init: list[Waiting | Running | Terminated], main: list[Waiting | Running | Terminated], finished: bool
) -> None:
    state = pod(*map(container, main), init=tuple(map(container, init)), finished=finished)
    assert (phase(state) in {"Succeeded", "Failed"}) is finished


def test_failed_when_an_init_container_failed_for_good() -> None:
    assert phase(pod(container(WAITING), init=(container(ended(1)),), finished=True)) == "Failed"


def test_failed_when_stopped_before_its_containers_ran() -> None:
    assert phase(pod(container(WAITING), finished=True)) == "Failed"


def test_failed_with_a_reason_of_the_kubelet_at_any_exit_codes() -> None:
    assert phase(pod(container(ended(0)), finished=True, reason="DeadlineExceeded")) == "Failed"


@pytest.mark.parametrize(
    ("policy", "code", "init", "again"),
    [
        ("Always", 0, False, True),
        ("Always", 1, False, True),
        ("OnFailure", 0, False, False),
        ("OnFailure", 1, False, True),
        ("Never", 0, False, False),
        ("Never", 1, False, False),
        ("Always", 0, True, False),
        ("Always", 1, True, True),
        ("Never", 1, True, False),
    ],
)
def test_restart_policy(policy: str, code: int, init: bool, again: bool) -> None:
    assert restarts(policy, code, init=init) is again


def test_back_off_is_immediate_then_doubles_from_ten_seconds_to_five_minutes() -> None:
    assert [Backoff().delay(crashes) for crashes in range(1, 9)] == [0, 10, 20, 40, 80, 160, 300, 300]


@given(st.integers(1, 10_000))
def test_back_off_never_shrinks_nor_passes_its_cap(crashes: int) -> None:
    assert Backoff().delay(crashes) <= Backoff().delay(crashes + 1) <= 300


def test_run_of_ten_minutes_resets_the_back_off() -> None:
    assert crashes_in_a_row(5, ran_seconds=599) == 6
    assert crashes_in_a_row(5, ran_seconds=600) == 1


def values(state: PodState) -> dict[str, bool]:
    return {name: value for name, value, _ in conditions(state)}


def test_conditions_of_a_pod_that_serves() -> None:
    assert values(pod(container(RUNNING, ready=True), pod_ip="10.0.0.1")) == {
        "PodReadyToStartContainers": True,
        "Initialized": True,
        "ContainersReady": True,
        "Ready": True,
    }


def test_conditions_before_network_and_init() -> None:
    states = values(pod(container(WAITING), init=(container(RUNNING),)))
    assert states == dict.fromkeys(("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready"), False)


def test_one_unready_container_makes_the_pod_unready() -> None:
    states = values(pod(container(RUNNING, ready=True), container(RUNNING, ready=False)))
    assert (states["ContainersReady"], states["Ready"]) == (False, False)


def test_a_completed_pod_is_initialized_and_not_ready() -> None:
    states = {name: (value, why) for name, value, why in conditions(pod(container(ended(0)), finished=True))}
    assert states["Initialized"] == (True, "")
    assert states["Ready"] == (False, "PodCompleted")


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    first = merge_conditions([], [("Ready", False, "X")], generation=1, now=NOW)
    later = NOW + timedelta(minutes=1)
    same = merge_conditions(first, [("Ready", False, "Y")], generation=2, now=later)
    assert same[0]["lastTransitionTime"] == first[0]["lastTransitionTime"]
    assert (same[0]["reason"], same[0]["observedGeneration"]) == ("Y", 2)
    turned = merge_conditions(same, [("Ready", True, "")], generation=2, now=later)
    assert turned[0]["lastTransitionTime"] == "2026-11-21T13:01:00Z"


def test_status_has_generation_and_addresses() -> None:
    pod_status = status(POD, pod(container(RUNNING), pod_ip="10.77.1.10"), host_ip="10.77.0.11", previous=[], now=NOW)
    assert (pod_status["observedGeneration"], pod_status["podIP"], pod_status["podIPs"]) == (
        3,
        "10.77.1.10",
        [{"ip": "10.77.1.10"}],
    )
    assert (pod_status["hostIP"], pod_status["phase"], pod_status["startTime"]) == (
        "10.77.0.11",
        "Running",
        "2026-11-21T13:00:00Z",
    )


def test_a_container_status_has_this_run_and_the_last() -> None:
    reported = container_status(container(Waiting("CrashLoopBackOff", "back-off"), last=ended(7), restart_count=2))
    assert reported["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    assert reported["lastState"]["terminated"]["exitCode"] == 7
    assert reported["restartCount"] == 2


def left_behind(policy: str, **entry: Any) -> ContainerState:
    old = {"name": "c", "containerID": "process://9", "restartCount": 1, "lastState": {}, **entry}
    return taken_over(
        {"metadata": {}, "spec": {"restartPolicy": policy}, "status": {"containerStatuses": [old]}},
        {"name": "c", "image": "pomona-test"},
    )


def test_a_container_of_an_earlier_kubelet_counts_as_killed_and_is_restarted() -> None:
    state = left_behind("Always", state={"running": {"startedAt": "2026-11-21T13:00:00Z"}})
    assert isinstance(state.state, Waiting)
    assert state.last is not None
    assert (state.last.exit_code, state.last.reason, state.restart_count) == (137, "ContainerStatusUnknown", 1)


def test_a_container_that_must_not_run_twice_is_not_started_by_a_new_kubelet() -> None:
    state = left_behind("Never", state={"running": {"startedAt": "2026-11-21T13:00:00Z"}})
    assert isinstance(state.state, Terminated)
    assert state.state.exit_code == 137


def test_container_completed_under_an_earlier_kubelet_stays_completed() -> None:
    done = {
        "exitCode": 0,
        "reason": "Completed",
        "startedAt": "2026-11-21T13:00:00Z",
        "finishedAt": "2026-11-21T13:00:01Z",
        "containerID": "process://9",
    }
    assert left_behind("OnFailure", state={"terminated": done}).state == Terminated(
        0, "Completed", "", NOW, NOW + timedelta(seconds=1), "process://9"
    )


def test_a_pod_new_to_every_kubelet_waits_for_its_creation() -> None:
    fresh = taken_over({"metadata": {}, "spec": {}}, {"name": "c", "image": "pomona-test"})
    assert (fresh.state, fresh.restart_count) == (Waiting("ContainerCreating"), 0)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "v", "nfs": {}}]}, "nfs"),
        ({"initContainers": [{"name": "side", "restartPolicy": "Never"}]}, "restartPolicy"),
        ({"containers": [{"name": "c", "lifecycle": {"preStop": {"exec": {"command": []}}}}]}, "lifecycle.preStop"),
        ({"containers": [{"name": "c", "lifecycle": {"postStart": {"sleep": {"seconds": 1}}}}]}, "lifecycle.postStart"),
        ({"containers": [{"name": "c", "livenessProbe": {"grpc": {"port": 1}}}]}, "grpc"),
    ],
)
def test_unsupported_spec_is_refused_by_name(spec: dict[str, Any], named: str) -> None:
    assert named in (unsupported({"spec": {"containers": [], **spec}}) or "")


def test_host_name_is_cut_to_63_characters() -> None:
    assert hostname({"metadata": {"name": "a" * 62 + "-bcdef"}, "spec": {}}) == "a" * 62


def test_an_ordinary_pod_is_not_refused() -> None:
    container = {"name": "c", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    spec = {
        "initContainers": [{"name": "side", "restartPolicy": "Always"}],
        "containers": [container],
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    assert unsupported({"spec": spec}) is None


@pytest.mark.parametrize(
    ("pod", "container", "expected"),
    [({}, {}, 7), ({"runAsUser": 1}, {}, 1), ({"runAsUser": 1}, {"runAsUser": 0}, 0), ({"fsGroup": 2}, {}, 7)],
)
def test_user_is_that_of_container_pod_or_image_in_this_order(
    pod: dict[str, Any], container: dict[str, Any], expected: int
) -> None:
    user = find_user({"spec": {"securityContext": pod}}, {"securityContext": container}, of_image=7)
    assert user == expected
