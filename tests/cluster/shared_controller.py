"""One controller for consecutive tests, because each start costs the processors a second.

It is started anew when a test wants other options, another environment or a new one, when a test has ended it, after a
test that failed, and after a test of `tests/cluster` that has no controller or one of its own.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from tests.controlplane import members
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process


class SharedController:
    """The controller of a session, which tests borrow one after the other.

    Args:
        plane: its control plane.
        folder: for its log.
        watched: processes whose logs a failed test shows; the controller is one of them while it runs.
    """

    def __init__(self, plane: ControlPlane, folder: Path, watched: list[Process]) -> None:
        self._plane = plane
        self._folder = folder
        self._watched = watched
        self._process: Process | None = None
        self._settings: tuple[tuple[str, ...], Mapping[str, str]] = ((), {})
        self.is_suspect = False
        """A test has failed with it: it is not lent again."""

    async def lend(self, *arguments: str) -> Process:
        """Return the controller, running with these options and in the present environment."""
        # pytest changes this variable with each test.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        settings = (arguments, environment)
        process = self._process
        if process is not None and process.running and settings == self._settings and not self.is_suspect:
            return process
        await self.end()
        self._settings, self.is_suspect = settings, False
        self._process = await members.controller(self._plane, self._folder, *arguments)
        self._watched.append(self._process)
        self._process.start()
        return self._process

    async def lend_new(self, *arguments: str) -> Process:
        """Return a controller that no test had before, for what a controller does at its start only."""
        await self.end()
        return await self.lend(*arguments)

    async def end(self) -> None:
        """Stop the controller, if it is there."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._watched.remove(process)
        await self._plane.end_outage()
        if process.running:
            await process.stop()
        await members.delete_leadership(self._plane)
