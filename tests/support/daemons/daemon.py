"""A daemon of the host's owner as a test starts and ends it."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Daemon(ABC):
    """A daemon at a port of loopback, which runs for the time of a block, and which a test may end and start in it."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    async def start(self) -> None:
        """Start it, always at the same port, and wait until it answers."""

    @abstractmethod
    async def stop(self) -> None:
        """End it as a crash does, also if it has not answered yet."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.stop()
