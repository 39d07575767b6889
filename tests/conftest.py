"""Settings of every test: a busy machine is slow, and slow is not wrong."""

import gc
import itertools
import logging
import os
import signal
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from artifacts.repositories.address_policy import NETWORKS_VARIABLE, networks_text
from tests.support.file_server import ALLOWED_NETWORKS
from tests.support.free_ports import find_free_ports

settings.register_profile(
    "quick",
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=200)
settings.load_profile("quick")

# If rich is installed, the default prints each frame of a traceback in colours, which takes a tenth of a second.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)
# The commands that tests start fetch weights from servers of this machine.
os.environ[NETWORKS_VARIABLE] = networks_text(ALLOWED_NETWORKS)
# The developer's kubeconfig may be that of a real cluster. The developer's cache has the control plane's programs.
os.environ.pop("KUBECONFIG", None)
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
# A shell has what it starts in the background ignore Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def home_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths for home folders, none of which exists yet."""
    homes = tmp_path_factory.mktemp("homes")
    return (homes / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def home(home_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder for each test, which neither reads nor writes the developer's state and settings."""
    folder = next(home_folders)
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    # Below XDG_CACHE_HOME there may be models of the developer.
    monkeypatch.setenv("HF_HOME", str(folder / ".cache/huggingface"))
    return folder


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a command that the test runs configures for the whole process: the next test may look for a line."""
    settings, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure = structlog.configure

    def configure_uncached(**settings: Any) -> None:
        # A logger that keeps the settings of its first line would keep them beyond the test.
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_uncached)
    yield
    configure(**settings)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def unused_tcp_port() -> int:
    """A port of 127.0.0.1 for a server that starts later, below those that the system gives to others meanwhile."""
    return next(find_free_ports())


@pytest.fixture
def refused_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections, and is held: a test in another worker can not listen there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what stays until the end: modules and collected tests, half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
