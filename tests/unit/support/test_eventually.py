"""`eventually` must be able to fail, and say what it saw last."""

import pytest

from kube.errors import NotFound
from tests.support.eventually import eventually


async def test_returns_the_first_true_value() -> None:
    values = iter([0, None, 7, 8])

    assert await eventually(lambda: next(values)) == 7


async def test_what_is_not_there_yet_is_waited_for() -> None:
    errors = iter([NotFound("get pods", status=404), KeyError("status"), AssertionError("soon")])

    async def condition() -> str:
        for error in errors:
            raise error
        return "there"

    assert await eventually(condition) == "there"


async def test_the_last_value_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"within 0\.1 s; last: \[\]"):
        await eventually(list, timeout=0.1)


async def test_other_errors_are_not_waited_out() -> None:
    with pytest.raises(ZeroDivisionError):
        await eventually(lambda: 1 / 0)
