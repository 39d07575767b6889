"""The shortest YAML beside the same engine, started by hand with its own defaults, on the same machine.

llama.cpp and mlx-lm are served by `pomona up`, with its proxy. vLLM is served by the pod that the controller makes of a
service that states its Model alone, on a cluster whose one node is this machine: with its arguments and variables, and
behind the proxy of the pod. The models are random, so that what is measured is the engine and its arguments.

By hand, an engine gets its model, its address, and nothing else, but vLLM as many bytes of cache as in the pod: its own
choice is nine tenths of the machine. It compiles into a home of its own, as in the pod.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from benchmarks.clients import chat_scenarios as scenarios
from benchmarks.clients.chat_scenarios import ChatClient, ChatServer
from benchmarks.report import Figure, print_figures
from devices.sockets import LOOPBACK
from runtimes.environment import PYTHON
from tests.controlplane.process import Process
from tests.support.eventually import eventually
from tests.support.free_ports import find_free_ports
from tests.support.tiny_models import tiny_gguf, tiny_mlx
from tests.support.up_command import Up
from tests.vllm import environment
from tests.vllm.real_pod import SERVICE, TOKEN, RealPod, read_argument

ROUNDS: Final = 9
MIB: Final = 2**20
READY_SECONDS: Final = 600.0
Scenario = Callable[[ChatClient], Awaitable[float]]


class Side:
    """One way to start the engine: a server, and the most memory that its engine took.

    The engine is all processes of the family of `pid` that have `program` in their command lines. `reserved_bytes` is
    the memory that is reserved for it; None: nothing, or it is not compared.
    """

    def __init__(self, server: ChatServer, pid: int, program: str = "", *, reserved_bytes: int | None = None) -> None:
        self.client = ChatClient(server)
        self.peak_bytes, self.reserved_bytes = 0, reserved_bytes
        self._pid, self._program = pid, program

    def find_engines(self) -> list[psutil.Process]:
        """Return the processes of the engine."""
        parent = psutil.Process(self._pid)
        family = [parent, *parent.children(recursive=True)]
        return [process for process in family if any(self._program in part for part in process.cmdline())]

    async def watch_memory(self) -> None:
        """Note the most memory that the engine's processes have for themselves, for ever."""
        while True:
            try:
                # Without files and shared memory. To count unique pages would take the kernel 20 ms for each GiB, which
                # slows the engine down.
                sizes = [process.memory_info() for process in self.find_engines()]
                used = sum(size.rss - size.shared for size in sizes)
            except psutil.Error:
                used = 0
            self.peak_bytes = max(self.peak_bytes, used)
            await asyncio.sleep(0.25)


@asynccontextmanager
async def serve_ours(folder: Path, model: str, budget: str, program: str) -> AsyncIterator[Side]:
    """Serve a model by `pomona up` with nothing stated but the model and the memory of the machine."""
    up = Up(folder, "--model", model, "--memory-budget", budget)
    url = await up.url()
    try:
        async with aiohttp.ClientSession() as session:

            async def find_model() -> str:
                async with session.get(f"{url}/v1/models") as response:
                    models = (await response.json())["data"]
                    return models[0]["id"] if models else ""

            name = await eventually(find_model, READY_SECONDS)
        yield Side(ChatServer(url, name), up.process.pid, program)
    finally:
        os.kill(up.process.pid, signal.SIGTERM)
        await up.process.wait()


@asynccontextmanager
async def serve_pod(pod: RealPod) -> AsyncIterator[Side]:
    """Serve the model of a pod by its engine, behind its proxy."""
    async with pod.run_engine() as pid, pod.run_proxy():
        yield Side(ChatServer(pod.url, SERVICE, TOKEN), pid, reserved_bytes=pod.memory_bytes)


@asynccontextmanager
async def serve_by_hand(
    folder: Path,
    argv: Sequence[str],
    server: ChatServer,
    program: str = "",
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[Side]:
    """Serve a model by a command that people type, with these variables beside those of this process."""
    engine = Process("by-hand", [*argv], folder / "by-hand.log", variables)
    engine.start()
    try:
        async with ChatClient(server) as client:

            async def answers() -> bool:
                if not engine.running:
                    raise RuntimeError(engine.tail(50))
                try:
                    await client.ask([{"role": "user", "content": "Hi"}], max_tokens=1)
                except (aiohttp.ClientError, scenarios.ChatError):
                    return False
                return True

            await eventually(answers, READY_SECONDS)
        yield Side(server, engine.pid, program)
    finally:
        os.kill(engine.pid, signal.SIGTERM)
        await engine.wait()


class Row:
    """One measured figure of both sides."""

    def __init__(
        self, name: str, scenario: Scenario, unit: str, goal: float, *, at_least: bool = False, rounds: int = ROUNDS
    ) -> None:
        self.name, self.scenario, self.unit, self.goal, self.at_least = name, scenario, unit, goal, at_least
        self.rounds = rounds


async def compare(title: str, ours: Side, theirs: Side, rows: Sequence[Row]) -> None:
    """Measure all rows on both sides in turn, and print the medians with their ratios.

    Every other round has the other order, since other work makes a machine slower and faster.
    """
    figures = []
    watches = [asyncio.create_task(side.watch_memory()) for side in (ours, theirs)]
    for row in rows:
        values: dict[Side, list[float]] = {ours: [], theirs: []}
        for number in range(row.rounds):
            for side in (theirs, ours) if number % 2 else (ours, theirs):
                values[side].append(await row.scenario(side.client))
        print(f"{row.name}: {values[ours]} beside {values[theirs]} {row.unit}", file=sys.stderr)
        mine, floor = statistics.median(values[ours]), statistics.median(values[theirs])
        figures.append(Figure(row.name, mine, floor, row.goal * floor, row.unit, at_least=row.at_least))
    for watch in watches:
        watch.cancel()
    reserved = None if ours.reserved_bytes is None else ours.reserved_bytes / MIB
    mine, floor = ours.peak_bytes / MIB, theirs.peak_bytes / MIB
    figures.append(Figure("peak memory of the engine", mine, floor, reserved, "MiB"))
    print_figures(title, figures)
    for side in (ours, theirs):
        await side.client.__aexit__()


def rate(requests: int) -> Row:
    """Return the row of the tokens per second of so many requests at once, eight times in a round."""
    return Row(
        f"{requests} requests at once",
        lambda it: scenarios.measure_rate(it, requests, rounds=8),
        "tok/s",
        0.95,
        at_least=True,
    )


def remembered(conversations: int) -> Row:
    """Return the row of the prompt tokens that are computed in conversations in turn."""
    return Row(
        f"{conversations} conversations in turn: prompt tokens computed",
        lambda it: scenarios.count_computed(it, conversations),
        "tok",
        1.05,
        rounds=3,
    )


async def measure_llama(folder: Path) -> None:
    """Compare llama.cpp on a machine with memory for four contexts."""
    model = folder / "chat.gguf"
    tiny_gguf.write(
        model, loop=True, n_embd=256, n_layer=8, n_head=8, n_head_kv=2, n_ff=1024, n_ctx=32_768, ftype="f16"
    )
    port = next(find_free_ports())
    server = ChatServer(f"http://{LOOPBACK}:{port}", "chat")
    argv = [*PYTHON, "runtimes.llama_launcher", "-m", str(model), "--host", LOOPBACK, "--port", str(port)]
    argv += ["-np", "4", "-kvu"]  # the defaults of the program llama-server, which the library leaves to it
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(serve_ours(folder, str(model), "8GiB", "runtimes.llama_launcher"))
        theirs = await stack.enter_async_context(serve_by_hand(folder, argv, server, "runtimes.llama_launcher"))
        rows = [
            *(rate(requests) for requests in (1, 4, 8)),
            *(remembered(conversations) for conversations in (2, 4)),
            Row("first token of 50 beside an answer of 2,000", scenarios.measure_first_beside, "s", 1.5),
            Row("first tokens of 4 without max_tokens", scenarios.measure_first_of_unlimited, "s", 1.5),
        ]
        await compare("llama.cpp, memory for four contexts", ours, theirs, rows)


async def measure_tight_llama(folder: Path) -> None:
    """Show that no request is ended by another on a machine with memory for little more than one context."""
    model = folder / "small.gguf"
    tiny_gguf.write(model, loop=True, n_embd=256, n_layer=8, n_head=4, n_head_kv=4, n_ff=256, n_ctx=4096, ftype="f16")
    async with serve_ours(folder, str(model), "200MiB", "runtimes.llama_launcher") as ours:
        print((ours.find_engines() or [psutil.Process()])[0].cmdline())
        ended = await scenarios.count_ended(ours.client, 500, longest=4096)
        print_figures(
            "llama.cpp, requests that share one context",
            [Figure("of 500 random requests, ended by others", ended, None, 0, "requests")],
        )
        await ours.client.__aexit__()


async def measure_mlx(folder: Path) -> None:
    """Compare mlx-lm."""
    model = folder / "mlx-chat"
    tiny_mlx.write(model, loop=True, n_ctx=32_768)
    port = next(find_free_ports())
    server = ChatServer(f"http://{LOOPBACK}:{port}", str(model))
    argv = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--host", LOOPBACK, "--port", str(port)]
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(serve_ours(folder, f"{model}/", "8GiB", "mlx_launcher"))
        theirs = await stack.enter_async_context(serve_by_hand(folder, argv, server, "mlx_lm.server"))
        await compare("mlx-lm", ours, theirs, [remembered(conversations) for conversations in (2, 4)])


async def measure_vllm(folder: Path) -> None:
    """Compare vLLM on the processor."""
    pod = RealPod(folder, loop=True, n_embd=256, n_layer=8, n_head=8, n_head_kv=2, n_ff=1024, n_ctx=32_768)
    pod.empty()
    port, model, cache = next(find_free_ports()), str(pod.weights), "--kv-cache-memory-bytes"
    argv = [str(environment.folder() / "bin/vllm"), "serve", model, "--host", LOOPBACK, "--port", str(port)]
    argv += [cache, read_argument(pod.argv, cache)]
    server, variables = ChatServer(f"http://{LOOPBACK}:{port}", model), {"HOME": str(folder), "TMPDIR": str(folder)}
    print(f"in the pod: {pod.argv}, {pod.environment}, behind {pod.proxy_argv}\nby hand: {argv}, {variables}")
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(serve_pod(pod))
        theirs = await stack.enter_async_context(serve_by_hand(folder, argv, server, variables=variables))
        await compare("vLLM on the processor", ours, theirs, [rate(requests) for requests in (1, 8, 32)])


PARTS: Final = {"llama": measure_llama, "tight": measure_tight_llama, "mlx": measure_mlx, "vllm": measure_vllm}


async def measure(parts: Sequence[str]) -> None:
    """Measure each part in a folder of its own."""
    for part in parts:
        with tempfile.TemporaryDirectory() as name:
            await PARTS[part](Path(name))


def main() -> None:
    """Measure all, or the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    print(f"load {os.getloadavg()[0]:.1f} before")
    asyncio.run(measure(parser.parse_args().parts))


if __name__ == "__main__":
    main()
