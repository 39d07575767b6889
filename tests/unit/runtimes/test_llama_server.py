"""The command line of llama-server: pure rendering, checked with the launcher that must accept it."""

import sys
from pathlib import Path

import pytest

from crds.serving import ServingOptions
from runtimes import llama_launcher, llama_server
from runtimes.serving import Listen, build_serving

NO_WEB_PAGES = {"LLAMA_ARG_CORS_ORIGINS": "localhost", "LLAMA_ARG_CORS_CREDENTIALS": "0"}


def render(*, on_device: bool = False, api_key_file: str | None = None, extra: tuple[str, ...] = ()) -> list[str]:
    options = ServingOptions(context_length=4096, parallel=4, extra_args=list(extra))
    serving = build_serving("chat", "/weights/m.gguf", options, on_device=on_device)
    return llama_server.render_arguments(serving, Listen("0.0.0.0", 8080, api_key_file))


def test_context_length_is_multiplied_by_parallel() -> None:
    rendered = " ".join(render())
    assert "-c 16384 -np 4" in rendered
    assert "-m /weights/m.gguf --host 0.0.0.0 --port 8080 -a chat" in rendered


def test_unset_settings_render_no_arguments() -> None:
    assert "-ngl" not in render()
    assert "--api-key-file" not in render()


def test_extra_arguments_come_last_and_win() -> None:
    rendered = render(extra=("-c", "512", "-t", "1"))
    assert rendered[-4:] == ["-c", "512", "-t", "1"]
    assert llama_launcher.parse(rendered).n_ctx == 512


def test_launcher_accepts_every_rendered_argument(tmp_path: Path) -> None:
    key = tmp_path / "token"
    key.write_text("secret\n")
    parameters = llama_launcher.parse(render(on_device=True, api_key_file=str(key)))
    assert parameters.model.path == "/weights/m.gguf"
    assert (parameters.hostnames, parameters.port, parameters.model_alias) == (["0.0.0.0"], 8080, {"chat"})
    assert (parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers) == (16384, 4, 999)
    assert (parameters.api_keys, parameters.sse_ping_interval) == (["secret"], 1)
    assert (parameters.endpoint_metrics, parameters.ui, parameters.offline) == (True, False, True)


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
