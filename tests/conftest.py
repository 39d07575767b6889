"""Settings of every test: a busy machine is slow, and slow is not wrong."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from artifacts.repositories.address_policy import NETWORKS_VARIABLE, networks_text
from tests.support.file_server import ALLOWED_NETWORKS

settings.register_profile("pomona", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pomona")

# The commands that tests start fetch weights from servers of this machine.
os.environ[NETWORKS_VARIABLE] = networks_text(ALLOWED_NETWORKS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what stays until the end: modules and collected tests, half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
