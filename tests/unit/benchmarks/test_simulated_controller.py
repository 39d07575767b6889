"""The controller on the simulated API server comes to rest, and a second one that starts there writes nothing."""

from collections import Counter

from benchmarks.simulated_controller import fill, simulated_controller
from benchmarks.simulated_server import SimulatedServer
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES
from tests.support import virtual_time


def phase_and_reason(service: Obj) -> tuple[str, str]:
    ready = next(each for each in service["status"]["conditions"] if each["type"] == "Ready")
    return service["status"]["phase"], ready["reason"]


def test_a_controller_that_starts_again_writes_nothing() -> None:
    server = SimulatedServer()
    fill(server, in_pods=2, on_hosts=3, waiting=4, hosts=2, per_host=2)

    async def main() -> tuple[Counter[tuple[str, str]], int, int]:
        async with simulated_controller(server):
            found = Counter(map(phase_and_reason, server.list_objects(INFERENCE_SERVICES)))
        before = server.writes
        async with simulated_controller(server):
            return found, before, server.writes

    found, before, after = virtual_time.run(main())
    assert found == {("Pending", "Unschedulable"): 2, ("Ready", "Serving"): 3, ("Pending", "NoHostFits"): 4}
    assert after == before
