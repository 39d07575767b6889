"""Tells an engine that hangs from one that works hard: what a look at it means, and how it is looked at.

A long prompt keeps an engine silent for minutes, so silence alone never ends one: it must also use no processor time,
at several looks in a row. An engine that answers requests is not asked anything. One that rests is asked for its pulse
where it has one, and else for a token: with a single slot a token would cost the last conversation its cached prompt.
"""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import aiohttp

from crds.serving import Mode
from devices import processes
from runtimes.probe import generate_token

LOOK_SECONDS: Final = 10.0
"""Between two looks. An engine that hangs is ended after some `HUNG_LOOKS * (LOOK_SECONDS + ANSWER_SECONDS)`."""
TOKEN_LOOK_SECONDS: Final = 60.0
"""The same for an engine that has no pulse, and whose processor a token would wake each time."""
ANSWER_SECONDS: Final = 20.0
HUNG_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """How the engine took a question; `silent` when nothing came in time."""

    problem: str = ""
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """One look at an engine.

    Attributes:
        asked: what it said; None when it was not asked.
        before: its processor time, in seconds, at the last look; None when unknown.
        after: the same now.
    """

    asked: Asked | None
    before: float | None
    after: float | None

    @property
    def moved(self) -> bool:
        """Whether it used the processor since; what is unknown counts as a yes, as it is no reason to end anything."""
        return self.before is None or self.after is None or self.after > self.before

    @property
    def problem(self) -> str:
        """What there is to say of one that is not alive."""
        return self.asked.problem if self.asked else "it has requests to answer and uses no processor time"

    @property
    def alive(self) -> bool:
        """Whether it works as far as can be told: it answered, or it is silent and busy."""
        if self.asked is None or self.asked.silent:
            return self.moved
        return not self.asked.problem


def failures(so_far: int, look: Look) -> int:
    """Count the looks in a row that found no life."""
    return 0 if look.alive else so_far + 1


def pause_seconds(pulse: str | None, so_far: int) -> float:
    """Return how long to wait until the next look, after so many in a row that found no life."""
    return LOOK_SECONDS if pulse or so_far else TOKEN_LOOK_SECONDS


def should_ask(requests: int | None, before: float | None, after: float | None) -> bool:
    """Whether to ask it: not while it answers `requests` of others and visibly works on them."""
    return not requests or before is None or after is None or after <= before


async def ask(session: aiohttp.ClientSession, url: str, *, pulse: str | None, model: str, mode: Mode = "chat") -> Asked:
    """Ask the engine at `url` for its pulse, or for a token where it has none. Never raises for what it does."""
    if pulse is None:
        found = await generate_token(session, url, model=model, token=None, timeout_seconds=ANSWER_SECONDS, mode=mode)
        return Asked("" if found.ok else found.message, silent=found.reason == "TimedOut")
    try:
        async with asyncio.timeout(ANSWER_SECONDS), session.get(f"{url}{pulse}", allow_redirects=False) as response:
            await response.read()
            if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return Asked(f"{url}{pulse} answered {response.status:d}")
    except TimeoutError:
        return Asked(f"{url}{pulse} did not answer within {ANSWER_SECONDS:g} s", silent=True)
    except (aiohttp.ClientError, OSError) as error:
        return Asked(f"{url}{pulse}: {error}")
    return Asked()


async def cpu_seconds(pid: int) -> float | None:
    """Read its processor time."""
    return await asyncio.to_thread(processes.cpu_seconds, pid)
