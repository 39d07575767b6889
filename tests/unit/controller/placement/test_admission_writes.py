"""Places and promises are written several at once: a thousand pods that come together hold up no round for long."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from controller.placement.admission import WRITES_AT_ONCE
from controller.placement.queue_places import find_own_place, format_place
from crds.meta import ENQUEUED_AT, NOMINATED
from kube.client import Obj
from kube.errors import ApiError
from kube.resources import PODS, Resource
from tests.support import virtual_time
from tests.support.admission_api import AdmissionBench
from tests.support.queue_objects import queue_pod
from tests.unit.controller.placement.test_admission_pods import LONG_AGO, bench, node

NUMBER = 3 * WRITES_AT_ONCE
OLD = [
    queue_pod(f"old-{number}", gated=False, node="n1", created=LONG_AGO + timedelta(days=number + 1), deleted=LONG_AGO)
    for number in range(NUMBER)
]
HEIRS = [queue_pod(f"new-{number}", created=LONG_AGO + timedelta(days=99, seconds=number)) for number in range(NUMBER)]
RUNNING = [
    queue_pod(f"low-{number}", service="low", gated=False, node=f"n{number}", created=LONG_AGO)
    for number in range(NUMBER)
]
URGENT = [queue_pod(f"vip-{number}", service="vip", created=LONG_AGO) for number in range(NUMBER)]


class SlowWrites:
    """Writes of annotations that take a second each, of which one is refused at first."""

    def __init__(self, found: AdmissionBench, refused: str) -> None:
        self.going = self.most = 0
        self.ended_at: list[float] = []
        self._write, self._refused = found.api.patch_merge, refused

    async def patch_merge(self, resource: Resource, name: str, *arguments: Any, **options: Any) -> Obj:
        self.going += 1
        self.most = max(self.most, self.going)
        await asyncio.sleep(1)
        self.going -= 1
        self.ended_at.append(asyncio.get_running_loop().time())
        if name == self._refused:
            self._refused = ""
            raise ApiError("patch", status=500)
        return await self._write(resource, name, *arguments, **options)


@pytest.mark.parametrize("promises", [False, True], ids=["places", "promises"])
def test_annotations_of_one_round_are_written_several_at_once(promises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    admission_bench = bench(
        *(RUNNING + URGENT if promises else OLD + HEIRS), nodes=tuple(node(f"n{n}") for n in range(NUMBER))
    )
    writes = SlowWrites(admission_bench, "vip-3" if promises else "new-3")
    monkeypatch.setattr(admission_bench.api, "patch_merge", writes.patch_merge)
    if not promises:
        monkeypatch.setattr(admission_bench.registry, "list_cells", lambda: ())

    async def main() -> None:
        async with admission_bench.running():
            await asyncio.sleep(60)

    virtual_time.run(main())
    assert writes.most == WRITES_AT_ONCE
    assert writes.ended_at[NUMBER - 1] - writes.ended_at[0] < NUMBER / WRITES_AT_ONCE
    if promises:
        assert set(admission_bench.api.evictions) == {pod["metadata"]["name"] for pod in RUNNING}
        assert all(NOMINATED in annotations_of(admission_bench, pod) for pod in URGENT)
    else:
        places = [format_place(find_own_place(pod)) for pod in OLD]
        assert [annotations_of(admission_bench, pod)[ENQUEUED_AT] for pod in HEIRS] == places


def annotations_of(found: AdmissionBench, pod: Obj) -> Obj:
    annotations: Obj = found.api.find(PODS, pod["metadata"]["name"])["metadata"]["annotations"]
    return annotations
