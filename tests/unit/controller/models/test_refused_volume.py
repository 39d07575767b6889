"""A volume that the fetch of a Model cannot write."""

from tests.support.simulated_model import SimulatedModel


def test_volume_that_refuses_the_fetch_is_named_with_its_storage_class() -> None:
    simulated = SimulatedModel()
    simulated.begin_fetch()
    said = "permission denied: /models has owner 0: use a StorageClass that honours fsGroup"
    simulated.end("fetch", 1, {"reason": "StorageFailed", "message": said})
    simulated.settle()
    cached = simulated.condition("Cached")
    assert cached.reason == "StorageFailed"
    assert simulated.claim is not None
    claim = simulated.claim["metadata"]["name"]
    assert f"{said}; the volume is that of PersistentVolumeClaim {claim}, of StorageClass standard" in cached.message
