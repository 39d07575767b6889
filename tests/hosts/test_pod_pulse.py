"""The proxy of a pod finds a real llama-server whose generation hangs, though its health page answers."""

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import psutil

from runtimes.llama_server import RUNTIME
from tests.support import llama_server
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf

TOKEN: Final = "s3cret-token"
HANG_SECONDS: Final = 4
_ATTACH: Final = 16
_DETACH: Final = 17
_WAIT_ALL: Final = 0x40000000  # __WALL: threads, too
_PTRACE: Final = ctypes.CDLL(None, use_errno=True).ptrace


def find_busiest_thread(pid: int) -> int:
    """Return the thread of a process that has used the processor most: after a long answer that which generates."""
    return int(max(psutil.Process(pid).threads(), key=lambda thread: thread.user_time).id)


@contextmanager
def stopped_thread(thread: int) -> Iterator[None]:
    """Stop one thread of a child process; the others go on."""
    assert _PTRACE(_ATTACH, thread, 0, 0) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(thread, _WAIT_ALL)
    try:
        yield
    finally:
        _PTRACE(_DETACH, thread, 0, 0)


@asynccontextmanager
async def pod_proxy(folder: Path, port: int, engine_url: str) -> AsyncIterator[None]:
    """Run the proxy of a pod in front of llama-server, with the options of a pod with a device."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    options = ["--service=ns/tiny", "--address=127.0.0.1", f"--port={port}", f"--token-file={token_file}"]
    options += [f"--engine-port={urlsplit(engine_url).port}", "--health-path=/health", f"--pulse-path={RUNTIME.pulse}"]
    command = [sys.executable, "-m", "cli.main", "pod-proxy", *options, f"--hang-seconds={HANG_SECONDS}"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def test_llama_server_whose_generation_hangs_is_found_by_its_pulse(tmp_path: Path, unused_tcp_port: int) -> None:
    tiny_gguf.write(tmp_path / "loop.gguf", loop=True, n_ctx=2048)
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with llama_server.serve(tmp_path / "loop.gguf") as engine:
        async with pod_proxy(tmp_path, unused_tcp_port, engine.url), aiohttp.ClientSession() as session:

            async def answers(place: str, status: int) -> bool:
                try:
                    async with session.get(place) as response:
                        return response.status == status
                except aiohttp.ClientConnectionError:
                    return False

            await eventually(lambda: answers(f"{url}/health", 200))
            headers = {"Authorization": f"Bearer {TOKEN}"}
            body = {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "Hi"}]}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
            with stopped_thread(find_busiest_thread(engine.process.pid)):
                await eventually(lambda: answers(f"{url}/live/engine", 503))
                assert await answers(f"{engine.url}/health", 200), "its health page says nothing of its work"
                await eventually(lambda: answers(f"{url}/health", 503))
            await eventually(lambda: answers(f"{url}/live/engine", 200))
            await eventually(lambda: answers(f"{url}/health", 200))
