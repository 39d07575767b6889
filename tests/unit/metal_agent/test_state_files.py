"""State that the agent keeps on disk over a restart: address, ports, assignments, records."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gateway.proxy.control_socket import LONGEST_NAME
from metal_agent import assignments
from metal_agent.assignments import LastKnown, LastKnownFile
from metal_agent.cluster import address as host_address
from metal_agent.cluster.address import check_address, find_address
from metal_agent.cluster.exposure import NoPortError, ServicePorts
from metal_agent.options import AgentOptions, OptionsError, StartError
from metal_agent.state_folder import own_folder
from metal_agent.supervise.records import Records
from metal_agent.traffic.proxy_process import _LONGEST_SOCKET, Proxy

PROCESS = {
    "metadata": {"name": "chat-1", "namespace": "team-a", "uid": "u1", "resourceVersion": "7"},
    "spec": {
        "serviceName": "chat",
        "modelName": "tiny",
        "runtime": "llama.cpp",
        "artifact": {"source": "http://files/tiny.gguf"},
        "memoryBytes": 1000,
        "tokenSecret": "chat-token",
    },
    "status": {"phase": "Ready"},
}


def test_host_without_a_route_starts_with_its_last_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = AgentOptions("studio-1", tmp_path)
    with pytest.raises(StartError, match="no route"):
        find_address(chosen, "https://no-such-name.invalid")
    monkeypatch.setattr(host_address, "find_route_address", lambda server: f"192.0.2.1 on the way to {server}")
    monkeypatch.setattr(host_address, "check_address", lambda address: address)
    first = find_address(chosen, "x")
    monkeypatch.undo()
    monkeypatch.setattr(host_address, "check_address", lambda address: address)
    assert find_address(chosen, "https://no-such-name.invalid") == first


def test_state_folder_in_which_the_longest_socket_does_not_fit_is_refused() -> None:
    longest = _LONGEST_SOCKET - len(f"/proxy/{LONGEST_NAME}")
    Proxy(Path("/".ljust(longest, "x")), lambda: None)
    with pytest.raises(StartError, match=r"1 bytes too long for the socket /x+/proxy/last-"):
        Proxy(Path("/".ljust(longest + 1, "x")), lambda: None)


def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "u1.json").write_text("half a rec")
    assert Records(tmp_path).load() == {}


def _record_of_a_newer_version(**changes: object) -> dict[str, Any]:
    record = {
        "uid": "u1",
        "namespace": "team-a",
        "name": "chat-1",
        "spec": PROCESS["spec"] | {"priority": "imperial", "warmStandby": {"seconds": 5}},  # type: ignore[operator]  # a JSON object
        "identity": {"pid": 7, "start_time": "123", "boot_id": "boot"},
        "started_at": "2026-11-22T00:00:00Z",
        "url": "http://127.0.0.1:9",
        "shard": {"rank": 1},
    }
    return record | changes


def test_record_with_values_of_a_newer_version_is_read_and_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "u1.json"
    path.write_text(json.dumps(_record_of_a_newer_version()))
    records = Records(tmp_path)
    record = records.load()["u1"]
    assert (record.spec.service_name, record.spec.priority) == ("chat", "normal")
    assert "priority" in record.assignment.problem, "an engine with another priority is not started by this version"
    records.write(structs.replace(record, ready_at="2026-11-22T00:00:05Z"))
    assert json.loads(path.read_text()) == _record_of_a_newer_version(ready_at="2026-11-22T00:00:05Z")
    assert record.identity
    another = structs.replace(record, identity=structs.replace(record.identity, pid=8))
    records.write(another)
    assert "shard" not in json.loads(path.read_text()), "it was of the engine before"


@pytest.mark.parametrize(
    "changes",
    [{"spec": {"memoryBytes": 7}}, {"spec": PROCESS["spec"] | {"runtime": "warp-drive"}}, {"started_at": 5}],  # type: ignore[operator]  # a JSON object
)
def test_record_of_no_known_engine_is_deleted(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "u1.json").write_text(json.dumps(_record_of_a_newer_version(**changes)))
    records = Records(tmp_path)
    assert records.load() == {}
    assert not (tmp_path / "u1.json").exists()


def test_ports_are_the_same_after_a_restart(tmp_path: Path) -> None:
    ports = ServicePorts(tmp_path / "ports.json", 18000, 18001)
    assert (ports.assign("a/chat"), ports.assign("b/chat"), ports.assign("a/chat")) == (18000, 18001, 18000)
    again = ServicePorts(tmp_path / "ports.json", 18000, 18001)
    assert (again.get("b/chat"), again.get("c/chat")) == (18001, None)
    again.keep({"b/chat"})
    assert again.assign("c/chat") == 18000


def test_a_port_that_another_program_holds_is_not_given_again(tmp_path: Path) -> None:
    ports = ServicePorts(tmp_path / "ports.json", 18000, 18001)
    ports.assign("a/chat")
    ports.refuse("a/chat")
    assert ports.assign("a/chat") == 18001


def test_range_in_which_every_port_is_assigned_is_exhausted(tmp_path: Path) -> None:
    ports = ServicePorts(tmp_path / "ports.json", 18000, 18001)
    ports.assign("a/chat")
    ports.assign("c/chat")
    with pytest.raises(NoPortError, match=r"18000-18001.*b/chat"):
        ports.assign("b/chat")


def test_a_port_that_was_taken_is_tried_again_when_no_other_is_left(tmp_path: Path) -> None:
    ports = ServicePorts(tmp_path / "ports.json", 18000, 18001)
    ports.assign("a/chat")
    ports.refuse("a/chat")
    ports.assign("b/chat")
    assert ports.assign("a/chat") == 18000, "the other program may have left it"


def test_the_last_known_state_is_kept_without_status(tmp_path: Path) -> None:
    memory = LastKnownFile(tmp_path / "assignments.json")
    assert memory.load("studio-1") == LastKnown()
    memory.save([PROCESS], {"team-a_chat-token_token": "c2VjcmV0"})
    last_known = LastKnownFile(tmp_path / "assignments.json").load("studio-1")
    assert last_known.secret == {"team-a_chat-token_token": "c2VjcmV0"}
    assert assignments.read_assignment(last_known.processes[0]) == assignments.read_assignment(PROCESS)
    assert "status" not in last_known.processes[0]


def test_machine_that_has_joined_as_another_host_serves_nothing_of_the_former_one(tmp_path: Path) -> None:
    """Without the API server, it would start what the former host was given, with the tokens of that one."""
    memory = LastKnownFile(tmp_path / "assignments.json")
    memory.save([{**PROCESS, "spec": {**PROCESS["spec"], "hostName": "studio-1"}}], {"a": "b"})  # type: ignore[dict-item]
    assert memory.load("studio-1").secret == {"a": "b"}
    assert memory.load("studio-2") == LastKnown()


def test_an_object_from_a_newer_controller_is_an_assignment_with_a_problem() -> None:
    newer = {**PROCESS, "spec": {**PROCESS["spec"], "priority": "imperial"}}  # type: ignore[dict-item]  # a JSON object
    assignment = assignments.read_assignment(newer)
    assert assignment.spec is assignments.UNREADABLE
    assert "priority" in assignment.problem
    assert assignment.uid == "u1"


def test_process_that_needs_a_feature_of_a_newer_agent_is_started_by_no_older_one() -> None:
    newer = {**PROCESS, "spec": {**PROCESS["spec"], "features": ["Tomorrow", "Later"]}}  # type: ignore[dict-item]  # a JSON object
    assignment = assignments.read_assignment(newer)
    assert assignment.spec.service_name == "chat", "one that runs already runs on"
    assert "spec.features has Later, Tomorrow, which this agent (" in assignment.problem
    assert "update Pomona on this host, and run `pomona agent restart`" in assignment.problem


def test_deletion_mark_is_read_even_with_an_invalid_spec() -> None:
    deleted = {"metadata": {**PROCESS["metadata"], "deletionTimestamp": "2026-11-21T13:10:00Z"}, "spec": 7}  # type: ignore[dict-item]  # a JSON object
    assert assignments.read_assignment(deleted).deleted


def test_a_second_agent_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        own_folder(tmp_path),
        pytest.raises(StartError, match=r"another agent \(process \d+\) uses"),
        own_folder(tmp_path),
    ):
        pytest.fail("two agents")
    with own_folder(tmp_path):
        pass


@pytest.mark.parametrize(
    ("address", "for_good"),
    [
        *((each, True) for each in ("127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "studio")),
        *((each, False) for each in ("169.254.1.1", "fe80::1", "192.0.2.77")),
    ],
)
def test_addresses_that_the_cluster_cannot_use_are_refused(address: str, *, for_good: bool) -> None:
    """A service manager tries again only where a network that comes up may bring another address."""
    with pytest.raises(StartError, match="--address") as refused:
        check_address(address)
    assert isinstance(refused.value, OptionsError) is for_good
