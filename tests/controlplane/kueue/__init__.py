"""Kueue, built once from the Go module beside this file, and the process that it is here.

Its manager runs beside the control plane instead of in a pod. The API server reaches its webhooks and its visibility
API by Services of type ExternalName, since there is no kube-proxy; and the certificate that the manager puts in a
Secret is written to the folder where a kubelet would mount it.
"""

import asyncio
import base64
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane.binaries import cache_folder, ensure_module_programs, lock_folder, oldest_go
from tests.controlplane.go_build import copy_from_module
from tests.controlplane.helm import run_helm
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.controlplane.process import Process
from tests.support import certificates
from tests.support.background import running
from tests.support.eventually import eventually

MODULE = Path(__file__).parent
IMPORT_PATH = "sigs.k8s.io/kueue"
PACKAGES = {"kueue": f"{IMPORT_PATH}/cmd/kueue"}
STATE = Path("/run/kueue")
"""Folder of the manager's certificates: the sandbox has a /run of its own."""
VARIABLES = {f"{IMPORT_PATH}/pkg/visibility.certDir": str(STATE / "visibility")}
"""The program has no option for this folder, and an ordinary user could not make the one that it has."""
NAMESPACE = "kueue-system"
WEBHOOKS, VISIBILITY = "kueue-webhook-service", "kueue-visibility-server"
PORTS = {WEBHOOKS: 9443, VISIBILITY: 8082}
WEBHOOK_SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/kueue-webhook-server-cert"
READY_SECONDS = 120.0
APISERVER_OPTIONS = (
    f"--requestheader-client-ca-file={certificates.FRONT_PROXY.certificate}",
    "--requestheader-username-headers=X-Remote-User",
    "--requestheader-group-headers=X-Remote-Group",
    "--requestheader-extra-headers-prefix=X-Remote-Extra-",
    f"--proxy-client-cert-file={certificates.FRONT_PROXY.certificate}",
    f"--proxy-client-key-file={certificates.FRONT_PROXY.key}",
)
"""Options of an API server that tells one behind it who asks."""
CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "namespace": NAMESPACE,
    "health": {"healthProbeBindAddress": "127.0.0.1:8087"},
    "metrics": {"bindAddress": "0"},
    "webhook": {"port": PORTS[WEBHOOKS], "certDir": str(STATE / "webhook")},
    "leaderElection": {"leaderElect": False},
    "integrations": {"frameworks": ["pod", "deployment"]},
}


def ensure_kueue() -> dict[str, Path]:
    """Return the program `kueue` and its `chart`; build and copy what is not in the cache.

    Raises:
        BuildError: it cannot be built here.
    """
    program = ensure_module_programs(MODULE, PACKAGES, "kueue", variables=VARIABLES)["kueue"]
    chart = program.with_name("chart")
    with lock_folder(program.parent):
        if not chart.exists():
            aside = program.with_name(".copying")
            shutil.rmtree(aside, ignore_errors=True)
            caches = cache_folder() / "go"
            copy_from_module(MODULE, IMPORT_PATH, "charts/kueue", aside, go_version=oldest_go(MODULE), caches=caches)
            aside.rename(chart)
    return {"kueue": program, "chart": chart}


class Kueue:
    """The manager of one control plane.

    Args:
        plane: the control plane, whose API server has `APISERVER_OPTIONS`.
        folder: for its log and configuration.
    """

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        built = ensure_kueue()
        self._plane, self._chart = plane, built["chart"]
        self._manifests, configuration = folder / "kueue.yaml", folder / "kueue-configuration.yaml"
        configuration.write_text(yaml.safe_dump(CONFIGURATION))
        argv = [str(built["kueue"]), f"--config={configuration}", f"--kubeconfig={plane.kubeconfig()}"]
        self.process = Process("kueue", argv, folder / "kueue.log", {"GOMAXPROCS": "1"})

    async def install(self) -> None:
        """Install its kinds, roles, webhooks and APIServices, as its chart does."""
        rendered = await run_helm("template", "kueue", str(self._chart), namespace=NAMESPACE)
        objects = [
            manifest for manifest in yaml.safe_load_all(rendered) if manifest and manifest["kind"] != "Deployment"
        ]
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        self._manifests.write_text(yaml.safe_dump_all([namespace, *map(_reach_by_name, objects)]))
        await self._plane.apply(self._manifests)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Kueue"]:
        """Run the manager until the context ends."""
        shutil.rmtree(STATE, ignore_errors=True)
        async with running(self._mount_certificate()):
            self.process.start()
            try:
                await eventually(self._answers, READY_SECONDS)
                yield self
            finally:
                await self.process.kill()

    def suspend(self) -> None:
        """Stop the manager: its ports accept connections and answer nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the manager."""
        os.kill(self.process.pid, signal.SIGCONT)

    async def _answers(self) -> bool:
        assert self.process.running, self.process.tail(20)
        try:
            for version in ("v1beta1", "v1beta2"):
                await self._plane.request("GET", f"/apis/visibility.kueue.x-k8s.io/{version}")
            # A webhook that is not reached refuses what it should check.
            await self._plane.request("POST", "/apis/apps/v1/namespaces/default/deployments?dryRun=All", _DEPLOYMENT)
        except PlaneError as error:
            raise AssertionError(error) from error
        return True

    async def _mount_certificate(self) -> None:
        """Write the certificate of the webhooks to its folder, as a kubelet mounts a Secret."""
        folder = STATE / "webhook"
        folder.mkdir(parents=True)
        while True:
            with contextlib.suppress(PlaneError, OSError):
                data = (await self._plane.request("GET", WEBHOOK_SECRET)).get("data") or {}
                for name, text in data.items():
                    aside = folder / f".{name}"
                    aside.write_bytes(base64.b64decode(text))
                    aside.replace(folder / name)
            await asyncio.sleep(0.2)


_DEPLOYMENT = {
    "metadata": {"name": "probe"},
    "spec": {
        "selector": {"matchLabels": {"app": "probe"}},
        "template": {
            "metadata": {"labels": {"app": "probe"}},
            "spec": {"containers": [{"name": "main", "image": "any"}]},
        },
    },
}


def _reach_by_name(obj: dict[str, Any]) -> dict[str, Any]:
    """Return an object of the chart with the way to the manager: the machine's own name, and its own ports."""
    if obj["kind"] == "Service" and obj["metadata"]["name"] in PORTS:
        obj["spec"] = {"type": "ExternalName", "externalName": "localhost"}
    for service in _services(obj):
        service["port"] = PORTS[service["name"]]
    return obj


def _services(part: object) -> Iterator[dict[str, Any]]:
    """Yield each reference to a Service of the manager in an object."""
    if isinstance(part, list):
        for child in part:
            yield from _services(child)
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "service" and isinstance(value, dict) and value.get("name") in PORTS:
                yield value
            else:
                yield from _services(value)
