"""The pod of the shortest service on the processor, as the controller makes it: the real vLLM in local folders.

The controller's own decision is made for a cluster whose one node is this machine, so that arguments, variables and the
memory of the cache are those that users get. The proxy of the pod may run in front of the engine.
"""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import psutil

from artifacts.inspect import check_stored
from artifacts.source import parse
from devices.sockets import LOOPBACK
from kube.client import Obj
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, NODES
from runtimes.environment import PYTHON
from tests.controlplane.process import Process
from tests.support.api_objects import model, service
from tests.support.eventually import eventually
from tests.support.free_ports import find_free_ports
from tests.support.service_decisions import decide_chat, list_applied
from tests.support.tiny_models import tiny_mlx
from tests.vllm import environment

SERVICE: Final = "chat"
TOKEN: Final = "s3cret-token"
_MODEL: Final = "0123456789abcdef"
_STARTING_SECONDS: Final = 800.0
_MOUNTS: Final = {
    "/models": "volume",
    "/kept": "volume",
    "/compiled": "compiled",
    "/run/secrets/pomona": "secrets",
    "/dev/termination-log": "termination-log",
}
"""The folders and files of the containers, with their names in the folder of the pod."""


class RealPod:
    """A pod that is made again for each start: its folders are empty each time, the volume of weights stays.

    Args:
        folder: folder of all of its volumes.
        dimensions: dimensions of the random model, as `tiny_mlx.write` takes them.
    """

    def __init__(self, folder: Path, **dimensions: Any) -> None:
        self._folder = folder
        self.weights, self.log = folder / "volume" / _MODEL, folder / "log"
        # With heads of 32 values, the least that its attention kernels take.
        tiny_mlx.write(self.weights, **{"n_embd": 128, "written_for": "pt", **dimensions})
        pod = render_pod(self.weights)
        *_, engine = pod["initContainers"]
        (proxy,) = pod["containers"]
        self.home = self._find(read_argument(proxy["args"], "--home"))
        self.kept = self._find(read_argument(proxy["args"], "--kept"))
        self.memory_bytes = int(engine["resources"]["requests"]["memory"])
        self._temporary = folder / "tmp"

        # Ports that are free on this machine, in place of those of the pod.
        port, engine_port = (str(port) for _, port in zip(range(2), find_free_ports(), strict=False))
        self.url, self._engine_url = f"http://{LOOPBACK}:{port}", f"http://{LOOPBACK}:{engine_port}"
        program, *command = engine["command"]
        words = set_argument([*command, *engine["args"]], "--port", engine_port)
        self.argv = [str(environment.folder() / "bin" / program), *map(self._replace, words)]
        words = set_argument(set_argument(proxy["args"], "--port", port), "--engine-port", engine_port)
        self.proxy_argv = [*PYTHON, "cli.main", *map(self._replace, words)]

        variables = {variable["name"]: self._replace(variable["value"]) for variable in engine["env"]}
        self.environment = variables | {"PATH": os.environ["PATH"], "TMPDIR": str(self._temporary)}

    def empty(self) -> None:
        """Make the folders of the pod anew."""
        for path in (self.home.parent, self._temporary):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()

    def start(self) -> float:
        """Start the engine, stop it once it is healthy, and return how many seconds that took. Raises RuntimeError."""

        async def measure() -> float:
            began = time.monotonic()
            async with self.run_engine():
                return time.monotonic() - began

        return asyncio.run(measure())

    @asynccontextmanager
    async def run_engine(self) -> AsyncIterator[int]:
        """Run the engine; yield its process id once it is healthy. Raises RuntimeError."""
        with self.log.open("wb") as log:
            # A session of its own, as the proxy has: the scheduler of Linux divides the processor between sessions.
            process = await asyncio.create_subprocess_exec(
                *self.argv,
                env=self.environment,
                cwd=self._temporary,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            await eventually(lambda: self._is_healthy(process), _STARTING_SECONDS)
            yield process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(60):
                await process.wait()

    @asynccontextmanager
    async def run_proxy(self) -> AsyncIterator[None]:
        """Run the proxy, which answers at `url` with `TOKEN` in front of the running engine."""
        secrets = self._find("/run/secrets/pomona")
        secrets.mkdir(exist_ok=True)
        (secrets / "token").write_text(TOKEN)
        proxy = Process("pod-proxy", self.proxy_argv, self._folder / "proxy.log")
        proxy.start()
        try:
            await eventually(lambda: _answers(f"{self.url}/health"))
            yield
        finally:
            await proxy.stop()

    def _is_healthy(self, process: asyncio.subprocess.Process) -> bool:
        if process.returncode is not None:
            raise RuntimeError(f"vLLM ended with status {process.returncode}:\n{self.log.read_text()[-4000:]}")
        return _answers(f"{self._engine_url}/health")

    def _find(self, path: str) -> Path:
        return Path(self._replace(path))

    def _replace(self, text: str) -> str:
        """Return a text with the path on this machine for that of a mounted folder or file at its beginning."""
        for mount, name in _MOUNTS.items():
            if text == mount or text.startswith(f"{mount}/"):
                return f"{self._folder / name}{text.removeprefix(mount)}"
        return text


def render_pod(weights: Path) -> Obj:
    """Return the spec of the pod of a service that states nothing, on a cluster whose one node is this machine."""
    facts = msgspec.to_builtins(check_stored(parse(f"file://{weights}/"), weights))
    status = {name: facts[name] for name in ("format", "gguf", "layout")}
    status |= {"file": "", "sizeBytes": facts["tensorBytes"], "cached": {"path": _MODEL}}
    memory = str(psutil.virtual_memory().total)
    node = {
        "metadata": {"name": "here", "uid": "here", "resourceVersion": "1"},
        "status": {"allocatable": {"cpu": str(os.cpu_count()), "memory": memory}},
    }
    plan = decide_chat(
        (INFERENCE_SERVICES, service(SERVICE)),
        (MODELS, model(source="hf://team/tiny", status=status)),
        (NODES, node),
    )
    (deployment,) = list_applied(plan, DEPLOYMENTS)
    pod: Obj = deployment["spec"]["template"]["spec"]
    return pod


def read_argument(words: Sequence[str], name: str) -> str:
    """Return the value of an option."""
    return words[words.index(name) + 1]


def set_argument(words: Sequence[str], name: str, value: str) -> list[str]:
    """Return the words with another value of an option."""
    position = words.index(name) + 1
    return [*words[:position], value, *words[position + 1 :]]


def _answers(url: str) -> bool:
    """Return whether a server answers 200 at this address."""
    try:
        with urlopen(url, timeout=5) as response:  # noqa: S310 - http
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
