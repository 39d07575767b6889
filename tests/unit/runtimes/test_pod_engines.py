"""Engines in pods: all that is rendered is held against the options that the real package has."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from crds.serving import Mode, ServingOptions
from devices.vendors import VENDORS
from runtimes import ollama, sglang, tgi, vllm
from runtimes.pod import EnginePod, PodServing
from runtimes.registry import RUNTIMES
from runtimes.runtime import Runtime, RuntimeDemand
from runtimes.runtime_choice import refuse_demand
from runtimes.serving import Listen, Serving
from tests.support.pod_engines.dialects import DIALECTS, RECORDED, read_recording

ENGINES = {"vllm": vllm.RUNTIME, "sglang": sglang.RUNTIME, "tgi": tgi.RUNTIME}
RECORDINGS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "tgi": ("tgi",)}
PATH = "/models/artifact"


def pod_of(runtime: Runtime) -> EnginePod:
    assert runtime.pod is not None
    return runtime.pod


def rendered(
    engine: str,
    vendor: str,
    *,
    mode: Mode = "chat",
    devices: int = 0,
    extra: Sequence[str] = (),
    parallel: int | None = 4,
) -> list[str]:
    options = ServingOptions(context_length=8192, parallel=parallel, mode=mode, extra_args=[*extra])
    serving = Serving("chat", PATH, options)
    listen = Listen("127.0.0.1", 8080)
    return pod_of(ENGINES[engine]).arguments(PodServing(serving, listen, VENDORS[vendor], devices))


def all_rendered(engine: str) -> list[list[str]]:
    """Return the arguments for every vendor with an image and every mode, on one and eight devices, with and without a
    limit of requests.
    """
    runtime = ENGINES[engine]
    return [
        rendered(engine, vendor, mode=mode, devices=devices if VENDORS[vendor].resource else 0, parallel=parallel)
        for vendor, mode, devices, parallel in itertools.product(
            pod_of(runtime).images, sorted(runtime.modes), (1, 8), (None, 4)
        )
    ]


def check_options(argv: Sequence[str], recording: dict[str, Any]) -> None:
    """Assert that each argument is an option of the recording with as many values as it takes."""
    options, rest = recording["options"], list(argv)
    for _positional in recording["positional"]:
        assert not rest.pop(0).startswith("-")
    while rest:
        option = rest.pop(0)
        assert option in options, f"{recording['package']} {recording['version']} has no {option}"
        expected = options[option]
        if expected["values"] == 0:
            assert not rest or rest[0].startswith("-"), f"{option} takes no value"
            continue
        assert expected["values"] in (1, "+", "?")
        value = rest.pop(0)
        assert not value.startswith("-"), f"{option} needs a value"
        assert value in expected.get("choices", [value])


@pytest.mark.parametrize(
    ("engine", "recording"), [(name, recording) for name, recordings in RECORDINGS.items() for recording in recordings]
)
def test_every_rendered_argument_is_an_option_of_the_real_package(engine: str, recording: str) -> None:
    recorded = read_recording(recording)
    for argv in all_rendered(engine):
        check_options(argv, recorded)


@pytest.mark.parametrize(
    ("engine", "recording"), [(name, recording) for name, recordings in RECORDINGS.items() for recording in recordings]
)
def test_every_tuning_argument_is_an_option_with_at_most_one_value(engine: str, recording: str) -> None:
    options = read_recording(recording)["options"]
    for argument in ENGINES[engine].tuning:
        # One that takes several would take what follows it, too.
        assert options[argument]["values"] in (0, 1)


def test_every_variable_of_ollama_is_one_that_its_image_reads() -> None:
    recording, pod = read_recording("ollama"), pod_of(ollama.RUNTIME)
    serving = Serving("chat", "ollama://qwen3:8b", ServingOptions())
    names = set[str]()
    for vendor, image in pod.images.items():
        assert image.rpartition(":")[2].partition("-")[0] == recording["version"].removeprefix("v")
        devices = 1 if VENDORS[vendor].resource else 0
        variables = pod.environment(PodServing(serving, Listen("127.0.0.1", 11434), VENDORS[vendor], devices))
        names |= {variable for variable in variables if variable.startswith("OLLAMA_")}
    assert {"OLLAMA_HOST", "OLLAMA_VULKAN"} <= names
    assert names - set(recording["variables"]) == set()


def test_check_finds_what_the_real_parser_refuses() -> None:
    recording = read_recording("vllm")
    for wrong in (["--no-such-option"], ["--enable-prefix-caching", "true"], ["--max-model-len"], ["--runner", "x"]):
        with pytest.raises((AssertionError, IndexError)):
            check_options([PATH, *wrong], recording)


@pytest.mark.parametrize("engine", ENGINES)
def test_tuning_arguments_open_no_file_no_network_and_no_code(engine: str) -> None:
    parts = (
        *("path", "dir", "file", "plugin", "trust", "remote", "host", "port", "key", "url", "endpoint", "download"),
        *("template", "lora", "middleware", "config", "log", "model", "tokenizer", "ssl", "cors", "served", "hook"),
    )
    harmless = {"--max-logprobs", "--waiting-served-ratio", "--disable-grammar-support"}
    for argument in ENGINES[engine].tuning:
        assert argument in harmless or not any(part in argument for part in parts), argument


@pytest.mark.parametrize("engine", ENGINES)
def test_arguments_that_decide_memory_and_address_are_not_for_users(engine: str) -> None:
    runtime = ENGINES[engine]
    for vendor, mode in itertools.product(pod_of(runtime).images, sorted(runtime.modes)):
        devices = 2 if VENDORS[vendor].resource else 0
        own = {
            argument for argument in rendered(engine, vendor, mode=mode, devices=devices) if argument.startswith("-")
        }
        assert not own & set(runtime.tuning)


def test_vllm_gets_model_name_address_context_and_parallel_requests() -> None:
    assert rendered("vllm", "nvidia", devices=1) == [
        *(PATH, "--served-model-name", "chat", "--host", "127.0.0.1", "--port", "8080"),
        *("--max-model-len", "8192", "--max-num-seqs", "4", "--runner", "generate"),
    ]
    assert rendered("vllm", "nvidia", devices=8)[-2:] == ["--tensor-parallel-size", "8"]
    assert rendered("vllm", "nvidia", mode="rerank")[-2:] == ["--runner", "pooling"]
    assert rendered("vllm", "nvidia", extra=["--enforce-eager"])[-1] == "--enforce-eager"


def test_vllm_on_the_processor_is_told_the_size_of_its_cache() -> None:
    serving = Serving("chat", PATH, ServingOptions())
    pod = PodServing(serving, Listen("127.0.0.1", 8080), VENDORS["cpu"], cache_bytes=3 << 30)
    assert vllm.render_arguments(pod)[-2:] == ["--kv-cache-memory-bytes", str(3 << 30)]
    assert "--kv-cache-memory-bytes" in vllm.render_arguments(pod._replace(cache_bytes=None))
    assert "--kv-cache-memory-bytes" not in rendered("vllm", "nvidia", devices=1)


def test_sglang_shows_its_metrics_and_divides_the_model_among_devices() -> None:
    argv = rendered("sglang", "nvidia", devices=4, mode="embeddings")
    assert {"--enable-metrics", "--is-embedding"} <= set(argv)
    assert argv[-2:] == ["--tensor-parallel-size", "4"]


@pytest.mark.parametrize(
    ("engine", "limit"),
    [("vllm", "--max-num-seqs"), ("sglang", "--max-running-requests"), ("tgi", "--max-batch-size")],
)
def test_unset_parallel_leaves_the_limit_to_the_engine(engine: str, limit: str) -> None:
    assert limit in rendered(engine, "nvidia", devices=1)
    assert limit not in rendered(engine, "nvidia", devices=1, parallel=None)
    # vLLM warms up for each number of requests on Gaudi, for hours.
    if engine == "vllm":
        argv = rendered(engine, "intel-gaudi", devices=1, parallel=None)
        assert argv[argv.index(limit) + 1] == "128"


def test_prefill_of_tgi_takes_the_longest_prompt() -> None:
    argv = rendered("tgi", "nvidia", devices=2)
    values = dict(zip(argv[::2], argv[1::2], strict=True))
    assert int(values["--max-input-tokens"]) < int(values["--max-total-tokens"]) == 8192
    assert int(values["--max-input-tokens"]) <= int(values["--max-batch-prefill-tokens"])
    assert values["--max-batch-size"] == "4"
    assert (values["--num-shard"], values["--usage-stats"]) == ("2", "off")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_downloads_and_all_write_to_the_volume_of_the_pod(engine: str) -> None:
    pod = pod_of(ENGINES[engine])
    serving = PodServing(Serving("chat", PATH, ServingOptions()), Listen("127.0.0.1", 8080), VENDORS["nvidia"], 1)
    variables = pod.environment(serving)
    assert (variables["HF_HUB_OFFLINE"], variables["HOME"]) == ("1", "/tmp")
    # They are not valid, or show a pod the devices of others.
    assert not {"HIP_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(variables)
    assert "VLLM_NO_USAGE_STATS" in variables or engine != "vllm"


@pytest.mark.parametrize(("threads", "of_model"), [(8, "7"), (1, "1")])
def test_vllm_on_the_processor_has_the_threads_of_its_pod_with_one_for_its_scheduler(
    threads: int, of_model: str
) -> None:
    serving, listen = Serving("chat", PATH, ServingOptions(), threads=threads), Listen("127.0.0.1", 8080)
    variables = vllm.build_environment(PodServing(serving, listen, VENDORS["cpu"]))
    assert (variables["OMP_NUM_THREADS"], variables["VLLM_CPU_OMP_THREADS_BIND"]) == (of_model, "nobind")
    assert "OMP_NUM_THREADS" not in vllm.build_environment(PodServing(serving, listen, VENDORS["nvidia"], 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_key_is_no_argument(engine: str) -> None:
    assert not [argument for argv in all_rendered(engine) for argument in argv if "key" in argument]


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_are_those_of_the_real_engine(engine: str) -> None:
    names, types = pod_of(ENGINES[engine]).metrics, DIALECTS[engine].read_metrics()
    assert names is not None
    kinds = {
        "gauge": (names.requests_running, names.requests_waiting, names.cache_usage),
        "counter": (names.prompt_tokens, names.generated_tokens, names.requests),
        "histogram": (names.first_token_seconds, names.request_seconds),
    }
    for kind, wanted in kinds.items():
        for name in filter(None, wanted):
            # The sum of a histogram counts, too.
            assert types.get(name) == kind or types.get(name.removesuffix("_sum")) == "histogram"


def test_every_image_has_a_version() -> None:
    for runtime in ENGINES.values():
        for image in pod_of(runtime).images.values():
            tag = image.rpartition(":")[2]
            assert any(letter.isdigit() for letter in tag)
            assert "latest" not in tag


def test_frozen_engine_warns() -> None:
    assert "no more" in str(pod_of(tgi.RUNTIME).warning)
    assert pod_of(vllm.RUNTIME).warning is pod_of(sglang.RUNTIME).warning is None


@pytest.mark.parametrize(
    ("engine", "change", "says"),
    [
        ("vllm", {"format": "gguf"}, "cannot serve a GGUF file: set runtime to llama.cpp"),
        ("vllm", {"accelerator": "intel-gaudi"}, "has no image for accelerator intel-gaudi: set hardware.accelerator"),
        ("tgi", {"accelerator": "metal", "in_pods": False}, "runs in pods only, and accelerator metal is outside"),
        ("tgi", {"options": ServingOptions(mode="embeddings")}, "has no mode embeddings: use chat"),
        (
            "sglang",
            {"options": ServingOptions(extra_args=["--trust-remote-code"])},
            "does not take --trust-remote-code",
        ),
        ("vllm", {"options": ServingOptions(extra_args=["--chat-template=/x"])}, "does not take --chat-template=/x"),
        (
            "vllm",
            {"options": ServingOptions(extra_args=["--enable-chunked-prefill", "true"])},
            "extraArgs has true after --enable-chunked-prefill, which takes no value: remove true",
        ),
        ("vllm", {"options": ServingOptions(extra_args=["--seed"])}, "--seed in extraArgs has no value: write one"),
        *(
            (
                engine,
                {"options": ServingOptions(extra_args=["--load-format", value])},
                "--load-format in extraArgs takes auto, safetensors, fastsafetensors, instanttensor, runai_streamer:",
            )
            for engine in ("vllm", "sglang")
            for value in ("dummy", "pt", "modelexpress", "ipc_cache", "remote", "remote_instance", "private")
        ),
        (
            "vllm",
            {"options": ServingOptions(extra_args=["--model-loader-extra-config", '{"tensorizer_uri": "http://x"}'])},
            "does not take --model-loader-extra-config in extraArgs",
        ),
        ("tgi", {"options": ServingOptions(extra_args=["--dtype", "--speculate", "2"])}, "--dtype in extraArgs has no"),
        ("vllm", {"options": ServingOptions(extra_args=["7"])}, "extraArgs has 7 without an option: remove 7"),
        ("vllm", {"options": ServingOptions(chat_template="{{ messages }}")}, "cannot do chatTemplate"),
        ("vllm", {"options": ServingOptions(prompt_cache="1Gi")}, "cannot do promptCache: remove it"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused(engine: str, change: dict[str, Any], says: str) -> None:
    demand = RuntimeDemand("safetensors", "nvidia", in_pods=True)
    assert refuse_demand(RUNTIMES[engine], demand) is None
    refused = refuse_demand(RUNTIMES[engine], demand._replace(**change))
    assert refused is not None
    assert says in refused


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi"])
def test_switches_are_those_of_the_engines_own_options(engine: str) -> None:
    options, runtime = read_recording(engine)["options"], RUNTIMES[engine]
    assert runtime.switches == {option for option in runtime.tuning if options[option]["values"] == 0}


def test_number_below_zero_is_a_value() -> None:
    demand = RuntimeDemand("gguf", "cpu", in_pods=True, options=ServingOptions(extra_args=["-s", "-1", "--no-jinja"]))
    assert refuse_demand(RUNTIMES["llama.cpp"], demand) is None


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_every_recording_says_how_and_of_which_version_it_was_made(path: Any) -> None:
    recording = json.loads(path.read_text())
    assert recording["how"]
    assert recording["package"]
    assert any(letter.isdigit() for letter in recording["version"])
