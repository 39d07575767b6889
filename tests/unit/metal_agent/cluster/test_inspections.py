"""Inspections of a host: each is made once, reported, and given up when its object is gone."""

import asyncio
import collections
from collections.abc import AsyncIterator
from typing import Any

import pytest

from artifacts.errors import ArtifactError
from crds.inspection import InspectionReport
from crds.metalprocess import Artifact
from crds.weights_header import GGUF
from kube.client import Client, Obj
from kube.errors import ApiError, Invalid, NotFound
from kube.resources import METAL_PROCESSES, Resource
from kube.store import Store
from metal_agent.cluster.inspections import AT_A_TIME, Inspections, is_inspection
from metal_agent.weights import HostWeights
from tests.support.eventually import eventually

REPORT = InspectionReport(revision="v1", file="tiny.gguf", size_bytes=5, format="gguf", gguf=GGUF(architecture="llama"))


class Weights(HostWeights):
    """Sources that answer when a test lets them: with a report, or with an error."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most_at_once = 0
        self.answers: collections.defaultdict[str, asyncio.Future[InspectionReport]]
        self.answers = collections.defaultdict(asyncio.Future)
        self._going = 0

    async def inspect(self, artifact: Artifact) -> InspectionReport:
        self.asked.append(artifact.source)
        self._going += 1
        self.most_at_once = max(self.most_at_once, self._going)
        try:
            return await asyncio.shield(self.answers[artifact.source])
        finally:
            self._going -= 1


class Api(Client):
    """The statuses that were written, by name; a failure is raised once."""

    def __init__(self) -> None:
        self.written: collections.defaultdict[str, list[Obj]] = collections.defaultdict(list)
        self.failures: list[ApiError] = []

    async def apply(
        self, resource: Resource, obj: Any, *, field_manager: str, subresource: str = "", force: bool = True
    ) -> Obj:
        del field_manager, force
        assert (resource, subresource) == (METAL_PROCESSES, "status")
        if self.failures:
            raise self.failures.pop()
        self.written[obj["metadata"]["name"]].append(obj["status"])
        return process(obj["metadata"]["name"]) | {"status": obj["status"]}


def process(name: str, namespace: str = "team", **status: Any) -> Obj:
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": "1"}
    artifact = {"source": f"http://models.example/{name}.gguf"}
    spec = {"inspect": True, "modelName": "tiny", "artifact": artifact, "memoryBytes": 1, "hostName": "studio-1"}
    return {"metadata": metadata, "spec": spec, "status": status}


def source(name: str) -> str:
    return f"http://models.example/{name}.gguf"


class Inspected:
    """The inspections of a host, which report at once."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.api, self.weights, self.store = Api(), Weights(), Store()
        self.errors: list[Exception] = []
        self._group = group
        self.inspections = Inspections(self.api, self.store, self.weights, self._enqueue)
        self.inspections.start(group)

    def _enqueue(self, key: tuple[str, ...]) -> None:
        kind, uid = key
        assert kind == "inspection"
        self._group.create_task(self._report(uid))

    async def _report(self, uid: str) -> None:
        try:
            await self.inspections.report(uid)
        except ApiError as error:
            self.errors.append(error)

    def assign(self, *processes: Obj) -> None:
        for each in processes:
            self.store.put(METAL_PROCESSES, each)
        self.inspections.assign(processes)

    def phases(self, name: str) -> list[str]:
        return [each["phase"] for each in self.api.written[name]]

    async def ended(self, name: str, phase: str) -> Obj:
        async def reached() -> bool:
            return self.phases(name)[-1:] == [phase]

        await eventually(reached)
        found: Obj = self.api.written[name][-1]
        return found


@pytest.fixture
async def host() -> AsyncIterator[Inspected]:
    async with asyncio.TaskGroup() as group:
        inspected = Inspected(group)
        yield inspected
        inspected.inspections.assign([])


async def test_report_is_written_and_the_source_is_read_once(host: Inspected) -> None:
    host.weights.answers[source("a")].set_result(REPORT)
    host.assign(process("a"))
    status = await host.ended("a", "Stopped")
    assert status["inspection"] == {
        "revision": "v1",
        "file": "tiny.gguf",
        "sizeBytes": 5,
        "format": "gguf",
        "gguf": {"architecture": "llama"},
    }
    host.assign(process("a"))
    await asyncio.sleep(0)
    assert host.weights.asked == [source("a")]


@pytest.mark.parametrize(("retryable", "phase"), [(True, "Failed"), (False, "Rejected")])
async def test_error_is_reported_with_its_reason(host: Inspected, *, retryable: bool, phase: str) -> None:
    error = ArtifactError("SourceNotFound", "no such file" + "x" * 9000, retryable=retryable)
    host.weights.answers[source("a")].set_exception(error)
    host.assign(process("a"))
    status = await host.ended("a", phase)
    assert status["reason"] == "SourceNotFound"
    assert len(status["message"]) == 1024


async def test_defect_is_reported_and_ends_nothing_else(host: Inspected) -> None:
    host.weights.answers[source("a")].set_exception(KeyError("defect"))
    host.weights.answers[source("b")].set_result(REPORT)
    unreadable = process("c")
    unreadable["spec"]["artifact"] = {"source": 7}
    host.assign(process("a"), process("b"), unreadable)
    for name in ("a", "c"):
        assert (await host.ended(name, "Failed"))["reason"] == "InternalError"
    await host.ended("b", "Stopped")


async def test_report_that_the_api_server_refuses_becomes_a_failure(host: Inspected) -> None:
    host.assign(process("a"))
    await host.ended("a", "Fetching")
    refused = Invalid("apply", status=422, reason="Invalid", message="inspection.sizeBytes in body should be less")
    host.api.failures.append(refused)
    host.weights.answers[source("a")].set_result(REPORT)
    status = await host.ended("a", "Failed")
    assert (status["reason"], "inspection" in status) == ("HeaderInvalid", False)
    assert "inspection.sizeBytes in body" in status["message"]


async def test_inspection_whose_object_is_gone_is_given_up(host: Inspected) -> None:
    host.assign(process("a"), process("b"))
    await host.ended("a", "Fetching")
    host.store.remove(METAL_PROCESSES, "team", "a", uid="uid-a")
    host.assign(process("b"))
    host.weights.answers[source("a")].set_result(REPORT)
    host.weights.answers[source("b")].set_result(REPORT)
    await host.ended("b", "Stopped")
    assert "Stopped" not in host.phases("a")


async def test_object_that_goes_while_it_is_reported_is_no_error(host: Inspected) -> None:
    host.assign(process("a"))
    await host.ended("a", "Fetching")
    host.api.failures.append(NotFound("apply", status=404, reason="NotFound", message="gone"))
    host.weights.answers[source("a")].set_result(REPORT)

    async def is_raised() -> bool:
        return not host.api.failures

    await eventually(is_raised)
    assert host.errors == []


async def test_object_of_the_same_name_gets_no_report_of_its_predecessor(host: Inspected) -> None:
    host.assign(process("a"))
    await host.ended("a", "Fetching")
    successor = process("a")
    successor["metadata"]["uid"] = "uid-successor"
    host.store.put(METAL_PROCESSES, successor)
    host.weights.answers[source("a")].set_result(REPORT)
    await asyncio.sleep(0.01)
    assert "Stopped" not in host.phases("a")


@pytest.mark.parametrize("phase", ["Stopped", "Failed", "Rejected"])
async def test_restarted_agent_makes_no_attempt_twice(host: Inspected, phase: str) -> None:
    host.assign(process("a", phase=phase))
    host.assign(process("b", phase="Fetching"))
    await host.ended("b", "Fetching")
    assert host.weights.asked == [source("b")]


async def test_one_namespace_does_not_hold_up_the_others(host: Inspected) -> None:
    host.assign(*(process(f"slow-{number}", "thief") for number in range(9)), process("a"))
    host.weights.answers[source("a")].set_result(REPORT)
    await host.ended("a", "Stopped")
    assert sorted(host.weights.asked) == [source("a"), source("slow-0")]


async def test_few_inspections_run_at_a_time(host: Inspected) -> None:
    names = [f"n{number}" for number in range(3 * AT_A_TIME)]
    host.assign(*(process(name, f"team-{name}") for name in names))

    async def are_going() -> bool:
        return len(host.weights.asked) == AT_A_TIME

    await eventually(are_going)
    for name in names:
        host.weights.answers[source(name)].set_result(REPORT)
    for name in names:
        await host.ended(name, "Stopped")
    assert host.weights.most_at_once == AT_A_TIME


def test_only_what_says_so_is_an_inspection() -> None:
    assert is_inspection(process("a"))
    assert not is_inspection({"spec": {"serviceName": "chat", "inspect": False}})
    assert not is_inspection({"spec": {}})
