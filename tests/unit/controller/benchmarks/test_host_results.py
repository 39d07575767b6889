"""The measurement of a host counts for the Model of its process, in the namespace of the process, within bounds."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.benchmarks.host_results import (
    AGAIN_SECONDS,
    EARLIEST,
    MOST_AHEAD,
    HostResult,
    HostResults,
    read_host_result,
)
from controller.reconcile.plan import Leading
from controller.services.performance_source import PerformanceSource
from crds.metalprocess import MetalProcess
from crds.rate import MOST_REPORTED
from fitness.performance import MeasuredPerformance, hash_model
from fitness.performance_store import MOST_HOST_CLASSES, RecordKey, decode_records, follow_measurements, name_config_map
from kube.client import Client, Obj, ObjectList
from kube.errors import Unreachable
from kube.resources import CONFIG_MAPS, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.support import virtual_time
from tests.support.api_objects import GIB, NAMESPACE, as_host, as_model, as_process, host, model, process, store
from tests.support.background import running

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
STUDIO = host("studio-1", chip="Apple M2 Ultra", gpuCores=76, memoryBytes=192 * GIB)
CLASS = "apple-m2-ultra-76c-192gb"
ARTIFACT = {"source": "http://models.example/tiny.gguf", "revision": "r1", "sha256": "a" * 64}
MEASURED = {
    "tokensPerSecond": "52.1",
    "promptTokensPerSecond": "3420",
    "timeToFirstTokenMs": 37,
    "interTokenLatencyMs": "19.2",
    "loadSeconds": 12,
    "measuredAt": "2026-11-20T11:00:00Z",
}
FOUND = MeasuredPerformance(tokens_per_second=52.1, source="host", measured_at="2026-11-20T11:00:00Z")


def reporting(name: str = "chat-1", *, measured: Obj | None = None, **fields: Any) -> Obj:
    """Return a process on studio-1 that reports a measurement."""
    made = process(name, **{"host": "studio-1", "phase": "Ready", "artifact": ARTIFACT, **fields})
    made["status"]["performance"] = MEASURED | (measured or {})
    return made


def read(obj: Obj, at: Obj = STUDIO) -> HostResult | str:
    return read_host_result(as_process(obj), as_host(at), as_model(model()), NOW)


def test_measurement_of_a_host_is_stored_as_that_of_a_job() -> None:
    result = read(reporting())
    assert isinstance(result, HostResult)
    spec = as_process(reporting()).spec
    assert result.model_hash == hash_model(as_model(model()), "llama.cpp", spec)
    assert result.key == RecordKey(CLASS, NAMESPACE)
    assert result.record == MeasuredPerformance(
        tokens_per_second=52.1,
        prompt_tokens_per_second=3420.0,
        time_to_first_token_ms=37.0,
        inter_token_latency_ms=19.2,
        load_seconds=12.0,
        model="tiny",
        runtime="llama.cpp",
        node="studio-1",
        measured_at="2026-11-20T11:00:00Z",
        source="host",
    )


@pytest.mark.parametrize(
    ("obj", "problem"),
    [
        (reporting(mode="embeddings"), "no measurement of a model alone"),
        (reporting(host="studio-2"), "bound to another host"),
        (reporting(artifact=ARTIFACT | {"revision": "r0"}), "an earlier state of its Model"),
        (reporting(artifact=ARTIFACT | {"source": "http://models.example/other.gguf"}), "an earlier state"),
        (reporting(measured={"tokensPerSecond": "0"}), "tokensPerSecond 0 is not within"),
        (reporting(measured={"tokensPerSecond": "9999999999999999"}), "tokensPerSecond 1e+16 is not within"),
        (reporting(measured={"promptTokensPerSecond": "100001"}), "promptTokensPerSecond 100001 is not within"),
        (reporting(measured={"loadSeconds": -1}), "no measurement"),
        (reporting(measured={"measuredAt": "2026-11-27T12:11:00Z"}), "in the future: set the clock"),
        (reporting(measured={"measuredAt": "2026-11-20T11:00:00"}), "no time with a zone"),
        (reporting(measured={"measuredAt": "0009-01-01T00:00:00Z"}), "before 2020: set the clock"),
        (reporting(measured={"measuredAt": "0001-01-01000-0000"}), "before 2020: set the clock"),
        (reporting(measured={"measuredAt": "noon"}), "no time with a zone"),
    ],
)
def test_report_that_cannot_be_is_refused_by_name(obj: Obj, problem: str) -> None:
    refusal = read(obj)
    assert isinstance(refusal, str)
    assert problem in refusal


def test_host_cannot_state_the_class_of_a_node() -> None:
    for chip in ("nvidia-l4x1", "NVIDIA H100 80GB HBM3x1", "cpu-amd-epyc-7763x8"):
        assert isinstance(read(reporting(), host("studio-1", chip=chip)), str), "its memory is a part of each class"
        result = read(reporting(), host("studio-1", chip=chip, memoryBytes=GIB))
        assert isinstance(result, HostResult)
        assert result.key.device_class.endswith("-1gb")


rates = st.from_regex(r"([0-9]+(\.[0-9]+)?)?", fullmatch=True).filter(lambda text: len(text) <= 16)


@given(
    st.fixed_dictionaries(
        {"tokensPerSecond": rates},
        optional={
            "promptTokensPerSecond": rates,
            "interTokenLatencyMs": rates,
            "timeToFirstTokenMs": st.integers(-(2**31), 2**31),
            "loadSeconds": st.integers(-(2**31), 2**31),
            "measuredAt": st.text(max_size=64) | st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
        },
    )
)
def test_whatever_a_host_reports_is_a_measurement_within_bounds_or_refused(reported: Obj) -> None:
    obj = process("chat-1", host="studio-1", artifact=ARTIFACT)
    obj["status"]["performance"] = reported
    result = read_host_result(msgspec.convert(obj, MetalProcess), as_host(STUDIO), as_model(model()), NOW)
    if isinstance(result, HostResult):
        record = result.record
        assert 0 < record.tokens_per_second <= MOST_REPORTED
        assert EARLIEST <= datetime.fromisoformat(record.measured_at) <= NOW + MOST_AHEAD
        assert msgspec.json.decode(msgspec.json.encode(record), type=MeasuredPerformance) == record
        assert (result.key.namespace, record.source) == (NAMESPACE, "host")


class World(Client):
    """An API server with the Model `tiny` and the host `studio-1`."""

    def __init__(self) -> None:
        self.store = store((MODELS, model()), (METAL_HOSTS, STUDIO))
        self.measured = PerformanceSource(self.store, follow_measurements(self.store), lambda _key: None)
        self.measured.kind.exists = True
        self.results = HostResults(self.store, self.measured)
        self.writes = 0
        self.fails = False
        self._versions = itertools.count(100)

    def put(self, resource: Resource, obj: Obj) -> Obj:
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(next(self._versions))}}
        self.store.put(resource, stored)
        return stored

    async def list(self, *_: Any, **_selected: Any) -> ObjectList:
        return ObjectList([], "1")

    async def apply(self, resource: Resource, obj: Any, **_: Any) -> Obj:
        if self.fails:
            raise Unreachable("apply configmaps: no answer")
        self.writes += 1
        return self.put(resource, obj)

    def stored(self) -> dict[RecordKey, MeasuredPerformance]:
        spec = as_process(reporting()).spec
        name = name_config_map(hash_model(as_model(model()), "llama.cpp", spec))
        config_map = self.store.get(CONFIG_MAPS, name, "pomona-system")
        return dict(decode_records(config_map).records) if config_map is not None else {}

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        recorder: Any = None
        leading = Leading(self, self.store, recorder, lambda _resource, _key: None)

        async def main() -> None:
            async with running(self.results.run(leading)):
                await asyncio.sleep(1)
                await story()

        virtual_time.run(main())


def test_report_is_stored_once_and_a_later_one_replaces_it() -> None:
    world = World()
    world.put(METAL_PROCESSES, reporting())  # before this replica leads

    async def story() -> None:
        assert [performance.tokens_per_second for performance in world.stored().values()] == [52.1]
        changed = reporting()
        changed["status"]["restarts"] = 1
        world.put(METAL_PROCESSES, changed)
        # Another host of the same class has measured it earlier, and then later.
        world.put(METAL_PROCESSES, reporting("chat-2", measured={"measuredAt": "2026-11-20T10:00:00Z"}))
        await asyncio.sleep(120)
        assert world.writes == 1
        later = {"measuredAt": "2026-11-20T11:30:00Z", "tokensPerSecond": "60"}
        world.put(METAL_PROCESSES, reporting("chat-2", measured=later))
        await asyncio.sleep(120)
        assert world.writes == 2
        assert [performance.tokens_per_second for performance in world.stored().values()] == [60.0]

    world.run(story)


def test_report_that_is_older_than_all_that_are_kept_is_not_written() -> None:
    world = World()

    async def story() -> None:
        for number in range(MOST_HOST_CLASSES):
            world.put(METAL_HOSTS, {**STUDIO, "status": {**STUDIO["status"], "chip": f"Apple M{number}"}})
            world.put(METAL_PROCESSES, reporting(f"chat-{number}"))
            await asyncio.sleep(1)
        assert (world.writes, len(world.stored())) == (MOST_HOST_CLASSES, MOST_HOST_CLASSES)
        world.put(METAL_HOSTS, STUDIO)
        world.put(METAL_PROCESSES, reporting("chat-late", measured={"measuredAt": "2026-11-01T00:00:00Z"}))
        await asyncio.sleep(120)
        assert world.writes == MOST_HOST_CLASSES

    world.run(story)


def test_write_that_fails_is_repeated() -> None:
    world = World()
    world.fails = True
    world.put(METAL_PROCESSES, reporting())

    async def story() -> None:
        assert world.stored() == {}
        world.fails = False
        await asyncio.sleep(600)
        assert len(world.stored()) == 1

    world.run(story)


def test_nothing_is_written_until_what_is_stored_is_known() -> None:
    """A write states all measurements of a model: those that were not listed would be lost."""
    world = World()
    world.measured.kind.exists = False
    world.put(METAL_PROCESSES, reporting())

    async def story() -> None:
        await asyncio.sleep(600)
        assert world.writes == 0
        world.measured.kind.exists = True
        await asyncio.sleep(120)
        assert len(world.stored()) == 1

    world.run(story)


async def test_writer_refuses_what_would_replace_measurements_that_are_not_known() -> None:
    world = World()
    world.measured.kind.exists = False
    leading: Any = None
    with pytest.raises(Unreachable, match="in ConfigMaps of pomona-system are not listed"):
        await world.measured.write(leading, "0" * 16, RecordKey(CLASS, NAMESPACE), FOUND)


def test_report_that_is_refused_is_believed_once_its_reason_is_gone() -> None:
    world = World()
    world.put(MODELS, {**model(), "status": {**model()["status"], "revision": "r2"}})
    world.put(METAL_PROCESSES, reporting())

    async def story() -> None:
        await asyncio.sleep(120)
        assert world.stored() == {}
        world.put(MODELS, model())
        await asyncio.sleep(2 * AGAIN_SECONDS)
        assert len(world.stored()) == 1

    world.run(story)


def test_host_that_reports_other_numbers_and_classes_all_the_time_is_followed_slowly_and_displaces_nobody() -> None:
    world = World()

    async def story() -> None:
        began = datetime(2026, 11, 20, tzinfo=UTC)
        for second in range(3600):
            forged = {**STUDIO, "status": {**STUDIO["status"], "chip": f"Apple M{second}"}}
            world.put(METAL_HOSTS, forged)
            measured_at = (began + timedelta(seconds=second)).isoformat()
            world.put(METAL_PROCESSES, reporting(measured={"measuredAt": measured_at}))
            await asyncio.sleep(1)
        assert world.writes <= 61
        assert len(world.stored()) == MOST_HOST_CLASSES

    world.run(story)


def test_nothing_is_stored_while_this_replica_does_not_lead() -> None:
    world = World()
    world.put(METAL_PROCESSES, reporting())
    assert world.stored() == {}
