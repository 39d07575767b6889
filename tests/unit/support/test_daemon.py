"""A daemon that does not come up is ended, as no block follows that would."""

import pytest

from tests.support.daemons.daemon import Daemon


async def test_daemon_whose_start_fails_is_ended() -> None:
    done = []

    class Silent(Daemon):
        async def start(self) -> None:
            raise AssertionError("no answer")

        async def stop(self) -> None:
            done.append("stop")

    with pytest.raises(AssertionError, match="no answer"):
        async with Silent(1):
            done.append("block")
    assert done == ["stop"]
