"""The command line of mlx_lm.server: pure rendering; tests/hosts/test_mlx_lm.py runs the real server."""

from typing import Any

from crds.serving import ServingOptions
from runtimes import mlx_lm
from runtimes.serving import CompanionFile, Listen, build_serving


def render(*companions: CompanionFile, draft_max_tokens: int | None = None, **options: Any) -> str:
    stated = ServingOptions(**({"context_length": 4096, "parallel": 4} | options))
    serving = build_serving("chat", "/weights/m", stated, companions, draft_max_tokens=draft_max_tokens)
    return " ".join(mlx_lm.arguments(serving, Listen("127.0.0.1", 0)))


def test_arguments_that_decide_memory_are_always_rendered() -> None:
    rendered = render()
    assert rendered.startswith("--model /weights/m --host 127.0.0.1 --port 0")
    assert "--decode-concurrency 4 --prompt-concurrency 4 --max-tokens 4096 --prompt-cache-size 4" in rendered


def test_prompts_are_not_logged_and_the_users_arguments_come_last() -> None:
    assert render(extra_args=["--temp", "0.5"]).endswith("--log-level INFO --temp 0.5")


def test_only_requested_settings_are_rendered() -> None:
    plain = render()
    for flag in ("--kv-bits", "--draft-model", "--num-draft-tokens", "--adapter-path", "--chat-template"):
        assert flag not in plain
    assert "--kv-bits 4 --quantized-kv-start 0" in render(cache_type_k="q4_0", cache_type_v="q4_0")
    assert "--draft-model /d --num-draft-tokens 3" in render(CompanionFile("draft", "/d"), draft_max_tokens=3)
    assert "--adapter-path /a --chat-template={{x}}" in render(CompanionFile("adapter", "/a"), chat_template="{{x}}")


def test_child_environment_is_offline_and_has_no_tokens() -> None:
    child = mlx_lm.child_environment({"PATH": "/bin", "HF_TOKEN": "t", "HF_HOME": "/h", "TRANSFORMERS_CACHE": "/c"})
    assert child["HF_HUB_OFFLINE"] == "1"
    assert child["PATH"] == "/bin"
    assert not {"HF_TOKEN", "HF_HOME", "TRANSFORMERS_CACHE"} & child.keys()
