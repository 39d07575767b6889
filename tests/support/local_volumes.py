"""A StorageClass of volumes on nodes, with its provisioner: a volume is made on the node that the scheduler chooses.

Real ones are made of disks, LVM or folders of the node. This one makes a folder, which only pods of the node may mount.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from kube.client import Client, Obj
from kube.errors import ApiError, NotFound
from kube.resources import PVCS, STORAGE_CLASSES, Resource
from kube.store import Store
from kube.watch import Selection, reflect

VOLUMES: Final = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
_SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"


@contextlib.asynccontextmanager
async def local_storage(client: Client, namespace: str, folder: Path) -> AsyncIterator[str]:
    """Run the provisioner for the claims of a namespace, and yield the name of its StorageClass."""
    name = f"{namespace}-local"
    body = {"provisioner": "tests.pomona.dev/local", "volumeBindingMode": "WaitForFirstConsumer"}
    await client.create(STORAGE_CLASSES, {"metadata": {"name": name}, **body})
    made: dict[str, Path] = {}
    provisioning = asyncio.create_task(_provision(client, namespace, name, folder, made))
    try:
        yield name
    finally:
        provisioning.cancel()
        await asyncio.wait([provisioning])
        for uid in made:
            with contextlib.suppress(NotFound):
                await client.delete(VOLUMES, _name(uid))
        await client.delete(STORAGE_CLASSES, name)


async def _provision(client: Client, namespace: str, storage_class: str, folder: Path, made: dict[str, Path]) -> None:
    store, changed = Store(), asyncio.Event()
    store.subscribe(lambda *_: changed.set())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reflect(client, store, Selection(PVCS, namespace)))
        while True:
            await changed.wait()
            changed.clear()
            claims = {claim["metadata"]["uid"]: claim for claim in store.list(PVCS)}
            for uid, claim in claims.items():
                node = claim["metadata"].get("annotations", {}).get(_SELECTED_NODE)
                if claim["spec"].get("storageClassName") == storage_class and node and uid not in made:
                    made[uid] = folder / node / uid
                    with contextlib.suppress(ApiError):  # the claim is gone
                        await client.create(VOLUMES, _volume(claim, node, made[uid]))
            for uid in made.keys() - claims.keys():
                await asyncio.to_thread(shutil.rmtree, made[uid], ignore_errors=True)


def _name(uid: str) -> str:
    return f"local-{uid}"


def _volume(claim: Obj, node: str, path: Path) -> Obj:
    metadata, spec = claim["metadata"], claim["spec"]
    hostname = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "metadata": {"name": _name(metadata["uid"])},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "storageClassName": spec["storageClassName"],
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]},
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}},
        },
    }
