"""The demo asks its services at addresses that it has seen: it watches services and their EndpointSlices separately."""

from pathlib import Path

import pytest

from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES
from kube.store import Store
from tests.controlplane.binaries import Binaries
from tests.demo import inside
from tests.demo.inside import SERVICES, DemoCluster, wait_until_ready

NOWHERE = Path("/nowhere")


def metadata(name: str, **labels: str) -> Obj:
    return {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1", "labels": labels}


async def test_demo_waits_for_the_address_of_a_service_that_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    cluster = DemoCluster(Binaries(NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE), tmp_path, NOWHERE, NOWHERE)
    for name in SERVICES:
        store.put(INFERENCE_SERVICES, {"metadata": metadata(name), "status": {"phase": "Ready"}})
    monkeypatch.setattr(inside, "READY_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        await wait_until_ready(cluster, store)
    for name in SERVICES:
        endpoint = {"addresses": ["10.77.1.10"], "conditions": {"ready": True}}
        labels = {"kubernetes.io/service-name": name}
        store.put(
            ENDPOINT_SLICES,
            {"metadata": metadata(name, **labels), "endpoints": [endpoint], "ports": [{"port": 8080}]},
        )
    await wait_until_ready(cluster, store)
