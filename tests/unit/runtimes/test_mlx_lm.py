"""How mlx_lm.server is started: pure renderings; tests/hosts/test_mlx_lm.py runs them for real."""

from typing import Any

from runtimes import mlx_lm
from runtimes.serving import Adapter, Listen, Serving


def render(**changes: Any) -> str:
    wanted: dict[str, Any] = {"service": "chat", "model": "/weights/m", "context_length": 4096, "parallel": 4}
    return " ".join(mlx_lm.arguments(Serving(**(wanted | changes)), Listen("127.0.0.1", 0)))


def test_what_takes_memory_is_said() -> None:
    rendered = render()
    assert rendered.startswith("--model /weights/m --host 127.0.0.1 --port 0")
    assert "--decode-concurrency 4 --prompt-concurrency 4 --max-tokens 4096 --prompt-cache-size 4" in rendered


def test_prompts_are_not_logged_and_the_users_arguments_come_last() -> None:
    assert render(extra=["--temp", "0.5"]).endswith("--log-level INFO --temp 0.5")


def test_settings_are_rendered_only_where_they_are_asked_for() -> None:
    plain = render()
    for flag in ("--kv-bits", "--draft-model", "--num-draft-tokens", "--adapter-path", "--chat-template"):
        assert flag not in plain
    assert "--kv-bits 4 --quantized-kv-start 0" in render(cache_type_k="q4_0", cache_type_v="q4_0")
    assert "--draft-model /d --num-draft-tokens 3" in render(draft="/d", draft_max_tokens=3)
    assert "--adapter-path /a --chat-template={{x}}" in render(adapters=[Adapter("/a")], chat_template="{{x}}")


def test_it_can_fetch_nothing_and_has_none_of_the_owners_tokens() -> None:
    child = mlx_lm.child_environment({"PATH": "/bin", "HF_TOKEN": "t", "HF_HOME": "/h", "TRANSFORMERS_CACHE": "/c"})
    assert child["HF_HUB_OFFLINE"] == "1"
    assert child["PATH"] == "/bin"
    assert not {"HF_TOKEN", "HF_HOME", "TRANSFORMERS_CACHE"} & child.keys()
