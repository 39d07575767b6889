"""A real engine loads a split model behind links, as a hub's client lays it out."""

from pathlib import Path

from tests.support.hub_cache import move_to_cache
from tests.support.tiny_models import tiny_gguf, tiny_split
from tests.support.up_command import Up


async def test_split_model_in_the_cache_of_a_hubs_client_answers(tmp_path: Path) -> None:
    snapshot = move_to_cache(tiny_split.write(tmp_path / "split"), tmp_path / "cache")
    up = Up(tmp_path, "--model", str(snapshot / "tiny-00001-of-00003.gguf"), "--port=0", "--ask", "Hi")
    up.process.start()
    assert await up.ends() == 0, up.said
    assert tiny_gguf.SENTENCE in up.said
    assert "tiny-00001-of-00003: Ready" in up.said
