"""Inspections under the policies: which host may report about one, what a report may be, and who makes one."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from kube.client import Obj
from kube.errors import ApiError, Forbidden
from kube.resources import METAL_PROCESSES, Resource
from tests.cluster.policy.conftest import Hosts
from tests.cluster.policy.objects import build_event, build_inspection, build_slice
from tests.cluster.policy.test_stolen_controller_token import HOST, Thief, thief
from tests.cluster.policy.test_stolen_host_token import apply, labels, own_slice

__all__ = ["thief"]

REPORT: Obj = {"revision": "v1", "file": "tiny.gguf", "sizeBytes": 1, "format": "gguf"}
Attempt = Callable[[Hosts], Awaitable[object]]


def report(hosts: Hosts, process: str, **changes: Any) -> Awaitable[object]:
    """Report about an inspection, as studio-1."""
    status = {"phase": "Stopped", "inspection": REPORT | changes}
    obj = {"metadata": {"namespace": hosts.namespace, "name": process}, "status": status}
    return apply(hosts, (METAL_PROCESSES, obj), "status")


@pytest_asyncio.fixture
async def inspecting(hosts: Hosts) -> AsyncIterator[Hosts]:
    """Two hosts, each with an inspection: look-1 and look-2."""
    for number in ("1", "2"):
        asked = build_inspection(hosts.namespace, f"look-{number}", f"studio-{number}")
        hosts.processes[f"look-{number}"] = await hosts.admin.create(METAL_PROCESSES, asked)
    yield hosts


ATTEMPTS: dict[str, tuple[str, Attempt]] = {
    "report about another host's inspection": (
        "MetalProcess .*/look-2 is not bound to host studio-1",
        lambda hosts: report(hosts, "look-2"),
    ),
    "inspection of its choice": (
        'cannot create resource "metalprocesses"',
        lambda hosts: hosts.own.create(METAL_PROCESSES, build_inspection(hosts.namespace, "look-3", "studio-1")),
    ),
    "slice by an inspection": (
        "no process of service .*/tiny is bound to host studio-1",
        own_slice(name="tiny.studio-1", labels=labels("tiny")),
    ),
    "Event about its own inspection": (
        "and about the MetalProcesses that are bound to it, only",
        lambda hosts: hosts.own.create(*build_event(hosts.processes["look-1"], "studio-1")),
    ),
}


@pytest.mark.parametrize(("says", "attempt"), ATTEMPTS.values(), ids=ATTEMPTS)
async def test_inspection_opens_nothing_to_a_stolen_host_token(inspecting: Hosts, says: str, attempt: Attempt) -> None:
    with pytest.raises(Forbidden, match=says):
        await attempt(inspecting)


async def test_host_reports_about_its_own_inspection(inspecting: Hosts) -> None:
    await report(inspecting, "look-1")
    found = await inspecting.admin.get(METAL_PROCESSES, "look-1", inspecting.namespace)
    assert found["status"]["inspection"] == REPORT
    # Its slices are not touched by that.
    await inspecting.own.apply(*build_slice(inspecting.processes["chat-1"]), field_manager="pomona-metal-agent")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"file": "a" * 1025}, "inspection.file: Too long"),
        ({"revision": "a" * 257}, "inspection.revision: Too long"),
        ({"sha256": "x"}, "inspection.sha256: .*should match"),
        ({"sizeBytes": -1}, "inspection.sizeBytes: .*greater than or equal to 0"),
        ({"sizeBytes": "1"}, "failed to create typed patch object .*inspection.sizeBytes"),
        ({"gguf": {"architecture": "a" * 257}}, "inspection.gguf.architecture: Too long"),
        ({"format": "pickle"}, "inspection.format: Unsupported value"),
    ],
    ids=["file", "revision", "digest", "negative", "text", "architecture", "format"],
)
async def test_report_of_a_wrong_form_is_refused(inspecting: Hosts, changes: Obj, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        await report(inspecting, "look-1", **changes)


def inspection(thief: Thief, owner: str = "Model", model: str = "one") -> tuple[Resource, Obj]:
    spec = build_inspection(thief.namespace, "one-look", HOST)["spec"] | {"modelName": model}
    return thief.owned(owner, METAL_PROCESSES, "one-look", spec=spec)


@pytest.mark.parametrize(
    "changes", [{"owner": "InferenceService"}, {"model": "other"}], ids=["of a service", "of another Model"]
)
async def test_controller_token_makes_inspections_of_their_own_model_only(
    thief: Thief, changes: dict[str, str]
) -> None:
    with pytest.raises(Forbidden, match="those that inspect of the Model that they are for"):
        await thief.api.create(*inspection(thief, **changes))
    await thief.api.create(*inspection(thief))
    await thief.api.delete(METAL_PROCESSES, "one-look", thief.namespace)
