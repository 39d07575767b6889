"""`pomona pod-proxy`: the proxy in front of the engine of a pod. The controller puts it there."""

import functools
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import click
import uvloop

from artifacts.compiled_code import find_archive, restore
from artifacts.repositories.address_policy import Networks
from cli.options import PATH, Parsed, allow_private_sources, gather_options
from gateway.event_log import log, log_libraries
from gateway.proxy.config import BackendAdapter
from gateway.proxy.pod import HANG_SECONDS, PodProxyError, PodProxyOptions, Prepare, run_pod_proxy
from runtimes.daemon import DaemonError
from runtimes.pod import PodModel
from runtimes.registry import find_runtime

_PROGRESS_SECONDS: Final = 10.0
_MESSAGE_BYTES: Final = 2048

_port: Final = click.IntRange(1, 65535)


def _check_service(text: str) -> str:
    """Return the text if it is NAMESPACE/NAME. Raises ValueError."""
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise ValueError(f"{text!r} is not the name of a service: give one such as team/chat")
    return text


def _check_path(text: str) -> str:
    """Return a path that is one word of a request. Raises ValueError."""
    if not text.startswith("/") or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} is not a path: give one such as /health")
    return text


def _read_adapter(text: str) -> BackendAdapter:
    """Return the adapter of NAME:SCALE. Raises ValueError."""
    name, _, scale = text.rpartition(":")
    return BackendAdapter(float(scale), name)


_URL_PATH: Final = Parsed("PATH", _check_path)


@click.command("pod-proxy")
@gather_options("options", PodProxyOptions)
@click.option(
    "--service",
    required=True,
    type=Parsed("NAMESPACE/NAME", _check_service),
    help="The service, whose name clients give as model.",
)
@click.option("--address", default="0.0.0.0", show_default=True, help="Address to listen at.")
@click.option("--port", default=8080, show_default=True, type=_port, help="Port to listen at.")
@click.option(
    "--token-file",
    required=True,
    type=PATH,
    help="File with the bearer token that clients need. It is read again when it changes.",
)
@click.option("--engine-port", required=True, type=_port, help="Port of the engine on 127.0.0.1.")
@click.option("--health-path", required=True, type=_URL_PATH, help="Path that a healthy engine answers with 200.")
@click.option(
    "--pulse-path",
    type=_URL_PATH,
    help="Path that the engine answers between two steps of its work: without an answer, it hangs. Default: none.",
)
@click.option("--engine", metavar="RUNTIME", help="The engine: how to read its errors and metrics. Default: unknown.")
@click.option("--mode", help="The mode in which the engine serves: which paths it answers. Default: unknown.")
@click.option("--engine-model", "model", metavar="NAME", help="The engine's name for the model. Default: any name.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests that the engine works on at once. Default: all.")
@click.option(
    "--drain-seconds",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that running and waiting requests have to end after SIGTERM.",
)
@click.option(
    "--hang-seconds",
    default=HANG_SECONDS,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds after which an engine that was healthy and is silent counts as hanging.",
)
@click.option(
    "--loading-seconds",
    default=math.inf,
    show_default="no limit",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds after which an engine that is not healthy yet counts as hanging.",
)
@click.option("--home", type=PATH, help="Home of the engine, in which it compiles. Default: nothing is kept.")
@click.option("--kept", type=PATH, help="With --home: archive of that home, whose name gets an end for the node.")
@click.option("--restore", "restores", is_flag=True, help="Only make --home with what is in the archive, and end.")
@click.option(
    "--source",
    metavar="SOURCE",
    help="Model that the engine gets before the first request: ollama://NAME:TAG, or the path of a GGUF file.",
)
@click.option("--context-length", type=click.IntRange(1), help="Tokens of context of a request. Default: unknown.")
@click.option("--shared-tokens", type=click.IntRange(0), help="Tokens beyond one context that its slots share.")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=Parsed("NAME:SCALE", _read_adapter),
    help="Adapter of the engine that requests choose as SERVICE:NAME; without NAME it is always applied.",
)
@click.option("--threads", type=click.IntRange(1), help="With --source: threads of the engine. Default: its own.")
@allow_private_sources
@click.option("--termination-log", type=PATH, help="File for the message of a failure.")
def command(
    *,
    options: PodProxyOptions,
    restores: bool,
    source: str | None,
    threads: int | None,
    allowed_networks: Networks,
    termination_log: Path | None,
) -> None:
    """Check the token of requests, queue, count and pass them on to the engine of this pod, until SIGTERM.

    GET /health needs no token, and answers 200 while the engine serves. GET /live/engine needs none either, and answers
    503 while the engine hangs. GET /metrics needs the token; with ?engine=false it has the proxy's own only.

    \b
    Example, with an engine that listens at 127.0.0.1:8000:
      pomona pod-proxy --service team/chat --token-file token --engine-port 8000 --health-path /health
    """
    log_libraries()
    if restores and options.home and options.kept:
        try:
            outcome = restore(find_archive(options.kept), options.home)
        except OSError as error:  # the engine compiles
            outcome = str(error)
        log.info("compiled_code_restored", outcome=outcome)
        return
    # preparation: brings the model into the engine; None: the engine starts with its model
    preparation = _plan_preparation(options, source, threads, allowed_networks) if source else None
    try:
        uvloop.run(run_pod_proxy(options, preparation))
    except PodProxyError as error:
        # Kubernetes shows the content of this file as the reason why the container ended.
        if termination_log:
            try:
                termination_log.write_bytes(str(error).encode()[:_MESSAGE_BYTES])
            except OSError as failure:
                log.warning("termination_log_not_written", error=str(failure))
        raise click.ClickException(str(error)) from error


def _plan_preparation(options: PodProxyOptions, source: str, threads: int | None, networks: Networks) -> Prepare:
    """Return the call that brings the model of `source` into the engine, as for Ollama, which starts without a model.

    Raises click.UsageError: the engine gets no model so, or its name for the model or the context length is missing.
    """
    # pod.prepare: brings the model into an engine that starts without one; None: the engine needs no such call
    pod = find_runtime(options.engine).pod
    if not (pod and pod.prepare and options.model and options.context_length):
        raise click.UsageError("--source needs an --engine that gets its model, --engine-model and --context-length")
    model = PodModel(options.engine_port, options.model, source, options.context_length, networks, threads)
    return functools.partial(_prepare, pod.prepare, model)


async def _prepare(prepare: Callable[..., Awaitable[None]], model: PodModel) -> None:
    """Bring a model into the engine, and log the progress, and each error after which that is tried again.

    Raises PodProxyError: it has failed for good.
    """
    try:
        await prepare(model, _ProgressLog(), lambda error: log.warning("prepare_failed", error=str(error)))
    except DaemonError as error:
        raise PodProxyError(str(error)) from error


class _ProgressLog:
    """Logs the progress of the model's way into the engine, at most every ten seconds."""

    def __init__(self) -> None:
        self._logged_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int | None) -> None:
        """Log how many bytes are there, if the last line is old enough or these are all."""
        # _logged_at: the time of the last line
        now = time.monotonic()
        if now - self._logged_at >= _PROGRESS_SECONDS or done_bytes == total_bytes:
            self._logged_at = now
            log.info("model_progress", bytes=done_bytes, total_bytes=total_bytes)
