"""Kills of `pomona up`, its proxy or an engine in the middle of swaps of models on demand."""

import asyncio
import contextlib
import functools
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence

import aiohttp

from tests.support.eventually import eventually
from tests.support.on_demand_up import find_engines, find_proxy
from tests.support.up_command import Up, ask

_LONGEST_DELAY_SECONDS = 0.25
"""A swap of tiny models takes about half of it."""
_LOOK_SECONDS = 0.02


class SwapCrashes:
    """Rounds of one kill each, at a random moment of a swap.

    Args:
        up: serves the models; it is started by `run`.
        names: the models on demand; each answers "NAME speaks.".
        room: the number of models that fit into its memory.
        chance: decides what is killed, and when.
    """

    def __init__(self, up: Up, names: Sequence[str], *, room: int, chance: random.Random) -> None:
        self._up, self._names, self._room, self._chance = up, names, room, chance
        self.kills: Counter[str] = Counter()

    async def run(self, rounds: int) -> None:
        """Kill something in each round, and check that all models answer after it.

        Raises AssertionError: a model ran twice, more ran than fit, or one does not answer any more.
        """
        url = await self._up.url()
        watching = asyncio.create_task(self._watch_engines())
        try:
            for _ in range(rounds):
                await self._kill_during_swap(url)
                for name in self._chance.sample(self._names, len(self._names)):
                    await eventually(functools.partial(self._answers, url, name))
                if watching.done():
                    watching.result()  # raises what was seen
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _kill_during_swap(self, url: str) -> None:
        """Ask for a model that is not loaded and, while it is loaded, kill a process at a random moment."""
        running = set(find_engines(self._up.state).values())
        wanted = self._chance.choice([name for name in self._names if name not in running])
        asking = asyncio.create_task(self._answers(url, wanted))
        await asyncio.sleep(self._chance.uniform(0, _LONGEST_DELAY_SECONDS))

        victim = self._chance.choice(["up", "proxy", "engine"])
        self.kills[victim] += 1
        with contextlib.suppress(ProcessLookupError, IndexError, StopIteration):
            match victim:
                case "up":
                    await self._up.process.kill()
                    self._up.process.start()
                case "proxy":
                    os.kill(find_proxy(self._up.state), signal.SIGKILL)
                case "engine":
                    os.kill(self._chance.choice(sorted(find_engines(self._up.state))), signal.SIGKILL)
        await asking

    async def _answers(self, url: str, name: str) -> bool:
        """Return whether a model answers; another answer than its own is a failure of the run."""
        try:
            status, said = await ask(url, name)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        assert status != 200 or said == f"{name} speaks."
        return status == 200

    async def _watch_engines(self) -> None:
        """Look at the engines until cancelled: none runs twice, and no more of them than fit."""
        while True:
            engines = await asyncio.to_thread(find_engines, self._up.state)
            twice = {name for name, count in Counter(engines.values()).items() if count > 1}
            assert not twice, f"loaded twice: {twice}"
            assert len(engines) <= self._room, f"more than fit: {engines}"
            await asyncio.sleep(_LOOK_SECONDS)
