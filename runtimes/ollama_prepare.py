"""The preparation of the Ollama in a pod: it gets its one model, and loads it, before the pod is Ready.

`ollama serve` starts without a model. So the proxy in front of it (`pomona pod-proxy`) makes it pull the model, or
create it from the GGUF file on the Model's volume. A model that is in the daemon's folder already is not fetched
again, so a container that restarts is ready again soon.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from artifacts.repositories.address_policy import Networks
from crds.serving import ServingOptions
from devices.sockets import LOOPBACK
from kube.backoff import backoff_seconds
from runtimes.daemon import NOT_RUNNING, DaemonError, OnProgress
from runtimes.ollama_client import Ollama
from runtimes.serving import build_serving

_START_SECONDS: Final = 1.0
_ATTEMPTS: Final = 5
"""Failures after which the preparation ends, so that the pod shows the last one; the kubelet then starts it again."""
_FIRST_PAUSE_SECONDS: Final = 2.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_PERMANENT_REASONS: Final = frozenset({"SourceForbidden", "SplitUnsupported", "WeightsMissing"})
_PERMANENT_TEXTS: Final = ("file does not exist", "no space left on device", "invalid model name")
"""Errors of Ollama that another attempt does not cure; all have one status, so only their texts differ."""


class PodModel(NamedTuple):
    """The model of a pod, and the daemon that serves it."""

    port: int
    """Port of the daemon on 127.0.0.1."""
    name: str
    """Name of the model in the daemon."""
    source: str
    """ollama://NAME:TAG, or the path of a GGUF file."""
    context_length: int
    """Tokens of context of one request."""
    allowed_networks: Networks = ()
    """Private networks from which models may be pulled."""


async def prepare_model(model: PodModel, on_progress: OnProgress, on_failure: Callable[[DaemonError], None]) -> None:
    """Pull or create the model, and load it for ever; try again after failures that may pass.

    Args:
        model: the model.
        on_progress: called with the bytes that the daemon has, and the total.
        on_failure: called with each failure after which it is tried again.

    Raises:
        DaemonError: another try does not help, or several have failed.
    """
    name = model.name
    serving = build_serving(name, model.source, ServingOptions(context_length=model.context_length))
    daemon = Ollama({"OLLAMA_HOST": f"{LOOPBACK}:{model.port}"}, model.allowed_networks)
    failures = 0
    try:
        while True:
            try:
                await daemon.bring(name, serving, on_progress)
                await daemon.load(name)
            except DaemonError as error:
                if error.reason == NOT_RUNNING:  # starting, or started again by the kubelet
                    await asyncio.sleep(_START_SECONDS)
                    continue
                failures += 1
                if is_permanent(error) or failures >= _ATTEMPTS:
                    raise
                on_failure(error)
                await asyncio.sleep(backoff_seconds(failures, first=_FIRST_PAUSE_SECONDS, most=_LONGEST_PAUSE_SECONDS))
            else:
                return
    finally:
        await daemon.close()


def is_permanent(error: DaemonError) -> bool:
    """Decide whether another try cannot help."""
    return error.reason in _PERMANENT_REASONS or any(text in str(error) for text in _PERMANENT_TEXTS)
