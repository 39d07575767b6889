"""The output about a running `pomona up`: tables that fit 80 columns, and all about one service."""

from typing import Any

from cli.machine.service_output import describe_unload, format_loaded, format_memory, format_services, format_status
from cli.machine.service_watch import describe_phase
from standalone.control.up_status import UpEngineStatus, UpServiceStatus, UpStatus
from tests.support.api_objects import GIB


def service(name: str, **fields: Any) -> UpServiceStatus:
    defaults: dict[str, Any] = {
        "namespace": "default",
        "model": f"{name}-model",
        "source": f"hf://acme/{name}/{name}.gguf",
        "on_demand": True,
        "phase": "Idle",
    }
    return UpServiceStatus(name=name, **defaults | fields)


def status(*services: UpServiceStatus, **fields: Any) -> UpStatus:
    defaults: dict[str, Any] = {
        "version": "1",
        "pid": 7,
        "started_at": "2026-11-23T12:00:00Z",
        "endpoint": "http://127.0.0.1:8080",
        "stopping": False,
        "budget_bytes": 4 * GIB,
        "available_bytes": 3 * GIB,
        "log": "/state/up.log",
    }
    return UpStatus(services=list(services), **defaults | fields)


LOADED = service(
    "chat",
    phase="Ready",
    runtime="llama.cpp",
    reserved_bytes=2 * GIB,
    used_bytes=GIB,
    context_length=4096,
    running=2,
    waiting=1,
    requests=9,
    failed=1,
    idle_seconds=0.0,
    engines=[UpEngineStatus("/state/logs/chat.log", "Ready", 12)],
)
IDLE = service("a-name-of-forty-letters-as-long-as-it-gets", detail="its weights cannot be fetched: " + "why " * 20)


def test_list_fits_80_columns_and_is_whole_when_wide() -> None:
    lines = format_services([LOADED, IDLE], 80, is_wide=False).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["NAME", "PHASE", "MEMORY", "REQUESTS", "DETAIL"]
    assert "1.0 GiB" in lines[1]
    assert IDLE.name in lines[2]
    wide = format_services([LOADED, IDLE], None, is_wide=True)
    assert IDLE.detail.strip() in wide
    assert "hf://acme/chat/chat.gguf" in wide


def test_loaded_models_show_when_they_are_unloaded() -> None:
    lines = format_loaded(
        [
            LOADED,
            service("idle", phase="Ready", idle_seconds=12.0, unload_seconds=288.0),
            service("always", phase="Ready", on_demand=False, idle_seconds=9.0),
        ],
        80,
    ).splitlines()
    assert lines[1].split() == ["chat", "Ready", "1.0", "GiB", "2,", "1", "waiting", "4096", "llama.cpp"]
    assert lines[2].split() == ["idle", "Ready", "12s", "4m"]
    assert lines[3].split() == ["always", "Ready", "9s", "never"]
    assert describe_unload(LOADED) == ""


def test_endpoint_and_memory_are_one_line() -> None:
    free = "3.0 GiB of 4.0 GiB of the memory for models are free"
    assert format_memory(status()) == f"endpoint http://127.0.0.1:8080/v1; {free}"
    assert format_memory(status(endpoint="", problem="no endpoint: in use")) == f"no endpoint: in use; {free}"


def test_status_has_all_about_a_service() -> None:
    assert format_status(LOADED, 80).splitlines() == [
        "chat  Ready",
        "model:       chat-model",
        "source:      hf://acme/chat/chat.gguf",
        "memory:      1.0 GiB",
        "requests:    2 running, 1 waiting; 9 so far, 1 failed",
        "loaded:      now, and while it has requests",
        "context:     4096 tokens",
        "engine:      llama.cpp",
        "process:     Ready, process 12",
        "log:         /state/logs/chat.log",
    ]
    idle = format_status(service("idle", detail="its weights cannot be fetched: " + "why " * 20), 80)
    assert "loaded:      by its first request, or by `pomona load`" in idle
    assert max(map(len, idle.splitlines())) <= 80


def test_service_serves_unless_its_requests_are_refused() -> None:
    assert [LOADED.can_serve, service("idle").can_serve, service("x", phase="Degraded").can_serve] == [True] * 3
    refused = service("large", problem="it needs 9 GiB")
    assert not any(each.can_serve for each in (refused, service("x", phase="Starting"), service("x", phase="Failed")))


def test_wait_names_what_is_waited_for() -> None:
    assert describe_phase(service("x", phase="Stopping", running=2)) == "x: waits for 2 running requests"
    assert describe_phase(service("x", phase="Stopping")) == "x: its engine ends"
    assert describe_phase(service("x", phase="Idle")) == "x: waits for memory that others use"
    assert describe_phase(service("x", phase="Starting")) == "x: loading"
    assert describe_phase(service("x", phase="Pending", detail="offline")) == "x: Pending - offline"
