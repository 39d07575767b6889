"""The command line of llama-server: pure rendering, checked with the launcher that must accept it."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import xllamacpp
from msgspec import structs

from crds.serving import CacheType, Mode, ServingOptions
from crds.size import MIB
from crds.weights_header import Layers, Layout
from runtimes import llama_launcher, llama_server
from runtimes.serving import CompanionFile, Listen, Serving
from tests.unit.fitness.test_memory import QWEN3_8B

COMPANIONS = {
    "draft": [CompanionFile("draft", "/weights/draft.gguf")],
    "projector": [CompanionFile("projector", "/weights/eyes.gguf")],
    "adapters": [CompanionFile("adapter", "/weights/a.gguf", "0.5"), CompanionFile("adapter", "/weights/b.gguf")],
}
NO_WEB_PAGES = {"LLAMA_ARG_CORS_ORIGINS": "localhost", "LLAMA_ARG_CORS_CREDENTIALS": "0"}


def render(
    companions: tuple[str, ...] = (),
    *,
    on_device: bool = False,
    api_key_file: str | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> list[str]:
    """Return the arguments of a service with the companions of these names and four slots, each with 4096 tokens."""
    files = [file for name in companions for file in COMPANIONS[name]]
    stated = ServingOptions(**{"context_length": 4096, "parallel": 4} | options)
    serving = Serving("chat", "/weights/m.gguf", stated, files, draft_max_tokens=5, layout=layout, on_device=on_device)
    return llama_server.render_arguments(serving, Listen("0.0.0.0", 8080, api_key_file))


def test_context_length_is_multiplied_by_parallel() -> None:
    rendered = " ".join(render())
    assert "-c 16384 -np 4" in rendered
    assert "-m /weights/m.gguf --host 0.0.0.0 --port 8080 -a chat" in rendered


@pytest.mark.parametrize(("context_length", "cells"), [(4096, 8448), (8192, 16_640), (32_768, 41_216)])
def test_slots_share_one_context_and_some_more_if_parallel_is_unset(context_length: int, cells: int) -> None:
    parameters = llama_launcher.parse(render(parallel=None, context_length=context_length))
    assert (parameters.n_ctx, parameters.n_parallel, parameters.kv_unified) == (cells, 4, True)
    assert not llama_launcher.parse(render()).kv_unified
    alone = llama_launcher.parse(render(parallel=None, mode="embeddings"))
    assert (alone.n_ctx, alone.n_parallel, alone.kv_unified) == (4096, 1, False)


def test_prompt_cache_and_checkpoints_take_what_is_stated() -> None:
    layout = structs.replace(QWEN3_8B, layers=[*QWEN3_8B.layers, Layers(count=36, state_bytes=MIB)])
    options: dict[str, Any] = {"layout": layout, "context_length": 32_768, "parallel": None}
    remembering = llama_launcher.parse(render(prompt_cache="8Gi", **options))
    assert (remembering.cache_ram_mib, remembering.n_ctx_checkpoints) == (8192, 7)
    # A checkpoint of each of four slots takes 144 MiB, and all of them at most half of the prompt cache.
    less = llama_launcher.parse(render(prompt_cache="1200Mi", **options))
    assert (less.cache_ram_mib, less.n_ctx_checkpoints) == (1200, 4)


def test_unset_settings_render_no_arguments() -> None:
    assert "-ngl" not in render()
    assert "--api-key-file" not in render()


def test_extra_arguments_come_last_and_win() -> None:
    rendered = render(extra_args=["-c", "512", "-t", "1"])
    assert rendered[-4:] == ["-c", "512", "-t", "1"]
    assert llama_launcher.parse(rendered).n_ctx == 512


def test_threads_are_those_of_the_pod_unless_the_user_states_others() -> None:
    serving, listen = Serving("chat", "/weights/m.gguf", ServingOptions(), threads=3), Listen("127.0.0.1", 8080)
    parameters = llama_launcher.parse(llama_server.render_arguments(serving, listen))
    assert parameters.cpuparams.n_threads == 3
    stated = replace(serving, options=ServingOptions(extra_args=["-t", "1"]))
    assert llama_launcher.parse(llama_server.render_arguments(stated, listen)).cpuparams.n_threads == 1
    assert "-t" not in render(), "a host's own choice is its performance cores"


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize(
    "companions",
    [combination for number in range(4) for combination in itertools.combinations(COMPANIONS, number)],
    ids="+".join,
)
@pytest.mark.parametrize("on_device", [False, True], ids=["processor", "device"])
def test_launcher_accepts_every_rendered_argument(
    tmp_path: Path, mode: Mode, companions: tuple[str, ...], *, on_device: bool
) -> None:
    key = tmp_path / "token"
    key.write_text("secret\n")
    parameters = llama_launcher.parse(render(companions, on_device=on_device, api_key_file=str(key), mode=mode))
    assert parameters.model.path == "/weights/m.gguf"
    assert (parameters.hostnames, parameters.port, parameters.model_alias) == (["0.0.0.0"], 8080, {"chat"})
    assert (parameters.n_ctx, parameters.n_parallel) == (16384, 4)
    assert parameters.n_gpu_layers == (999 if on_device else -1)
    assert (parameters.api_keys, parameters.sse_ping_interval) == (["secret"], 1)
    assert (parameters.endpoint_metrics, parameters.ui, parameters.offline) == (True, False, True)
    assert not parameters.endpoint_slots
    assert (parameters.fit_params, parameters.cache_ram_mib) == (False, 0)
    assert parameters.n_ctx_checkpoints == 3
    check_mode(parameters, mode)
    check_companions(parameters, companions, on_device=on_device)


def test_adapter_on_request_is_loaded_and_not_applied() -> None:
    adapters = [CompanionFile("adapter", "/a", "0.5"), CompanionFile("adapter", "/b", "2", request_name="tone")]
    options = ServingOptions(context_length=4096, extra_args=["--cache-prompt"])
    for chosen, cache_prompt in ((adapters, False), (adapters[:1], True)):
        serving = Serving("chat", "/weights/m.gguf", options, chosen)
        parameters = llama_launcher.parse(llama_server.render_arguments(serving, Listen("0.0.0.0", 8080)))
        loaded = [(adapter.path, adapter.scale) for adapter in parameters.lora_adapters]
        assert loaded == [("/a", 0.5), ("/b", 0)][: len(chosen)]
        assert (parameters.cache_prompt, parameters.cache_ram_mib) == (cache_prompt, 0)


def check_mode(parameters: Any, mode: Mode) -> None:
    """Assert that the server answers the API of the mode."""
    ranks = parameters.pooling_type == xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    assert (parameters.embedding, ranks) == (mode != "chat", mode == "rerank")
    assert ((parameters.n_batch, parameters.n_ubatch) == (4096, 4096)) is (mode != "chat")


def check_companions(parameters: Any, companions: tuple[str, ...], *, on_device: bool) -> None:
    """Assert that the server gets exactly these companions."""
    assert parameters.mmproj.path == ("/weights/eyes.gguf" if "projector" in companions else "")
    adapters = [("/weights/a.gguf", 0.5), ("/weights/b.gguf", 1.0)] if "adapters" in companions else []
    assert [(adapter.path, adapter.scale) for adapter in parameters.lora_adapters] == adapters
    draft, kinds = parameters.speculative.draft, xllamacpp.common_speculative_type
    if "draft" in companions:
        assert (draft.mparams.path, draft.n_max) == ("/weights/draft.gguf", 5)
        assert parameters.speculative.types == [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        assert draft.n_gpu_layers == (999 if on_device else -1)
    else:
        assert draft.mparams.path == ""
        assert parameters.speculative.types == [kinds.COMMON_SPECULATIVE_TYPE_NONE]


@pytest.mark.parametrize("companions", [(), ("draft",)], ids=["alone", "draft"])
@pytest.mark.parametrize(("keys", "values"), list(itertools.product(get_args(CacheType), repeat=2)))
def test_cache_types_reach_the_model_and_its_draft(
    companions: tuple[str, ...], keys: CacheType, values: CacheType
) -> None:
    parameters = llama_launcher.parse(render(companions, cache_type_k=keys, cache_type_v=values))
    expected = tuple(getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache_type.upper()}") for cache_type in (keys, values))
    assert (parameters.cache_type_k, parameters.cache_type_v) == expected
    if companions:
        draft = parameters.speculative.draft
        assert (draft.cache_type_k, draft.cache_type_v) == expected


def test_chat_template_reaches_the_server_in_chats_only() -> None:
    assert llama_launcher.parse(render(chat_template="{{ messages }}")).chat_template == "{{ messages }}"
    assert "--chat-template" not in render(chat_template="{{ messages }}", mode="rerank")


def test_the_owners_environment_does_not_reach_the_server() -> None:
    owners = {
        "PATH": "/bin",
        "LLAMA_ARG_CTX_SIZE": "1",
        "LLAMA_API_KEY": "k",
        "LLAMA_CACHE": "/c",
        "HF_TOKEN": "t",
        "OLLAMA_HOST": "h",
    }
    assert llama_server.build_environment(owners, "linux") == {"PATH": "/bin", **NO_WEB_PAGES}


def test_weights_are_read_into_memory_on_a_mac() -> None:
    # Mapped weights are in no footprint: the agent would count them as the memory of other programs.
    kept_wired = "GGML_METAL_RESIDENCY_KEEP_ALIVE_S"
    child = llama_server.build_environment({"PATH": "/bin", "LLAMA_ARG_LOAD_MODE": "mmap"}, "darwin")
    assert child == {
        "PATH": "/bin",
        **NO_WEB_PAGES,
        "LLAMA_ARG_LOAD_MODE": "none",
        "LLAMA_ARG_NO_MMAP": "1",
        kept_wired: "86400",
    }
    # The owner's choice of the time that idle weights stay wired counts.
    assert llama_server.build_environment({kept_wired: "180"}, "darwin")[kept_wired] == "180"


def test_a_named_binary_is_preferred_to_path_and_path_to_the_wheel(tmp_path: Path) -> None:
    installed = tmp_path / "llama-server"
    installed.write_text("#!/bin/sh\necho 'version: 1 (0c1e570)' >&2\n")
    installed.chmod(0o755)
    on_path = {"PATH": str(tmp_path)}
    assert llama_server.find_command(on_path | {"LLAMA_SERVER_BIN": "/opt/llama-server"}) == ["/opt/llama-server"]
    assert llama_server.find_command(on_path) == [str(installed)]
    assert llama_server.find_command({"PATH": str(tmp_path / "empty")}) == [
        sys.executable,
        "-P",
        "-m",
        "runtimes.llama_launcher",
    ]


@pytest.mark.parametrize(
    ("says", "is_used"),
    [
        ("version: 99999999 (0c1e570)", True),
        ("version: b99999999", True),
        ("version: 4000 (0c1e570)", False),
        ("a version of its own", True),
        ("", False),
    ],
)
def test_a_binary_on_path_that_is_older_than_the_wheel_or_cannot_run_is_passed_over(
    tmp_path: Path, says: str, *, is_used: bool
) -> None:
    installed = tmp_path / "llama-server"
    installed.write_text(f"#!/bin/sh\n/bin/echo '{says}' >&2\n" if says else "#!/no/such/interpreter\n")
    installed.chmod(0o755)
    command = llama_server.find_command({"PATH": str(tmp_path)})
    assert command is not None
    assert (command == [str(installed)]) is is_used
