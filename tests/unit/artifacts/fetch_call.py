"""A fetch with defaults for the arguments that a test does not set."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact, fetch
from artifacts.source import parse
from tests.support.source_access import take_access, take_expected
from tests.unit.artifacts.stored_weights import HURRIED


class FetchCall(NamedTuple):
    """A fetch with defaults for the arguments that a test does not set."""

    to: Path
    endpoint: str

    async def __call__(self, source: str, **options: Any) -> FetchedArtifact:
        access = take_access(options, endpoint=self.endpoint, patience=HURRIED)
        options.setdefault("on_progress", lambda _done, _total: None)
        return await fetch(parse(source), self.to, access, take_expected(options), **options)

    def names(self) -> set[str]:
        return {path.name for path in self.to.iterdir()} if self.to.exists() else set()

    async def refused(self, source: str, **options: Any) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            await self(source, **options)
        assert "\n" not in caught.value.message
        return caught.value
