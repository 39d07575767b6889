"""Writes that hang, as behind a webhook that does not answer: they hold up nobody of another namespace."""

import asyncio
from typing import Any

import pytest

from controller.placement.write_slots import HANG_SECONDS
from kube.client import Obj
from kube.errors import Unreachable
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS
from tests.support import virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.queue_objects import deployment_of, queue_pod, queued_service
from tests.unit.controller.placement.test_admission_pods import LONG_AGO, bench, node

WEBHOOK_SECONDS = 30.0
STUCK = 12
"""Pods of a namespace whose webhook hangs: more than may be written at once."""


def elsewhere(obj: Obj) -> Obj:
    return {**obj, "metadata": {**obj["metadata"], "namespace": "bank"}}


def hang(found: AdmissionBench, method: str) -> list[float]:
    """Answer no call of a method for namespace `team` any more; return the list of when each was made."""
    asked, write = list[float](), getattr(found.api, method)

    async def call(*arguments: Any, **options: Any) -> Any:
        if arguments[2] != "team":
            return await write(*arguments, **options)
        asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(WEBHOOK_SECONDS)
        raise Unreachable("patch: failed calling webhook: context deadline exceeded")

    setattr(found.api, method, call)
    return asked


def serve_elsewhere(found: AdmissionBench, name: str) -> None:
    found.change(INFERENCE_SERVICES, elsewhere(queued_service(name, created=LONG_AGO)))
    found.change(DEPLOYMENTS, elsewhere(deployment_of(name)))
    found.change(PODS, elsewhere(queue_pod(name, service=name)))


def has_gate(found: AdmissionBench, name: str) -> bool:
    return bool(found.api.find(PODS, name, "bank")["spec"].get("schedulingGates"))


@pytest.mark.parametrize("method", ["patch_json", "patch_merge", "create_subresource"])
def test_writes_that_hang_delay_no_other_namespace(method: str) -> None:
    """Admissions, promises or evictions of a namespace hang; each pod of another one is admitted at once."""
    numbers = range(STUCK)
    stuck = [queue_pod(f"stuck-{number}", service="vip", devices=2) for number in numbers]
    cells = [node(f"n{number}", 2) for number in numbers]
    if method != "patch_json":
        stuck += [
            queue_pod(f"v-{number}", service="low", devices=2, gated=False, node=f"n{number}", created=LONG_AGO)
            for number in numbers
        ]
    admission_bench = bench(*stuck, nodes=(*cells, *(node(f"free-{number}") for number in range(3))))
    asked, late = hang(admission_bench, method), list[str]()

    async def main() -> None:
        async with admission_bench.running():
            for number in range(3):
                await asyncio.sleep(11)
                serve_elsewhere(admission_bench, f"other-{number}")
                await asyncio.sleep(2.5 * HANG_SECONDS)
                late.extend([f"other-{number}"] if has_gate(admission_bench, f"other-{number}") else [])

    virtual_time.run(main())
    assert (late, len(asked) > 1) == ([], True)
