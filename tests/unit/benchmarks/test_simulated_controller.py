"""The controller on the simulated API server comes to rest, and a second one that starts there writes nothing."""

import gc
from collections import Counter

from benchmarks.drain import count_drained, drain
from benchmarks.simulated_controller import fill, simulated_controller
from benchmarks.simulated_server import SimulatedServer
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES
from tests.support import virtual_time
from tests.support.eventually import eventually


def phase_and_reason(service: Obj) -> tuple[str, str]:
    ready = next(condition for condition in service["status"]["conditions"] if condition["type"] == "Ready")
    return service["status"]["phase"], ready["reason"]


def test_forgotten_server_leaves_no_file_open() -> None:
    cycle: list[object] = [SimulatedServer()]
    cycle.append(cycle)
    del cycle
    gc.collect()  # what is left open is a warning, hence an error


def test_a_controller_that_starts_again_writes_its_ledger_alone() -> None:
    server = SimulatedServer()
    fill(server, in_pods=2, on_hosts=3, waiting=4, hosts=2, per_host=2)

    async def main() -> tuple[Counter[tuple[str, str]], int, int]:
        async with simulated_controller(server):
            found = Counter(map(phase_and_reason, server.list_objects(INFERENCE_SERVICES)))
        before = server.writes
        async with simulated_controller(server):
            return found, before, server.writes

    counter, before, after = virtual_time.run(main())
    assert counter == {("WaitingForGPU", "Queued"): 2, ("Ready", "Serving"): 3, ("WaitingForGPU", "NoHostFits"): 4}
    assert after == before + 1, "the ledger, of which each leader makes itself the one writer"


def count_calls_of_drain(hosts: int) -> Counter[str]:
    server = SimulatedServer()
    fill(server, in_pods=0, on_hosts=2 * hosts, waiting=0, hosts=hosts, per_host=2, spare=2)

    async def main() -> None:
        async with simulated_controller(server) as world:
            server.calls.clear()
            drain(server, server.list_objects(METAL_HOSTS)[:1])
            await eventually(lambda: count_drained(world.controller.store.list(METAL_HOSTS)) == 1)
            await world.settle()

    virtual_time.run(main())
    bound = Counter(process["spec"]["hostName"] for process in server.list_objects(METAL_PROCESSES))
    assert bound.total() == 2 * hosts
    assert "mac-000" not in bound
    return Counter({call: count for call, count in server.calls.items() if not call.endswith("leases")})


def test_a_drain_makes_the_same_calls_however_many_other_hosts_there_are() -> None:
    assert count_calls_of_drain(3) == count_calls_of_drain(8)
