"""A fetch with defaults for the arguments that a test does not set."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts.errors import ArtifactError
from artifacts.fetch import FetchedArtifact, fetch
from artifacts.source import parse
from tests.support.file_server import ALLOWED_NETWORKS
from tests.unit.artifacts.stored_weights import HURRIED


class FetchCall(NamedTuple):
    """A fetch with defaults for the arguments that a test does not set."""

    to: Path
    endpoint: str

    async def __call__(self, source: str, **options: Any) -> FetchedArtifact:
        defaults: dict[str, Any] = {"sha256": None, "token": None, "file_root": None, "revision": None}
        defaults["on_progress"] = lambda _done, _total: None
        return await fetch(
            parse(source),
            self.to,
            **{
                "endpoint": self.endpoint,
                "patience": HURRIED,
                "allowed_networks": ALLOWED_NETWORKS,
                **defaults,
                **options,
            },
        )

    def names(self) -> set[str]:
        return {path.name for path in self.to.iterdir()} if self.to.exists() else set()

    async def refused(self, source: str, **options: Any) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            await self(source, **options)
        assert "\n" not in caught.value.message
        return caught.value
