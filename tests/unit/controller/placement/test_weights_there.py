"""A replica goes to a host that has its weights, by what the host reports and the process states."""

from typing import Any

import pytest

from artifacts.source import weights_identity
from controller.placement.actions import Admit
from controller.placement.cell_registry import CellRegistry
from controller.placement.observed_units import observe_units
from controller.placement.planner import PlanRules, plan
from crds.meta import MOVES
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import METAL_HOSTS, METAL_PROCESSES
from kube.store import Store
from tests.support.api_objects import GIB, NOW, host, process, store
from tests.support.queue_decisions import decide, say
from tests.support.queue_units import host as host_cell
from tests.support.queue_units import process as process_unit

DIGEST, OTHER = "a" * 64, "b" * 64
SOURCE = "hf://acme/tiny/a.gguf"


def waiting(name: str, *, sha256: str = DIGEST, annotations: Obj | None = None, **artifact: Any) -> Obj:
    replica = process(name, artifact={"source": SOURCE, "sha256": sha256, **artifact}, annotations=annotations or {})
    # Each is of a service of its own.
    replica["metadata"]["ownerReferences"][0] |= {"name": name, "uid": f"uid-{name}"}
    replica["spec"]["serviceName"] = name
    return replica


def admit(known: Store) -> dict[str, tuple[str, str]]:
    """Return the host of each process in the next round, with the reasons."""
    cells = CellRegistry(known, VENDORS, lambda _host: True).list_cells()
    made = plan(cells, observe_units(known, VENDORS, NOW).units, PlanRules(), NOW.timestamp())
    return {
        action.unit.key.name: (action.cells[0], action.scores[0].explain())
        for action in made.actions
        if isinstance(action, Admit)
    }


BY_SOURCE = weights_identity(SOURCE, "r1", (), "")


@pytest.mark.parametrize(
    ("obj", "chosen"),
    [
        (waiting("p"), "host/b"),
        (waiting("p", sha256=OTHER), "host/a"),
        (waiting("p", sha256="", revision="r1"), "host/b"),
        (waiting("p", sha256="", revision="r2"), "host/a"),
        (waiting("p", sha256="", revision="r1", files=["*.gguf"]), "host/a"),
        (waiting("p", sha256=""), "host/a"),
        (waiting("p", annotations={MOVES: "uid-q"}), "host/a"),
    ],
    ids=["digest", "other digest", "source", "other revision", "other files", "any revision", "moves"],
)
def test_host_with_the_weights_is_chosen_of_two(obj: Obj, chosen: str) -> None:
    hosts = host("a", 64 * GIB, weights=[OTHER]), host("b", 32 * GIB, weights=[DIGEST, BY_SOURCE])
    cluster = store(*((METAL_HOSTS, machine) for machine in hosts), (METAL_PROCESSES, obj))
    assert admit(cluster)["p"][0] == chosen


def test_list_of_a_host_is_followed() -> None:
    cluster = store((METAL_HOSTS, host("a")), (METAL_HOSTS, host("b")))
    cells = CellRegistry(cluster, VENDORS, lambda _host: True)
    before = cells.revision
    changed = host("b", weights=[DIGEST])
    changed["metadata"]["resourceVersion"] = "2"
    cluster.put(METAL_HOSTS, changed)
    assert {cell.name: cell.weights for cell in cells.list_cells()} == {"a": frozenset(), "b": frozenset({DIGEST})}
    assert cells.revision == before + 1


def test_explanation_says_where_weights_are_if_that_is_known() -> None:
    for weights, expected in (([DIGEST], ", weights there, "), ([OTHER], ", weights to fetch, ")):
        cluster = store((METAL_HOSTS, host("a", weights=weights)), (METAL_PROCESSES, waiting("p")))
        assert expected in admit(cluster)["p"][1]
    cluster = store((METAL_HOSTS, host("a")), (METAL_PROCESSES, waiting("p")))
    assert "weights" not in admit(cluster)["p"][1]


def test_replicas_are_spread_before_weights_count_and_weights_before_free_memory() -> None:
    cells = [host_cell("g", 64), host_cell("h", 32, weights=frozenset({"w"}))]
    assert say(decide(cells, [process_unit("p", weights="w")])) == ["p gets h"]
    beside = process_unit("r", cells=("host/h",), service="s")
    assert say(decide(cells, [process_unit("p", weights="w", service="s"), beside])) == ["p gets g"]


def test_units_of_one_need_go_each_to_its_own_weights() -> None:
    """Units that are alike otherwise share what a round knows of the cells."""
    names = [f"h{number}" for number in range(6)]
    cells = [host_cell(name, 64 - number, weights=frozenset({name})) for number, name in enumerate(names)]
    units = [process_unit(f"p-{name}", at=number, weights=name) for number, name in enumerate(reversed(names))]
    anywhere = process_unit("p-z", at=9)
    assert say(decide(cells, [*units, anywhere])) == [
        *(f"p-{name} gets {name}" for name in reversed(names)),
        "p-z gets h0",
    ]
