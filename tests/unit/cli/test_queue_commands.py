"""The commands about the queue: their tables and words, their options, and the machines that a plan adds."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from cli.cluster_options import ClusterOptions
from cli.main import main
from cli.queue.command import COLUMNS, describe_start, sort_waiting
from cli.queue.controller_settings import StatedSettings, list_values, merge_settings
from cli.queue.plan_machine import build_machine, load_machine
from cli.queue.plan_output import build_changes, describe_cause, list_changes, render_changes
from cli.queue.planning import find_cell, list_refusals, plan_addition
from cli.queue.wait_explanation import ExplainedService, build_facts, render_explanation
from controller.placement.cluster_copy import ClusterCopy
from controller.placement.forecast import QueueForecast, forecast, simulate_drain
from controller.placement.planner import PlanRules, plan
from controller.placement.remedies import WaitExplanation, explain_unit
from controller.placement.units import Cell, Unit
from crds.placement import ClassSpeed
from devices.vendors import VENDORS
from kube.client import Obj
from tests.support.queue_decisions import runs, subtract_units
from tests.support.queue_units import GPU, host, node, pod, process

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NO_TARGET = ClusterOptions()


def waiting_service(name: str, pool: str = "nvidia", position: int | None = 1, **queue: Any) -> Obj:
    place = {"position": position, "place": f"{position}/9"} if position is not None else {}
    status = {"queue": {"pool": pool, "length": 9, "waitingFor": f"{GPU}: 2", "reason": "Quota", **place, **queue}}
    return {"metadata": {"name": name, "namespace": "team"}, "spec": {"modelRef": "tiny"}, "status": status}


def foresee(cells: list[Cell], units: list[Unit]) -> QueueForecast:
    return forecast([subtract_units(cell, units) for cell in cells], units, PlanRules(), 10_000.0)


def test_services_are_sorted_by_pool_and_place_and_those_without_one_come_last() -> None:
    names = [("ten", "nvidia", 10), ("never", "nvidia", None), ("two", "nvidia", 2), ("mac", "metal", 3)]
    services = [waiting_service(name, pool, position) for name, pool, position in names]
    serving = {"metadata": {"name": "serving", "namespace": "team"}, "spec": {}, "status": {"phase": "Ready"}}
    waiting = sort_waiting([serving, *services])
    assert [service["metadata"]["name"] for service in waiting] == ["mac", "two", "ten", "never"]


def test_row_of_a_service_tells_where_and_for_what_it_waits() -> None:
    row = {column.title: column.read(waiting_service("chat", position=3)) for column in COLUMNS}
    assert row["POOL"] == "nvidia"
    assert row["PLACE"] == "3/9"
    assert row["PRIORITY"] == "normal"
    assert row["WAITS FOR"] == f"{GPU}: 2"
    assert COLUMNS[1].read(waiting_service("chat", position=None)) == "none"


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ({"estimatedStart": {"earliest": "2026-11-21T12:05:00Z", "latest": "2026-11-21T12:15:00Z"}}, "in 5m to 15m"),
        ({"estimatedStart": {"earliest": "2026-11-21T11:00:00Z", "latest": "2026-11-21T12:00:10Z"}}, "in 0s to 10s"),
        ({"noEstimate": "TooFewSeen"}, "TooFewSeen"),
        ({}, ""),
    ],
)
def test_estimated_start_is_a_range_or_the_reason_for_none(queue: Obj, said: str) -> None:
    assert describe_start(queue, NOW) == said


@pytest.mark.parametrize("words", [["queue", "-n", "team", "explain", "chat"], ["plan", "-f", ".", "drain", "h"]])
def test_options_before_the_sub_command_are_refused(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert f"give the options after `{words[3]}`" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "nothing to plan: give --file"),
        (["plan", "add"], "nothing to add: give --accelerator and --memory"),
        (["plan", "add", "--memory", "1Gi", "-f", "README.md"], "--file takes no options of a node"),
    ],
)
def test_incomplete_plans_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert said in result.output


def test_options_of_the_controller_are_those_of_its_deployment_unless_stated() -> None:
    arguments = ["controller", "--image=registry.test/pomona:1", "--image-pull-secret", "a", "--min-run=90s"]
    settings = merge_settings(
        [*arguments, "--image-pull-secret=b", "--scheduling-mode=Native"], VENDORS, StatedSettings()
    )
    assert settings.min_run_seconds == 90
    assert settings.pods.scheduling_mode == "Native"
    assert (settings.pods.image, settings.pods.image_pull_secrets) == ("registry.test/pomona:1", ("a", "b"))
    stated = merge_settings(arguments, VENDORS, StatedSettings(5.0, "Queue"))
    assert (stated.min_run_seconds, stated.pods.scheduling_mode) == (5.0, "Queue")
    namespaced = merge_settings(["--namespace=team"], VENDORS, StatedSettings())
    assert (namespaced.min_run_seconds, namespaced.pods.scheduling_mode) == (300.0, "Native")
    assert list_values(["--min-run"], "--min-run") == []


def explain_new(cells: list[Cell], units: list[Unit]) -> tuple[Unit, WaitExplanation]:
    unit = pod("new", 4)
    everything = [*units, unit]
    free = [subtract_units(cell, everything) for cell in cells]
    return unit, explain_unit(unit, free, everything, PlanRules(), 10_000.0)


def test_explanation_has_the_best_remedy_before_the_table() -> None:
    closed = node("closed", closed="Cordoned", closed_message="node closed is cordoned: kubectl uncordon closed")
    unit, explanation = explain_new([node("full"), closed], [runs("r", 8, "full", priority="high")])
    explained = ExplainedService(waiting_service("chat", message="a wait"), unit, explanation)
    lines = render_explanation(explained, NO_TARGET, is_wide=True)
    assert lines[0] == "chat waits, 1/9 in pool nvidia (Quota): a wait"
    assert " ".join(lines[1:]).startswith(
        "best remedy, for node/closed: open the node (node closed is cordoned: kubectl uncordon closed)"
    )
    table = lines[-1].splitlines()
    assert table[0].split("  ")[0] == "CELL"
    assert [line.split()[:2] for line in table[1:]] == [["node/closed", "Cordoned"], ["node/full", "Insufficient"]]
    facts = build_facts(explained)
    assert facts["bestRemedy"] == {"cell": "node/closed", "remedy": "open the node"}
    assert facts["cells"][1] == {
        "cell": "node/full",
        "reason": "Insufficient",
        "resource": GPU,
        "message": f"4 of {GPU} needed, 0 left",
        "remedy": f"end replicas that hold 4 of {GPU} there, or raise spec.priority",
    }


def test_explanation_without_rights_has_the_status_and_the_rights() -> None:
    service = waiting_service("chat", message="a wait")
    lines = render_explanation(ExplainedService(service, missing=["u may not list nodes"]), NO_TARGET)
    assert lines == ["chat waits, 1/9 in pool nvidia (Quota): a wait", "not shown: u may not list nodes"]


def test_service_that_waits_for_kueue_is_explained_by_its_status() -> None:
    service = waiting_service("chat", "kueue/models", message="waiting in LocalQueue models of Kueue")
    del service["status"]["queue"]["reason"]
    lines = render_explanation(ExplainedService(service), NO_TARGET)
    assert lines == ["chat waits, 1/9 in pool kueue/models: waiting in LocalQueue models of Kueue"]


def test_service_that_does_not_wait_is_said_to() -> None:
    ready: Obj = {"metadata": {"name": "chat", "namespace": "team"}, "status": {"phase": "Ready"}}
    (line,) = render_explanation(ExplainedService(ready), ClusterOptions(namespace="team"))
    assert line == "chat does not wait in the queue: its phase is Ready; see `pomona status chat -n team`"


def test_service_that_the_next_round_admits_is_said_to() -> None:
    unit, explanation = explain_new([node("a")], [])
    (line,) = render_explanation(ExplainedService(waiting_service("chat"), unit, explanation), NO_TARGET)
    assert line == "chat waits no longer: the next round gives pod team/new node/a"


def test_plan_names_outcome_place_and_cause_of_each_replica() -> None:
    low = runs("low", 8, "a", priority="low", evictable_since=0.0)
    young = runs("young", 2, "b", priority="low", evictable_since=9_940.0)
    before = foresee([node("a", labels={"zone": "x"}), node("b", 2, labels={"zone": "y"})], [low, young])
    new = pod("new", 8, priority="high", selector={"zone": "x"})
    later = pod("later", 2, priority="high", selector={"zone": "y"})
    after = foresee([node("a", labels={"zone": "x"}), node("b", 2, labels={"zone": "y"})], [low, young, new, later])
    changes = list_changes(before, after, ["new", "later"])
    rows = render_changes(changes, None).splitlines()
    assert rows[0].split() == ["SERVICE", "REPLICA", "PRIORITY", "POOL", "OUTCOME", "WHERE", "WHY"]
    by_service = {line.split()[0]: " ".join(line.split()[4:]) for line in rows[1:]}
    assert by_service["team/new"].startswith("starts node/a evicts team/low of priority low")
    assert by_service["team/later"].startswith("starts in 4m node/b evicts team/young")
    assert by_service["team/low"].startswith("evicted, waits 1/2 node/a evicted for team/new of priority high; ")
    facts = {change["replica"]: change for change in build_changes(changes)}
    assert facts["new"]["evicts"] == ["team/low"]
    assert facts["low"]["outcome"] == "evicted"
    assert facts["low"]["from"] == ["node/a"]
    assert facts["low"]["evictedFor"] == "team/new"
    assert facts["low"]["place"] == {"position": 1, "length": 2}
    assert facts["later"]["afterSeconds"] == 240
    narrow = render_changes(changes, 60).splitlines()
    assert narrow[0].split() == ["SERVICE", "OUTCOME", "WHERE", "WHY"]
    assert max(map(len, narrow)) <= 60


@pytest.mark.parametrize(
    ("speed", "said", "expected"),
    [
        (
            ClassSpeed("nvidia-l4x8", tokens_per_second="24.5", low="18", high="30.1", source="Estimated"),
            "24.5 tokens/s (Estimated, 18 to 30.1); no replica of the service there",
            ("nvidia-l4x8", 24.5, 18.0, 30.1, "Estimated"),
        ),
        (
            ClassSpeed("nvidia-l4x8", tokens_per_second="140", source="Measured"),
            "140 tokens/s (Measured); no replica",
            ("nvidia-l4x8", 140.0, None, None, "Measured"),
        ),
        (ClassSpeed("nvidia-l4x8"), "no replica of the service there", ("", None, None, None, None)),
        (ClassSpeed("nvidia-h100x8", tokens_per_second="1"), "no replica of the service", ("", None, None, None, None)),
    ],
)
def test_replica_that_starts_has_its_speed_with_source_and_range(
    speed: ClassSpeed, said: str, expected: tuple[Any, ...]
) -> None:
    cells = [msgspec.structs.replace(node("a"), device_class="nvidia-l4x1")]
    before, after = foresee(cells, []), foresee(cells, [pod("new", 8)])
    (change,) = list_changes(before, after, ["new"], lambda service: [speed] if service.name == "new" else [])
    (row,) = build_changes([change])
    assert describe_cause(change).startswith(said)
    names = ("deviceClass", "tokensPerSecond", "tokensPerSecondLow", "tokensPerSecondHigh", "speedSource")
    assert tuple(row[name] for name in names) == expected


def test_replica_for_which_others_are_evicted_has_its_speed() -> None:
    cells = [msgspec.structs.replace(node("a"), device_class="nvidia-l4x1")]
    low = runs("low", 8, "a", priority="low", evictable_since=0.0)
    before, after = foresee(cells, [low]), foresee(cells, [low, pod("new", 8, priority="high")])
    speed = ClassSpeed("nvidia-l4x8", tokens_per_second="24.5", source="Measured")
    rows = {row["service"]: row for row in build_changes(list_changes(before, after, ["new"], lambda _: [speed]))}
    assert (rows["new"]["evicts"], rows["new"]["tokensPerSecond"]) == (["team/low"], 24.5)
    assert (rows["low"]["outcome"], rows["low"]["tokensPerSecond"]) == ("evicted", None)


def test_process_of_a_drained_host_stays_if_it_fits_nowhere_else_and_a_pod_waits() -> None:
    cells = [host("h"), node("a")]
    units = [process("p", 8, cells=("host/h",)), runs("r", 8, "a")]
    before = foresee(cells, units)
    free = [subtract_units(cell, units) for cell in cells]
    for drained, uid, outcome in (("host/h", "p", "stays"), ("node/a", "r", "waits")):
        after = forecast(*simulate_drain(free, units, drained), PlanRules(), 10_000.0)
        (row,) = build_changes(list_changes(before, after, [uid]))
        assert (row["outcome"], row["from"], row["to"], row["reason"]) == (outcome, [drained], [], "CellsClosed")


def test_cell_is_found_by_its_name_unless_host_and_node_share_it() -> None:
    cells = [node("a"), node("b"), host("b")]
    assert find_cell("a", cells) == "node/a"
    assert find_cell("host/b", cells) == "host/b"
    with pytest.raises(click.ClickException, match="write host/b or node/b"):
        find_cell("b", cells)
    with pytest.raises(click.ClickException, match="there is host/b, node/a, node/b"):
        find_cell("c", cells)


def test_added_node_has_what_was_stated() -> None:
    copied = ClusterCopy()
    changes, after, notes, _ = plan_addition(copied, build_machine("nvidia", 8, "64Gi", ("zone=x",), VENDORS))
    assert (changes, notes) == ([], [])
    (cell,) = after.cells
    assert (cell.id, cell.pool, cell.total[GPU], cell.total["memory"]) == ("node/new", "nvidia", 8, 64 * 2**30)
    assert cell.node is not None
    assert cell.node["metadata"]["labels"] == {"zone": "x"}
    assert not cell.closed


def test_plan_says_why_the_first_services_would_not_start_on_a_machine() -> None:
    cell = node("new", 2)
    large, again, ours = pod("a-large", 8), pod("b-again", 8), process("c-ours", 4)
    others = [pod(f"d-{number}", 8) for number in range(4)]
    made = plan([cell], [large, msgspec.structs.replace(again, service=large.service), ours, *others], PlanRules(), 0.0)
    assert list_refusals(cell, made, PlanRules()) == [
        f"team/a-large: 8 of {GPU} needed, 2 in all: lower the need of {GPU}, or add a larger node",
        "team/c-ours: pool nvidia is not among metal: let the service use pool nvidia",
        f"team/d-0: 8 of {GPU} needed, 2 in all: lower the need of {GPU}, or add a larger node",
    ]


def test_added_host_takes_processes_of_every_engine() -> None:
    after = plan_addition(ClusterCopy(), build_machine("metal", None, "96Gi", (), VENDORS)).after
    (cell,) = after.cells
    assert (cell.id, cell.free) == ("host/new", {"memory": 96 * 2**30})
    assert not process("p").requirement.refuse(cell)
    assert not cell.closed


def test_machine_of_a_file_is_empty_and_open(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(
        "{kind: Node, metadata: {name: gpu-3, labels: {a: b}}, spec: {unschedulable: true, taints: ["
        "{key: node.kubernetes.io/unschedulable, effect: NoSchedule}, {key: gpu, value: x, effect: NoSchedule}]},"
        " status: {capacity: {nvidia.com/gpu: '4', memory: 8Gi, cpu: '4', pods: '9'}}}"
    )
    after = plan_addition(ClusterCopy(), load_machine(path)).after
    (cell,) = after.cells
    assert (cell.closed, cell.free[GPU]) == ("", 4)
    assert cell.node is not None
    assert [taint["key"] for taint in cell.node["spec"]["taints"]] == ["gpu"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nvidia", None, "1Gi"), "--devices is missing"),
        (("metal", 2, "1Gi"), "a host has none to count"),
        (("cpu", 1, "1Gi"), "use one of"),
        (("nvidia", 1, "many"), "is not a size: give a size such as"),
    ],
)
def test_machine_that_cannot_be_is_refused(arguments: tuple[str, int | None, str], said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        build_machine(*arguments, (), VENDORS)


@pytest.mark.parametrize("text", ["[1, 2]", "kind: Pod", "{", "--- \na: 1\n---\nb: 2"])
def test_file_without_a_machine_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text)
    with pytest.raises(click.UsageError, match=r"node\.yaml"):
        load_machine(path)
