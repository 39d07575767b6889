"""Run gateways for `benchmarks.gateway`: Pomona's, and those of others, each with all of its threads on one processor.

The others come from the package registry into environments of their own in the user's cache, once.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
import psutil

from benchmarks.clients.http_load import TOKEN
from benchmarks.servers.cluster_api import SERVICE, write_kubeconfig
from tests.controlplane import pomona_image
from tests.support.free_ports import find_free_ports

START_SECONDS: Final = 120.0
_CACHE: Final = Path.home() / ".cache/pomona/gateways"
_END_SECONDS: Final = 20.0


class GatewayServer(NamedTuple):
    """A running gateway."""

    port: int
    pid: int

    def processor_seconds(self) -> float:
        """Return the processor time of the process and of its children so far."""
        process = psutil.Process(self.pid)
        times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def resident_bytes(self) -> int:
        """Return the resident memory of the process and of its children."""
        process = psutil.Process(self.pid)
        return sum(member.memory_info().rss for member in (process, *process.children(recursive=True)))


class GatewayMissingError(Exception):
    """A gateway of others that cannot be installed or started here; the message says why."""


class PeerGateway(NamedTuple):
    """A gateway of others: what is installed, and how it is started on a port in front of some engines."""

    goal: float | None
    """So many times as many requests shall Pomona answer in the same time; None: no promise."""
    requirements: Sequence[str]
    command: Callable[[Path, int, int, Sequence[str]], list[str]]
    """Returns the command: of a folder for its files, its port, one for its metrics, and the URLs of the engines."""
    environment: Mapping[str, str] = {}


def _command_of_router(*options: str) -> Callable[[Path, int, int, Sequence[str]], list[str]]:
    """Return the command of vllm-router or smg, which begins with these options."""

    def build(_folder: Path, port: int, metrics_port: int, engines: Sequence[str]) -> list[str]:
        address = ("--host=127.0.0.1", f"--port={port}", f"--prometheus-port={metrics_port}", f"--api-key={TOKEN}")
        return [*options, *address, "--worker-urls", *engines]

    return build


def _command_of_litellm(folder: Path, port: int, _metrics_port: int, engines: Sequence[str]) -> list[str]:
    models = [
        {
            "model_name": SERVICE,
            "litellm_params": {"model": f"openai/{SERVICE}", "api_base": f"{engine}/v1", "api_key": TOKEN},
        }
        for engine in engines
    ]
    config = {
        "model_list": models,
        "general_settings": {"master_key": TOKEN},
        "litellm_settings": {"callbacks": ["prometheus"]},
    }
    path = folder / "litellm.yaml"
    path.write_bytes(msgspec.json.encode(config))
    return ["litellm", f"--config={path}", "--host=127.0.0.1", f"--port={port}", "--num_workers=1"]


_VLLM_ROUTER: Final = ("vllm-router==0.1.17",)
_QUIET: Final = {"RUST_LOG": "error"}
PEERS: Final[Mapping[str, PeerGateway]] = {
    "vllm-router": PeerGateway(1, _VLLM_ROUTER, _command_of_router("vllm-router")),
    "vllm-router by session": PeerGateway(
        None, _VLLM_ROUTER, _command_of_router("vllm-router", "--policy=consistent_hash", "--log-level=error"), _QUIET
    ),
    "smg": PeerGateway(
        2, ["smg==1.13.0"], _command_of_router("smg", "launch", "--policy=prefix_hash", "--log-level=error"), _QUIET
    ),
    # The proxy of 1.110 needs a package that the registry does not have.
    "litellm": PeerGateway(
        8,
        ["litellm[proxy]==1.108.7", "prometheus-client==0.26.0"],
        _command_of_litellm,
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "CRITICAL"},
    ),
}
"""By name. By default, vllm-router chooses by the prompt and logs each request, as Pomona does; by session it looks at
no prompt, and here it logs nothing. It takes any key: its option is for those who manage it. LiteLLM has one key, and
no database."""


@contextlib.contextmanager
def on_processor(number: int) -> Iterator[None]:
    """Start processes on one processor, where the system can do that: their threads inherit it from this one."""
    if sys.platform != "linux":
        yield
        return
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, set(processors))


@contextlib.asynccontextmanager
async def run_gateway(folder: Path, api_url: str, *prefix: str) -> AsyncIterator[GatewayServer]:
    """Run the gateway of Pomona's image on the cluster of an API server, until the context ends.

    `prefix` begins its command.
    """
    program = pomona_image.find_program(pomona_image.find_root())
    port, metrics_port = (next(_ports) for _ in range(2))
    command = [
        *(*prefix, *program, "gateway", f"--kubeconfig={write_kubeconfig(folder, api_url)}"),
        *(f"--address=127.0.0.1:{port}", f"--metrics-address=127.0.0.1:{metrics_port}", "--drain-seconds=0"),
    ]
    with _run(folder / "gateway.log", command, {}) as process:
        await _wait_until_answered(process, f"http://127.0.0.1:{metrics_port}/readyz", None)
        yield GatewayServer(port, process.pid)


@contextlib.asynccontextmanager
async def run_peer(name: str, folder: Path, engines: Sequence[str]) -> AsyncIterator[GatewayServer]:
    """Run a gateway of others in front of engines, until the context ends. Raises GatewayMissingError."""
    peer = PEERS[name]
    binaries = await asyncio.to_thread(install_peer, name)
    port, metrics_port = (next(_ports) for _ in range(2))
    program, *arguments = peer.command(folder, port, metrics_port, engines)
    question = {"model": SERVICE, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    with _run(folder / f"{name}.log", [str(binaries / program), *arguments], peer.environment) as process:
        try:
            await _wait_until_answered(process, f"http://127.0.0.1:{port}/v1/chat/completions", question)
        except (TimeoutError, ChildProcessError) as error:
            raise GatewayMissingError(f"{name} does not serve: {error!r}, see {folder}/{name}.log") from error
        yield GatewayServer(port, process.pid)


_ports: Final = find_free_ports()


@contextlib.contextmanager
def _run(log: Path, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server on the first processor until the context ends."""
    with log.open("wb") as output, on_processor(0):
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    try:
        yield process
    finally:
        members = psutil.Process(process.pid).children(recursive=True)
        # A gateway that is asked to stop serves on for some seconds.
        process.kill()
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(_END_SECONDS)


async def _wait_until_answered(process: subprocess.Popen[bytes], url: str, question: object | None) -> None:
    """Ask until the answer is 200. Raises TimeoutError, and ChildProcessError if the process has ended."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    method = "GET" if question is None else "POST"
    async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession(headers=headers) as session:
        while process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.request(method, url, json=question) as response:
                    if response.status == 200:  # noqa: PLR2004 - OK
                        return
            await asyncio.sleep(0.02)
    raise ChildProcessError(f"it ended with {process.returncode}")


def install_peer(name: str) -> Path:
    """Return the folder with the programs of a gateway; install it first if need be. Raises GatewayMissingError."""
    requirements = PEERS[name].requirements
    environment = _CACHE / requirements[0].replace("==", "-")
    stamp = environment / ".installed"
    if not stamp.exists():
        print(f"installing {', '.join(requirements)} into {environment} (once)", file=sys.stderr)
        uv = str(Path(sys.executable).with_name("uv"))
        install = [uv, "pip", "install", "--quiet", "--python", str(environment / "bin/python"), *requirements]
        try:
            subprocess.run([uv, "venv", "--quiet", "--clear", str(environment)], check=True)
            subprocess.run(install, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise GatewayMissingError(f"{name} cannot be installed: {error}") from error
        stamp.touch()
    return environment / "bin"
