"""The export follows the measurements that count for all, and is written only when it differs."""

import asyncio
from typing import Any

import msgspec

from controller.benchmarks.flexinfer_export import FlexInferExport
from controller.reconcile.plan import Leading
from controller.services.performance_source import PerformanceSource
from fitness.performance import MeasuredPerformance
from fitness.performance_store import RecordKey, build_config_map, follow_measurements, put_record
from kube.client import Client, Obj
from kube.errors import Unreachable
from kube.resources import CONFIG_MAPS, Resource
from tests.support import virtual_time
from tests.support.api_objects import store
from tests.support.background import running

HASH = "3f9a0c51d2e84b77"


class Applied(Client):
    """An API that notes what is applied."""

    def __init__(self) -> None:
        self.written: list[Obj] = []
        self.fails = False

    async def apply(self, resource: Resource, obj: Any, **_: Any) -> Obj:
        if self.fails:
            raise Unreachable("apply configmaps: no answer")
        assert resource == CONFIG_MAPS
        self.written.append(obj)
        applied: Obj = obj
        return applied


def test_change_of_what_counts_for_all_is_written_once() -> None:
    api, stored = Applied(), store()
    recorder: Any = None

    def put(version: int, **speeds: float) -> None:
        data: dict[str, str] = {}
        for name, speed in speeds.items():
            device_class, _, namespace = name.partition("_")
            record = MeasuredPerformance(tokens_per_second=speed, model="tiny", measured_at="2026-11-26T10:00:00Z")
            data = put_record(data, RecordKey(device_class, namespace), record).data
        obj = build_config_map(HASH, data)
        stored.put(CONFIG_MAPS, {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}})

    async def main() -> None:
        export = FlexInferExport(PerformanceSource(stored, follow_measurements(stored), lambda _key: None))
        async with running(export.run(Leading(api, stored, recorder, lambda _resource, _key: None))):
            await asyncio.sleep(1)
            assert [config_map["data"] for config_map in api.written] == [{}]
            put(1, l4=7.5)
            put(2, l4=7.5, l4_team=9.0)
            await asyncio.sleep(100)
            assert len(api.written) == 2
            assert api.written[1]["metadata"]["name"] == "flexinfer-benchmarks"
            (key, value), *others = api.written[1]["data"].items()
            assert (key, others) == (f"{HASH}-l4", [])
            assert msgspec.json.decode(value)["tokensPerSecond"] == 7.5
            api.fails = True
            put(3, l4=8.0)
            await asyncio.sleep(100)
            api.fails = False
            await asyncio.sleep(100)
            assert len(api.written) == 3

    virtual_time.run(main())
