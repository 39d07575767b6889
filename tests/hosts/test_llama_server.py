"""Options of a service for llama.cpp, and the behaviour of its real server with them."""

import base64
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from controller.services.pods.pod_template import EngineChoice, MountedWeights, build_pod
from crds.metalprocess import Artifact
from devices.vendors import VENDORS
from tests.support.api_objects import as_service, service
from tests.support.engine_process import EngineProcess, start_engine
from tests.support.local_host import Machine, MakeAssignment, phase
from tests.support.tiny_models import tiny_companions, tiny_gguf
from tests.support.tiny_models.tiny_gguf import SENTENCE


def further(role: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "artifact": {"source": "file:///of-the-test.gguf"}, **fields}


async def metric(engine: EngineProcess, name: str) -> float:
    lines = (await engine.get("/metrics")).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"llamacpp:{name} "))


async def test_chat_is_answered_with_the_requested_context(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, contextLength=512, parallel=2) as engine:
        assert (await engine.ready()).reason == "Generated"
        assert await engine.says() == SENTENCE
        props = json.loads(await engine.get("/props"))
    assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (512, 2)


@pytest.mark.parametrize("cpu", ["1", "2"])
async def test_engine_of_a_pod_computes_with_as_many_threads_as_the_pod_requests_cpu(
    tmp_path: Path, tiny: Path, cpu: str
) -> None:
    chat = as_service(service(contextLength=512, resources={"cpu": cpu}))
    choice = EngineChoice("llama.cpp", "cpu", VENDORS["cpu"], "1Gi")
    pod = build_pod(chat, choice, MountedWeights("tiny-cache", tiny.name))
    threads = dict(itertools.pairwise(pod["initContainers"][0]["args"]))["-t"]
    async with start_engine(tmp_path, tiny, contextLength=512, extraArgs=["-lv", "4", "-t", threads]) as engine:
        await engine.ready()
        assert re.search(rf"n_threads = {cpu} \(n_threads_batch = {cpu}\)", engine.log)


async def test_a_text_as_long_as_the_context_is_embedded(tmp_path: Path, tiny: Path) -> None:
    extra = ["-t", "1", "--pooling", "mean"]
    async with start_engine(tmp_path, tiny, mode="embeddings", contextLength=1024, extraArgs=extra) as engine:
        assert (await engine.ready()).reason == "Embedded"
        # One token for each byte: more than the 512 that llama-server takes of a text by default.
        answer = await engine.ask("/v1/embeddings", input=["x" * 1000, "y"])
    first, second = (entry["embedding"] for entry in answer["data"])
    assert len(first) == 64
    assert first != second


async def test_model_that_cannot_embed_fails_at_once(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, mode="embeddings") as engine:
        result = await engine.ready()
    assert result.reason == "Broken"
    assert "answered 400: Pooling type 'none' is not OAI compatible" in result.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "embeddings"}, "set extraArgs to [--pooling, mean]"),
        ({"mode": "rerank"}, "would answer numbers without meaning"),
        ({"cache_type_k": "q8_0"}, "cacheTypeK q8_0 keeps blocks of 32 elements"),
    ],
)
async def test_process_that_the_header_of_its_weights_rules_out_is_not_started(
    machine: Machine, assignment: MakeAssignment, options: dict[str, str], says: str
) -> None:
    machine.supervisor.assign([assignment(**options)])
    assert says in await phase(machine, "Failed", "Unsupported")
    assert not list(machine.folder.rglob("*.log"))


async def test_engine_that_ends_says_its_first_error(machine: Machine, assignment: MakeAssignment) -> None:
    path = machine.file_root / "bad.gguf"
    tiny_gguf.write(path, template="{% for m in messages %}{% endif %}")
    machine.supervisor.assign([assignment(artifact=Artifact(source=f"file://{path}"))])
    assert "chat_templates_init: error: Unknown statement: endif" in await phase(machine, "Failed", "EngineExited")


async def test_documents_are_ranked(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, mode="rerank") as engine:
        assert (await engine.ready()).reason == "Ranked"
        answer = await engine.ask("/v1/rerank", query="Hi", documents=["Hi", "Ho", "Hu"])
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2]


async def test_tokens_of_a_draft_are_accepted(tmp_path: Path, tiny: Path) -> None:
    async with start_engine(tmp_path, tiny, [tiny], furtherArtifacts=[further("draft")], draftMaxTokens=4) as engine:
        await engine.ready()
        assert await engine.says() == SENTENCE
        answer = await engine.chat(max_tokens=40)
        assert await metric(engine, "spec_decode_num_accepted_tokens_total") > 0
    timings = answer["timings"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]


@pytest.mark.parametrize(("scale", "says"), [("1", "It was written"), ("0.25", "Hello from")])
async def test_adapter_changes_the_answer_by_its_scale(tmp_path: Path, tiny: Path, scale: str, says: str) -> None:
    adapter = tmp_path / "adapter.gguf"
    tiny_companions.write_adapter(adapter, first=8)
    parts = [further("adapter", scale=scale)]
    async with start_engine(tmp_path, tiny, [adapter], furtherArtifacts=parts) as engine:
        await engine.ready()
        assert (await engine.says()).strip().startswith(says)


async def test_two_adapters_are_applied_together(tmp_path: Path, tiny: Path) -> None:
    adapters = [tmp_path / "weak.gguf", tmp_path / "strong.gguf"]
    for path, first in zip(adapters, (3, 8), strict=True):
        tiny_companions.write_adapter(path, first=first)
    parts = [further("adapter", scale="0.5"), further("adapter", scale="1.5")]
    async with start_engine(tmp_path, tiny, adapters, furtherArtifacts=parts) as engine:
        await engine.ready()
        assert (await engine.says()).strip().startswith("It was written")
        scales = [load["scale"] for load in json.loads(await engine.get("/lora-adapters"))]
    assert scales == [0.5, 1.5]


async def test_a_chat_template_makes_the_prompt(tmp_path: Path, tiny: Path) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    async with start_engine(tmp_path, tiny, chatTemplate=template) as engine:
        await engine.ready()
        answer = await engine.ask("/apply-template", messages=[{"role": "user", "content": "Hi"}])
    assert answer["prompt"] == "<Hi>"


async def test_cache_has_the_requested_types(tmp_path: Path) -> None:
    model = tmp_path / "wide.gguf"
    tiny_gguf.write(model, n_embd=128)  # a block of a quantized cache is 32 values of one head
    async with start_engine(tmp_path, model, cacheTypeK="q8_0", cacheTypeV="q4_0") as engine:
        await engine.ready()
        assert await engine.says() == SENTENCE
        assert "K (q8_0)" in engine.log
        assert "V (q4_0)" in engine.log


async def test_image_is_read_with_a_projector(tmp_path: Path, tiny: Path) -> None:
    projector = tmp_path / "projector.gguf"
    tiny_companions.write_projector(projector)
    image = base64.b64encode(tiny_companions.png()).decode()
    seen: list[dict[str, Any]] = [
        {"type": "text", "text": "Hi"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    async with start_engine(tmp_path, tiny, [projector], furtherArtifacts=[further("projector")]) as engine:
        await engine.ready()
        blind, sighted = await engine.chat("Hi", max_tokens=1), await engine.chat(seen, max_tokens=1)
    # 28 by 28 pixels in patches of 14 are four tokens.
    assert sighted["usage"]["prompt_tokens"] - blind["usage"]["prompt_tokens"] == 4
