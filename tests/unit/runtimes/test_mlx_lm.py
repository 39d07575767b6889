"""The command line of mlx_lm.server: pure rendering; tests/hosts/test_mlx_lm.py runs the real server."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from crds.serving import ServingOptions
from crds.weights_header import Layers, Layout
from runtimes import mlx_launcher, mlx_lm
from runtimes.serving import CompanionFile, Listen, Serving
from tests.unit.fitness.test_memory import QWEN3_8B


def render(
    *companions: CompanionFile, draft_max_tokens: int | None = None, layout: Layout | None = None, **options: Any
) -> str:
    stated = ServingOptions(**({"context_length": 4096, "parallel": 4} | options))
    serving = Serving("chat", "/weights/m", stated, companions, draft_max_tokens=draft_max_tokens, layout=layout)
    return " ".join(mlx_lm.render_arguments(serving, Listen("127.0.0.1", 0)))


def test_arguments_that_decide_memory_are_always_rendered() -> None:
    rendered = render()
    assert rendered.startswith("--model /weights/m --host 127.0.0.1 --port 0")
    assert "--decode-concurrency 4 --prompt-concurrency 2 --max-tokens 4096 --prompt-cache-size 4" in rendered
    one = "--decode-concurrency 1 --prompt-concurrency 1 --max-tokens 4096 --prompt-cache-size 1"
    assert one in render(parallel=1)
    # Four requests at once share one context and some more.
    assert "--decode-concurrency 4 --prompt-concurrency 2 " in render(parallel=None)


NEAR = Layers(count=30, key_elements=1024, value_elements=1024, window=1024)


@pytest.mark.parametrize(
    ("layout", "prompt_cache", "parallel", "entries"),
    [
        (None, None, None, 1),
        (None, "64Gi", 6, 6),
        (QWEN3_8B, None, None, 1),
        (QWEN3_8B, None, 6, 6),
        # A conversation takes 576 MiB, and at most four are remembered.
        (QWEN3_8B, "1151Mi", None, 1),
        (QWEN3_8B, "1152Mi", None, 2),
        (QWEN3_8B, "64Gi", 2, 4),
        # A window cannot go back, so a conversation has two entries and takes 2.3 times as much; there are two more.
        (structs.replace(QWEN3_8B, layers=[NEAR]), None, None, 4),
        (structs.replace(QWEN3_8B, layers=[NEAR]), "64Gi", None, 10),
        (structs.replace(QWEN3_8B, layers=[*QWEN3_8B.layers, NEAR]), "4306Mi", None, 6),
        (structs.replace(QWEN3_8B, layers=[Layers(count=48, state_bytes=1)]), "64Gi", None, 10),
    ],
)
def test_entries_are_the_conversations_that_the_prompt_cache_holds(
    layout: Layout | None, prompt_cache: str | None, parallel: int | None, entries: int
) -> None:
    rendered = render(layout=layout, prompt_cache=prompt_cache, parallel=parallel)
    assert f"--prompt-cache-size {entries} " in rendered


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
    child = mlx_lm.build_environment({"PATH": "/bin", "HF_TOKEN": "t", "HF_HOME": "/h", "TRANSFORMERS_CACHE": "/c"})
    assert child["HF_HUB_OFFLINE"] == "1"
    assert child["PATH"] == "/bin"
    assert not {"HF_TOKEN", "HF_HOME", "TRANSFORMERS_CACHE"} & child.keys()


@pytest.mark.parametrize(
    ("version", "is_used"), [("0.31.3", False), ("0.9.0", False), ("0.32.0", True), ("1.0.0", True)]
)
def test_version_that_runs_code_of_a_model_is_not_used(
    version: str, *, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment as pip and Homebrew make it: the program, and the package's metadata below lib."""
    program = tmp_path / "bin" / "mlx_lm.server"
    packages = tmp_path / "lib/python3.11/site-packages"
    (packages / f"mlx_lm-{version}.dist-info").mkdir(parents=True)
    program.parent.mkdir()
    program.write_text("#!/opt/mlx/bin/python3.12\n")
    program.chmod(0o755)
    package = ModuleSpec("mlx_lm", None, origin=str(packages / "mlx_lm" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: package)
    monkeypatch.setattr(mlx_lm, "find_program", lambda _name: str(program))
    assert (mlx_lm.find_command() is not None) is is_used
    assert mlx_lm.RUNTIME.installed() is is_used


def test_program_on_path_is_run_by_its_own_python_and_our_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mlx_lm.server"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(mlx_lm, "find_program", lambda _name: str(program))
    assert mlx_lm.find_command() is None
    program.write_text("#!/opt/mlx/bin/python3.12\nimport sys\n")
    program.chmod(0o755)
    assert mlx_lm.find_command() == ["/opt/mlx/bin/python3.12", "-I", str(Path(mlx_launcher.__file__))]
    program.write_text("#!/bin/sh\nexec something\n")
    assert mlx_lm.find_command() is None, "it cannot be given a key"
    beside = tmp_path / "python3"
    beside.touch()
    assert mlx_lm.find_command() == [str(beside), "-I", str(Path(mlx_launcher.__file__))]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "m"], "--api-key-file is required"),
        (["--model", "m", "--api-key-file"], "--api-key-file is required"),
        (["--api-key-file", "/no/such/file"], "cannot read --api-key-file /no/such/file: No such file"),
        (["--api-key-file", "/dev/null"], "is empty"),
    ],
)
def test_launcher_refuses_to_serve_without_a_key(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mlx_launcher.main(arguments) == 1
    assert says in capsys.readouterr().err
