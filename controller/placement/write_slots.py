"""Slots for concurrent writes of the queue, and how long one slow write may hold up others.

A webhook that hangs answers after up to half a minute, and often for one namespace only. Its writes go on, but give up
their slots, and no further one of the namespace begins meanwhile: others are admitted, and have connections left.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Final

import structlog

from controller.placement.admission_writer import StaleUnit
from controller.placement.write_retries import LAST_RETRY_SECONDS, WriteRetries
from kube.errors import ApiError, Unreachable

HANG_SECONDS: Final = 2.0
"""Time after which a write hangs."""

log = structlog.get_logger()


class NamespaceHangs(Unreachable):
    """Other writes in the namespace hang, so that this one was not sent."""


class WriteSlots:
    """A number of slots.

    Args:
        number: writes at once.
    """

    def __init__(self, number: int) -> None:
        """Start with all slots free."""
        self._slots = asyncio.Semaphore(number)
        self._hanging = Counter[str]()
        """Number of the writes that hang by namespace."""

    @contextlib.asynccontextmanager
    async def hold(self, namespace: str) -> AsyncIterator[None]:
        """Hold one of the slots while the body of the `async with` makes a write.

        A write that takes longer than HANG_SECONDS goes on without its slot, which another write then gets. Raises
        NamespaceHangs if such a write of the same namespace is still under way.
        """
        # 1. Wait for a slot; give it back if writes of the namespace hang.
        await self._slots.acquire()
        if self._hanging[namespace]:
            self._slots.release()
            raise NamespaceHangs(f"other writes in namespace {namespace} are not answered, as by a webhook that hangs")

        # 2. Start the timer that takes the slot from a write that hangs.
        is_hanging = False

        def release_early() -> None:
            """Give up the slot of a write that hangs, and count the write for its namespace; the timer below calls it.

            `is_hanging` tells `hold` at the end that the slot is given up already.
            """
            nonlocal is_hanging
            is_hanging = True
            self._hanging[namespace] += 1
            self._slots.release()

        timer = asyncio.get_running_loop().call_later(HANG_SECONDS, release_early)

        # 3. Let the caller write; then give the slot back, unless the timer has done so.
        try:
            yield
        finally:
            timer.cancel()
            if is_hanging:
                self._hanging[namespace] -= 1
            else:
                self._slots.release()


class UnitWrites:
    """The writes of one leadership term, apart from admissions.

    Args:
        tasks: the group in which a write that hangs goes on.
        slots: limits the writes at once.
        retries: notes failures, by which the unit of each is planned again after a pause.
    """

    def __init__(self, tasks: asyncio.TaskGroup, slots: WriteSlots, retries: WriteRetries) -> None:
        """Start without a write under way; see the class for the arguments."""
        self._tasks, self._slots, self._retries = tasks, slots, retries
        self._uids_being_written: set[str] = set()
        """uids of units with a write under way, which may hang: no other write of theirs begins meanwhile."""

    async def try_write(
        self, uid: str, namespace: str, write: Coroutine[object, object, None], longest: float = LAST_RETRY_SECONDS
    ) -> bool:
        """Start a write for a unit unless one is under way; return whether it succeeded within HANG_SECONDS.

        A write that takes longer goes on as a task. A write that is not started is closed, since Python warns of a
        coroutine that nobody awaits. After an API error the unit pauses for at most `longest` seconds.
        """
        if uid in self._uids_being_written:
            write.close()
            return False
        task = self._tasks.create_task(self._write(uid, namespace, write, longest))
        done, _ = await asyncio.wait({task}, timeout=HANG_SECONDS)
        return bool(done) and task.result()

    async def _write(self, uid: str, namespace: str, write: Coroutine[object, object, None], longest: float) -> bool:
        """Make a write, and return whether it succeeded.

        False also for a stale unit (changed since the decision), which the next round decides anew. After an API
        error, the unit pauses for at most `longest` seconds.
        """
        self._uids_being_written.add(uid)
        try:
            async with self._slots.hold(namespace):
                await write
        except StaleUnit as stale:
            log.info("decision_stale", unit=uid, cause=str(stale))
        except (ApiError, Unreachable) as error:
            self._retries.note_failure(uid, "", error, longest)
        else:
            self._retries.forget(uid)
            return True
        finally:
            write.close()
            self._uids_being_written.discard(uid)
        return False
