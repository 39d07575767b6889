"""The command line of llama-server: pure rendering, checked with the launcher that must accept it."""

import itertools
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import xllamacpp

from crds.serving import CacheType, Mode, ServingOptions
from runtimes import llama_launcher, llama_server
from runtimes.serving import CompanionFile, Listen, Serving

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
    **options: Any,
) -> list[str]:
    """Return the arguments of a service with the companions of these names and four slots, each with 4096 tokens."""
    files = [file for name in companions for file in COMPANIONS[name]]
    stated = ServingOptions(context_length=4096, parallel=4, **options)
    serving = Serving("chat", "/weights/m.gguf", stated, files, draft_max_tokens=5, on_device=on_device)
    return llama_server.render_arguments(serving, Listen("0.0.0.0", 8080, api_key_file))


def test_context_length_is_multiplied_by_parallel() -> None:
    rendered = " ".join(render())
    assert "-c 16384 -np 4" in rendered
    assert "-m /weights/m.gguf --host 0.0.0.0 --port 8080 -a chat" in rendered


def test_unset_settings_render_no_arguments() -> None:
    assert "-ngl" not in render()
    assert "--api-key-file" not in render()


def test_extra_arguments_come_last_and_win() -> None:
    rendered = render(extra_args=["-c", "512", "-t", "1"])
    assert rendered[-4:] == ["-c", "512", "-t", "1"]
    assert llama_launcher.parse(rendered).n_ctx == 512


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
    assert parameters.n_ctx_checkpoints == llama_server.CHECKPOINTS
    check_mode(parameters, mode)
    check_companions(parameters, companions, on_device=on_device)


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
