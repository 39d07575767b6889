"""The engine of a pod of the shortest service, as the controller renders it: the real vLLM in local folders."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

from controller.pod_settings import PodSettings
from controller.services.pods.deployment import build_deployment
from controller.services.pods.pod_template import EngineChoice, MountedWeights
from crds.size import GIB
from devices.vendors import VENDORS
from tests.support.api_objects import as_service, service
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_mlx
from tests.vllm import environment

_MODEL: Final = "0123456789abcdef"
_STARTING_SECONDS: Final = 800.0


class RealPod:
    """A pod that is made again for each start: its folders are empty each time, the volume of weights stays."""

    def __init__(self, folder: Path) -> None:
        stated = as_service(service(modelRef="tiny", runtime="vllm", hardware={"accelerator": "cpu"}))
        choice = EngineChoice("vllm", "cpu", VENDORS["cpu"], 4 * GIB, cache_bytes=GIB)
        weights = MountedWeights("tiny-cache", _MODEL)
        _, made = build_deployment(stated, choice, weights, settings=PodSettings(image="pomona"))
        spec = made["spec"]["template"]["spec"]
        *_, engine = spec["initContainers"]
        (proxy,) = spec["containers"]
        port = proxy["args"][proxy["args"].index("--engine-port") + 1]

        # The folders of the containers, by their mount paths.
        self._mounts = {"/models": folder / "volume", "/kept": folder / "volume", "/compiled": folder / "compiled"}
        self.home = self._find(proxy["args"][proxy["args"].index("--home") + 1])
        self.kept = self._find(proxy["args"][proxy["args"].index("--kept") + 1])
        self.log = folder / "log"
        self._temporary = folder / "tmp"
        program, *command = engine["command"]
        words = [*command, *engine["args"]]
        self._argv = [str(environment.folder() / "bin" / program), *map(self._replace, words)]
        variables = {variable["name"]: self._replace(variable["value"]) for variable in engine["env"]}
        self._environment = variables | {"PATH": os.environ["PATH"], "TMPDIR": str(self._temporary)}
        self._url = f"http://127.0.0.1:{port}/health"
        # With heads of 32 values, the least that its attention kernels take.
        tiny_mlx.write(folder / "volume" / _MODEL, n_embd=128)

    def empty(self) -> None:
        """Make the folders of the pod anew."""
        for path in (self.home.parent, self._temporary):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()

    def start(self) -> float:
        """Start the engine, stop it once it is healthy, and return how many seconds that took. Raises RuntimeError."""
        began = time.monotonic()
        with self.log.open("wb") as log:
            process = subprocess.Popen(self._argv, env=self._environment, cwd=self._temporary, stdout=log, stderr=log)
        try:
            asyncio.run(eventually(lambda: self._is_healthy(process), _STARTING_SECONDS))
            return time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)

    def _is_healthy(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {process.returncode}:\n{self.log.read_text()[-4000:]}")
        try:
            with urlopen(self._url, timeout=5) as response:  # noqa: S310 - http
                return bool(response.status == 200)
        except (URLError, OSError):
            return False

    def _find(self, path: str) -> Path:
        return Path(self._replace(path))

    def _replace(self, text: str) -> str:
        """Return a text with the folder of this machine for a mount path at its beginning."""
        for mount, folder in self._mounts.items():
            if text == mount or text.startswith(f"{mount}/"):
                return f"{folder}{text.removeprefix(mount)}"
        return text
