"""Promises of the documentation about sidecars, which are init containers with `restartPolicy: Always`."""

from pathlib import Path
from typing import Any

from kube.client import Client
from kube.resources import PODS
from tests.cluster.controlplane.kubelet.conftest import Pods, conditions
from tests.support.eventually import eventually

MOUNT = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
FLAG = {"exec": {"command": ["test", "-e", "/shared/flag"]}, "periodSeconds": 1, "failureThreshold": 100}


def shared(folder: Path) -> dict[str, Any]:
    return {"volumes": [{"name": "shared", "hostPath": {"path": str(folder)}}]}


def sidecar(name: str, *, before: str = "", at_end: str = "", **more: Any) -> dict[str, Any]:
    """Return a sidecar that notes its start, and at SIGTERM its end."""
    script = (
        f"{before}; trap '{at_end} echo {name} stopped >> /shared/order; exit 0' TERM; "
        f"echo {name} >> /shared/order; while :; do sleep 0.05; done"
    )
    return {
        "name": name,
        "image": "pomona-test",
        "command": ["sh", "-c", script.removeprefix("; ")],
        "restartPolicy": "Always",
        **MOUNT,
        **more,
    }


def order(folder: Path) -> list[str]:
    path = folder / "order"
    return path.read_text().splitlines() if path.exists() else []


async def test_startup_probe_of_a_sidecar_delays_what_comes_after_it(pods: Pods, tmp_path: Path) -> None:
    steps = [sidecar("one", startupProbe=FLAG), sidecar("two")]
    name = await pods.run("sleep 1000", main=MOUNT, initContainers=steps, **shared(tmp_path))
    status = await pods.until(name, lambda status: "running" in status["initContainerStatuses"][0]["state"])
    assert status["initContainerStatuses"][0]["started"] is False
    waiting = [*status["initContainerStatuses"][1:], *status["containerStatuses"]]
    assert [each["state"]["waiting"]["reason"] for each in waiting] == ["PodInitializing"] * 2
    assert (status["phase"], conditions(status)["Initialized"]) == ("Pending", "False")
    (tmp_path / "flag").touch()
    status = await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
    assert status["phase"] == "Running"
    # A container without a probe is ready before its shell has written.
    await eventually(lambda: order(tmp_path) == ["one", "two"])


async def test_sidecars_stop_after_the_main_container_in_reverse_order(
    pods: Pods, client: Client, tmp_path: Path
) -> None:
    main = "trap 'sleep 0.3; echo main stopped >> /shared/order; exit 0' TERM; touch /shared/flag; "
    name = await pods.run(
        f"{main} while :; do sleep 0.05; done",
        main={**MOUNT, "readinessProbe": FLAG},
        initContainers=[sidecar("one"), sidecar("two", at_end="sleep 0.3;")],
        restartPolicy="Always",
        terminationGracePeriodSeconds=30,
        **shared(tmp_path),
    )
    await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
    # A shell that has not run yet ignores SIGTERM; the first may write after the second, both after the main one.
    await eventually(lambda: sorted(order(tmp_path)) == ["one", "two"])
    await client.delete(PODS, name, pods.namespace)
    await eventually(lambda: pods.is_gone(name))
    assert order(tmp_path)[2:] == ["main stopped", "two stopped", "one stopped"]


async def test_sidecar_gets_sigterm_when_the_grace_period_is_used_up(
    pods: Pods, client: Client, tmp_path: Path
) -> None:
    name = await pods.run("sleep 1000", main=MOUNT, initContainers=[sidecar("one")], **shared(tmp_path))
    await pods.until(name, lambda status: conditions(status)["Ready"] == "True")
    await eventually(lambda: order(tmp_path) == ["one"])
    await client.delete(PODS, name, pods.namespace)
    await eventually(lambda: pods.is_gone(name))
    assert order(tmp_path) == ["one", "one stopped"]
