"""`eventually` must be able to fail, with the last value in its message."""

import aiohttp
import pytest

from kube.errors import NotFound, Unreachable
from tests.support.eventually import eventually


async def test_first_true_value_is_returned() -> None:
    values = iter([0, None, 7, 8])

    assert await eventually(lambda: next(values)) == 7


async def test_missing_object_and_silent_server_count_as_not_yet() -> None:
    missing = NotFound("get pods", status=404), KeyError("status"), FileNotFoundError("log"), AssertionError("soon")
    errors = iter([*missing, Unreachable("busy"), aiohttp.ServerDisconnectedError(), TimeoutError()])

    async def condition() -> str:
        for error in errors:
            raise error
        return "there"

    assert await eventually(condition) == "there"


async def test_the_last_value_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"within 0\.1 s; last: \[\]"):
        await eventually(list, timeout=0.1)


async def test_other_error_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        await eventually(lambda: 1 / 0)
