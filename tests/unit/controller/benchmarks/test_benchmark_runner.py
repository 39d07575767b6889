"""The runner starts few Jobs, stores what they measured, and ends them in the way of what waits; time is virtual."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from controller.benchmarks import benchmark_runner
from controller.benchmarks.benchmark_job import MeasuredEngine
from controller.benchmarks.benchmark_runner import BenchmarkRunner
from controller.models.jobs import JobOutcome
from controller.placement.units import Cell
from controller.pod_settings import PodSettings
from controller.reconcile.plan import Leading
from controller.services.endpoints import Endpoint
from controller.services.performance_source import PerformanceSource
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import build_config_map, encode_record, follow_measurements
from fitness.serving_devices import describe_devices
from kube.client import Client, Obj, ObjectList
from kube.errors import Forbidden, Invalid, Unreachable
from kube.resources import (
    CONFIG_MAPS,
    INFERENCE_SERVICES,
    JOBS,
    MODELS,
    NODES,
    PODS,
    ObjectKey,
    Resource,
)
from tests.support import virtual_time
from tests.support.api_objects import GIB, as_model, as_service, model, service, store
from tests.support.background import running

START = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()
CHAT = ObjectKey("team", "chat")
LABELS = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"}
RECORD = MeasuredPerformance(tokens_per_second=52.1, runs=[52.1])


def ready_service(**spec: Any) -> Obj:
    return service(status={"phase": "Ready"}, **({"hardware": {"accelerator": "nvidia"}} | spec))


WorldT = TypeVar("WorldT", bound="World")


class VirtualClock(datetime):
    """The wall clock, in step with that of the loop."""

    @classmethod
    def now(cls, tz: Any = None) -> "VirtualClock":
        return cls.fromtimestamp(START + asyncio.get_running_loop().time(), tz)


class World(Client):
    """A cluster with one node, one Model and one service, and the Jobs that are asked of it."""

    def __init__(self) -> None:
        self.store = store()
        self.rooms: dict[str, str] = {}
        """The node of each Job whose room is free to others, as the runner has said last."""
        self.taken: set[str] = set()
        """Nodes whose device others have."""
        self.enqueued: list[ObjectKey] = []
        self.created: list[Obj] = []
        self.deleted: list[str] = []
        self.result: MeasuredPerformance | JobOutcome = RECORD
        """The result of each measurement."""
        self.measured_pods: list[str] = []
        self.fails = False
        self.keeps_pods = False
        """The pods of Jobs that are deleted end later."""
        self.unseen: list[Obj] = []
        """ConfigMaps that no watch has brought yet."""
        self.refused: set[str] = set()
        """Names of Jobs that may not be deleted, and namespaces in which none may be created."""
        self.measured = PerformanceSource(self.store, follow_measurements(self.store), self.enqueued.append)
        self.measured.kind.exists = True
        self.runner = BenchmarkRunner(
            self.store,
            PodSettings("pomona:test"),
            self.measured,
            list_cells=self.list_cells,
            list_classes=lambda _accelerator: [describe_devices("nvidia", "NVIDIA-L4", memory_bytes=24 * GIB)],
            report_job_nodes=self.take_rooms,
        )
        self._versions = itertools.count(1)
        self.add_node("n1", LABELS)
        self.put(MODELS, model())
        self.put(INFERENCE_SERVICES, ready_service())

    def put(self, resource: Resource, obj: Obj) -> Obj:
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(next(self._versions))}}
        self.store.put(resource, stored)
        return stored

    def add_service(self, namespace: str, **spec: Any) -> None:
        """Add the Model and the service to another namespace, which comes first."""
        own = {"namespace": namespace}
        for resource, obj in (
            (MODELS, model()),
            (INFERENCE_SERVICES, ready_service(**spec)),
        ):
            metadata = {**obj["metadata"], **own, "uid": f"{namespace}-{obj['metadata']['uid']}"}
            before = self.store.get(resource, obj["metadata"]["name"], "team")
            self.store.remove(resource, "team", obj["metadata"]["name"])
            self.put(resource, {**obj, "metadata": metadata})
            self.put(resource, before or {})

    def take_rooms(self, jobs: Mapping[str, str]) -> None:
        self.rooms = dict(jobs)

    def list_cells(self) -> list[Cell]:
        """Return the nodes as cells; the room of Jobs is free."""
        cells = []
        for node in self.store.list(NODES):
            name, labels = node["metadata"]["name"], node["metadata"]["labels"]
            free = {"nvidia.com/gpu": 0 if name in self.taken else 1, "memory": 2**40}
            metadata = {"metadata": {"labels": labels}, "spec": {}}
            cells.append(
                Cell(name=name, kind="node", pool="nvidia", total={"nvidia.com/gpu": 1}, free=free, node=metadata)
            )
        return cells

    def add_node(self, name: str, labels: Obj) -> None:
        metadata = {"name": name, "uid": name, "labels": labels}
        self.put(NODES, {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "1"}}})

    def wait_for(self, *pools: str, given: frozenset[str] = frozenset()) -> None:
        """Tell the runner for which pools units wait, and where they are admitted."""
        self.runner.mark_jobs_in_the_way(frozenset(pools), given)

    def list_jobs(self) -> list[Obj]:
        """Return the Jobs that are not forged."""
        return [job for job in self.store.list(JOBS) if job["metadata"]["namespace"] != "evil"]

    async def create(self, resource: Resource, obj: Any) -> Obj:
        if self.fails:
            raise Unreachable("create jobs: no answer")
        if obj["metadata"]["namespace"] in self.refused:
            raise Forbidden("create jobs", status=403, message="exceeded quota: jobs")
        created = {
            **obj["metadata"],
            "uid": f"uid-{len(self.created)}",
            "creationTimestamp": VirtualClock.now(UTC).isoformat(),
        }
        job = {**obj, "metadata": created}
        self.created.append(job)
        return self.put(resource, job)

    async def delete(self, resource: Resource, name: str, namespace: str | None = None, **_: Any) -> None:
        if name in self.refused:
            raise Forbidden("delete jobs", status=403, message="no Model controls it")
        self.deleted.append(name)
        for pod in [] if self.keeps_pods else list(self.store.list(PODS)):
            self.store.remove(PODS, "team", pod["metadata"]["name"])
        self.store.remove(resource, namespace, name)

    async def list(self, *_: Any, **selected: Any) -> ObjectList:
        name = str(selected["field_selector"]).partition("=")[2]
        return ObjectList([job for job in self.unseen if job["metadata"]["name"] == name], "1")

    async def apply(self, resource: Resource, obj: Any, **_: Any) -> Obj:
        return self.put(resource, obj)

    def forge_job(self, name: str, **changes: Any) -> None:
        """Add the Job of a tenant that looks like the one that the controller has made for the node."""
        metadata = {
            "name": name,
            "namespace": "evil",
            "uid": f"uid-{name}",
            "labels": {"inference.pomona.dev/benchmark": "true"},
            "creationTimestamp": datetime.fromtimestamp(START, UTC).isoformat(),
        }
        self.put(JOBS, {"metadata": metadata, "spec": {"template": {"spec": {}}, **changes}})

    def run_pod(self, job: Obj | None = None, engine: Obj | None = None, **status: Any) -> None:
        """Set the state of the pod of a Job, by default of the only one."""
        job = job or self.list_jobs()[0]
        uid = job["metadata"]["uid"]
        owner = {"uid": uid, "controller": True, "kind": "Job", "name": "j", "apiVersion": "batch/v1"}
        metadata = {
            "name": f"pod-{uid}",
            "namespace": job["metadata"]["namespace"],
            "uid": f"pod-{uid}",
            "ownerReferences": [owner],
            "labels": {"inference.pomona.dev/benchmark": "true"},
            "creationTimestamp": VirtualClock.now(UTC).isoformat(),
        }
        status["initContainerStatuses"] = [{"name": "llama-server", **(engine or {"state": {"running": {}}})}]
        self.put(PODS, {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": status})

    def finish(self, job: Obj | None = None, failure: JobOutcome | None = None) -> None:
        """Make the pod of a Job ready, by default of the only one, so that its measurement ends, or fails."""
        self.result = RECORD if failure is None else failure
        ready = {"type": "Ready", "status": "True"}
        self.run_pod(job, podIPs=[{"ip": "10.0.0.9"}], conditions=[ready])

    async def measure(
        self, _client: Client, _service: Any, pod: Endpoint, engine: MeasuredEngine, source: Any
    ) -> MeasuredPerformance | JobOutcome:
        self.measured_pods.append(pod.url)
        result = self.result
        await asyncio.sleep(2)
        if isinstance(result, JobOutcome):
            return result
        return replace(result, **engine._asdict(), source=source)

    def run(self, *stories: Callable[[], Awaitable[None]]) -> None:
        """Run a story beside the runner; each further one is of another leadership."""
        recorder: Any = None
        leading = Leading(self, self.store, recorder, lambda _resource, key: self.enqueued.append(key))

        async def main() -> None:
            for story in stories:
                async with running(self.runner.run(leading)):
                    await asyncio.sleep(10)
                    await story()

        virtual_time.run(main())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return simulate(World(), monkeypatch)


def simulate(world: WorldT, monkeypatch: pytest.MonkeyPatch) -> WorldT:
    monkeypatch.setattr(benchmark_runner, "datetime", VirtualClock)
    monkeypatch.setattr(benchmark_runner, "measure_pod", world.measure)
    return world


def test_result_is_stored_and_shown_and_its_job_deleted(world: World) -> None:
    async def story() -> None:
        assert len(world.created) == 1
        world.finish()
        await asyncio.sleep(10)
        (stored,) = world.store.list(CONFIG_MAPS)
        assert list(stored["data"]) == ["nvidia-l4x1_team"]
        record = json.loads(stored["data"]["nvidia-l4x1_team"])
        assert record["accelerator"] == "nvidia"
        assert 10 < record["estimatedTokensPerSecond"] < 100_000
        model_hash = stored["metadata"]["labels"]["inference.pomona.dev/model-hash"]
        shown = world.measured.find_performance(CHAT, model_hash, {"nvidia-l4x1"})
        assert shown is not None
        assert shown.tokens_per_second == "52.1"
        assert world.list_jobs() == []
        await asyncio.sleep(5000)
        assert len(world.created) == 1

    world.run(story)


def test_benchmark_ends_within_seconds_when_anything_waits(world: World) -> None:
    async def story() -> None:
        world.run_pod()
        world.wait_for("nvidia")
        await asyncio.sleep(2)
        assert world.list_jobs() == []
        await asyncio.sleep(1000)
        assert len(world.created) == 1
        assert world.measured.find_problem(CHAT) is None
        world.wait_for()
        world.add_node("n1", LABELS)
        await asyncio.sleep(20)
        assert len(world.created) == 2

    world.run(story)


def test_engine_that_always_ends_is_tried_thrice_and_reported(world: World) -> None:
    async def story() -> None:
        crashed = {"state": {}, "lastState": {"terminated": {"exitCode": 1, "message": "no memory"}}}
        for tries in (1, 2, 3):
            assert len(world.created) == tries
            world.run_pod(engine=crashed)
            await asyncio.sleep(200)
        await asyncio.sleep(100_000)
        assert len(world.created) == 3
        assert world.list_jobs() == []
        problem = world.measured.find_problem(CHAT)
        assert problem is not None
        assert problem.reason == "EngineFailed"
        assert "no memory" in problem.message
        assert CHAT in world.enqueued
        world.put(INFERENCE_SERVICES, ready_service(parallel=2))
        await asyncio.sleep(20)
        assert len(world.created) == 4
        assert world.measured.find_problem(CHAT) is None

    world.run(story)


def test_api_server_that_does_not_answer_delays_no_more_than_it_must(world: World) -> None:
    world.fails = True

    async def story() -> None:
        assert world.created == []
        world.fails = False
        await asyncio.sleep(60)
        assert len(world.created) == 1

    world.run(story)


def forbid(call: str) -> Forbidden:
    return Forbidden(call, status=403, reason="Forbidden", message="exceeded quota: jobs")


def test_namespace_that_refuses_jobs_leaves_the_benchmarks_of_others_alone(world: World) -> None:
    world.add_service("a-quota")
    refused = list[str]()
    create = world.create

    async def refuse(resource: Resource, obj: Any) -> Obj:
        if obj["metadata"]["namespace"] == "a-quota":
            refused.append(obj["metadata"]["name"])
            raise forbid("create jobs")
        return await create(resource, obj)

    world.create = refuse  # type: ignore[method-assign]

    async def story() -> None:
        await asyncio.sleep(100)
        assert refused
        assert [job["metadata"]["namespace"] for job in world.created] == ["team"]
        problem = world.measured.find_problem(ObjectKey("a-quota", "chat"))
        assert problem is not None
        assert "exceeded quota: jobs" in problem.message

    world.run(story)


def test_measurement_that_cannot_be_stored_keeps_no_other_back(world: World) -> None:
    world.add_service("a-model", contextLength=32768)
    world.add_node("n2", LABELS)
    apply, sent = world.apply, list[str]()

    async def refuse_first(resource: Resource, obj: Any, **options: Any) -> Obj:
        sent.append(obj["metadata"]["name"])
        if obj["metadata"]["name"] == sent[0]:
            raise Invalid("apply configmaps", status=422, reason="Invalid", message="the ConfigMap is immutable")
        return await apply(resource, obj, **options)

    world.apply = refuse_first  # type: ignore[method-assign]

    async def story() -> None:
        for job in world.list_jobs():
            world.finish(job)
        await asyncio.sleep(100)
        assert len(set(sent)) == 2
        assert len(list(world.store.list(CONFIG_MAPS))) == 1
        assert sent.count(sent[0]) > 1, "it is tried again"

    world.run(story)


def test_measurement_of_another_leader_that_no_watch_has_brought_yet_stays(world: World) -> None:
    async def story() -> None:
        model_hash = hash_model(as_model(model()), "llama.cpp", as_service(ready_service()).spec)
        theirs = build_config_map(model_hash, {"nvidia-h100x1_team": encode_record(RECORD)})
        theirs["metadata"]["resourceVersion"] = "7"
        world.unseen.append(theirs)
        world.finish()
        await asyncio.sleep(10)
        (stored,) = world.store.list(CONFIG_MAPS)
        assert set(stored["data"]) == {"nvidia-h100x1_team", "nvidia-l4x1_team"}

    world.run(story)


def test_late_event_of_a_deletion_lets_no_failure_be_forgotten(world: World) -> None:
    crashed = {"state": {}, "lastState": {"terminated": {"exitCode": 1, "message": "no memory"}}}
    delete = world.delete

    async def delete_late(resource: Resource, name: str, namespace: str | None = None, **_: Any) -> None:
        asyncio.get_running_loop().call_later(20, lambda: asyncio.ensure_future(delete(resource, name, namespace)))

    world.delete = delete_late  # type: ignore[method-assign]

    async def story() -> None:
        world.run_pod(engine=crashed)
        await asyncio.sleep(3)
        world.add_node("n1", LABELS)
        await asyncio.sleep(30)
        assert world.list_jobs() == []
        assert len(world.created) == 1, "not before its back-off"

    world.run(story)


def test_result_of_a_job_that_nobody_wants_is_not_stored(world: World) -> None:
    async def story() -> None:
        (job,) = world.list_jobs()
        await asyncio.sleep(benchmark_runner.LOOK_SECONDS)
        world.store.remove(INFERENCE_SERVICES, "team", "chat")
        world.finish()
        await asyncio.sleep(10)
        assert list(world.store.list(CONFIG_MAPS)) == []
        assert job["metadata"]["name"] in world.deleted

    world.run(story)


def test_second_service_with_a_model_does_not_end_the_job_of_the_first(world: World) -> None:
    async def story() -> None:
        second = ready_service()
        names = {"name": "second", "uid": "uid-second"}
        world.put(INFERENCE_SERVICES, {**second, "metadata": {**second["metadata"], **names}})
        await asyncio.sleep(30)
        assert (len(world.created), world.deleted) == (1, [])

    world.run(story)


def test_new_leader_ends_the_jobs_of_the_last_one_and_starts_them_again(world: World) -> None:
    async def first() -> None:
        assert len(world.created) == 1

    async def second() -> None:
        await asyncio.sleep(20)
        assert world.deleted == [world.created[0]["metadata"]["name"]]
        assert len(world.list_jobs()) == 1
        assert len(world.created) == 2

    world.run(first, second)


def test_services_are_looked_at_only_after_a_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[float]()
    prepare = BenchmarkRunner._list_benchmarks

    async def count(self: BenchmarkRunner) -> None:
        looks.append(asyncio.get_running_loop().time())
        await prepare(self)

    monkeypatch.setattr(BenchmarkRunner, "_list_benchmarks", count)

    async def story() -> None:
        before = len(looks)
        await asyncio.sleep(500)
        assert len(looks) == before
        for _ in range(100):
            world.put(INFERENCE_SERVICES, world.store.get(INFERENCE_SERVICES, "chat", "team") or {})
            await asyncio.sleep(0.1)
        assert len(looks) - before <= 3

    world.run(story)
