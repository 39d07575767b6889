"""Keys of the agent's state files, by which an update adopts running engines.

A key may be added with a default; none may be renamed or dropped. The names in Python do not matter here.
"""

import json
from typing import Any

import msgspec
import pytest

from crds.metalprocess import Artifact, MetalProcessSpec
from fitness.performance import MeasuredPerformance
from metal_agent.benchmarks.measurements import Measurement, MeasurementsFile
from metal_agent.holds.pause_watchdog import PauseRecord
from metal_agent.memory.peaks import PeaksFile, Run
from metal_agent.memory.pressure_watchdog import PressureRecord
from metal_agent.native.engine_handle import ProcessIdentity
from metal_agent.supervise.records import Record

RECORD = (
    b'{"uid":"u1","namespace":"team-a","name":"chat-1","spec":{"serviceName":"chat","modelName":"tiny",'
    b'"runtime":"llama.cpp","artifact":{"source":"hf://org/repo/m.gguf","revision":"c0ffee","sha256":"'
    + b"a"
    * 64
    + b'"},'
    b'"memoryBytes":1000,"tokenSecret":"chat-token"},"identity":{"pid":7,"start_time":"123","boot_id":"boot"},'
    b'"started_at":"2026-11-22T00:00:00Z","ready_at":"2026-11-22T00:00:05Z","url":"http://127.0.0.1:9","restarts":2,'
    b'"model":"tiny"}'
)
PRESSURE = b'{"is_under_pressure":true,"displacing":"u1","evicted":["u2"],"needed_calm_seconds":120.0}'
HOLDS = b'{"sources":{"activity":"2026-11-23T12:00:00Z"},"displacing":["u1"],"evicted":["u2"]}'
PEAKS = b'{"runs":{"key":[{"started":"u1/t","bytes":5}]}}'
MEASUREMENTS = (
    b'{"measurements":{"key":{"engine":"b1","tries":2,"performance":{"tokensPerSecond":8.5},"is_current":true}}}'
)

SPEC = MetalProcessSpec(
    service_name="chat",
    model_name="tiny",
    runtime="llama.cpp",
    artifact=Artifact(source="hf://org/repo/m.gguf", revision="c0ffee", sha256="a" * 64),
    memory_bytes=1000,
    token_secret="chat-token",
)
VALUES = [
    (
        RECORD,
        Record(
            uid="u1",
            namespace="team-a",
            name="chat-1",
            spec=SPEC,
            identity=ProcessIdentity(pid=7, start_time="123", boot_id="boot"),
            started_at="2026-11-22T00:00:00Z",
            ready_at="2026-11-22T00:00:05Z",
            url="http://127.0.0.1:9",
            restarts=2,
            model="tiny",
        ),
    ),
    (
        PRESSURE,
        PressureRecord(is_under_pressure=True, displacing="u1", evicted=("u2",), needed_calm_seconds=120.0),
    ),
    (PEAKS, PeaksFile({"key": [Run(started="u1/t", bytes=5)]})),
    (MEASUREMENTS, MeasurementsFile({"key": Measurement("b1", 2, MeasuredPerformance(tokens_per_second=8.5), True)})),
    (HOLDS, PauseRecord({"activity": "2026-11-23T12:00:00Z"}, ("u1",), ("u2",))),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=["record", "pressure", "peaks", "measurements", "holds"])
def test_file_is_read_and_written_alike(text: bytes, value: Any) -> None:
    assert msgspec.json.decode(text, type=type(value)) == value
    assert json.loads(msgspec.json.encode(value)) == json.loads(text)
