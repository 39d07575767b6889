"""Drafts, adapters and the other modes of an engine on both paths; and MLX weights on a host."""

from typing import Any

import aiohttp
import gguf
import pytest

from tests.cluster.main_job.cluster import CALL_TIMEOUT, GIB, PATHS, READY_SECONDS, Cluster, condition
from tests.controlplane.members import MetalHost
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_companions, tiny_gguf, tiny_mlx


async def post(cluster: Cluster, service: str, path: str, **body: Any) -> Any:
    url, token = (await cluster.urls(service))[0], await cluster.token(service)
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, timeout=CALL_TIMEOUT) as session,
        session.post(f"{url}{path}", json={"model": service, **body}) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("path", PATHS)
async def test_draft_and_adapter_are_served_with_the_model_and_each_mode_answers(cluster: Cluster, path: str) -> None:
    tiny_companions.write_adapter(cluster.files.root / "accent.gguf", first=8)
    tiny_companions.write_adapter(cluster.files.root / "tone.gguf", first=3)
    tiny_gguf.write(cluster.files.root / "embedder.gguf", pooling=gguf.PoolingType.MEAN)
    tiny_gguf.write(cluster.files.root / "ranker.gguf", pooling=gguf.PoolingType.RANK, scores=True)
    await cluster.apply(
        cluster.model(),
        cluster.model("small"),
        cluster.model("accent", file="accent.gguf"),
        cluster.model("tone", file="tone.gguf"),
        cluster.model("embedder", file="embedder.gguf"),
        cluster.model("ranker", file="ranker.gguf"),
        cluster.service(
            "chat",
            PATHS[path],
            contextLength=512,
            speculative={"draftModelRef": "small", "maxTokens": 4},
            adapters=[{"modelRef": "accent"}, {"modelRef": "tone", "scale": "3", "onRequest": True}],
        ),
        cluster.service("texts", PATHS[path], modelRef="embedder", mode="embeddings", contextLength=512),
        cluster.service("order", PATHS[path], modelRef="ranker", mode="rerank", contextLength=512),
        cluster.service("guess", PATHS[path], mode="rerank", contextLength=512),
    )
    await cluster.ready("chat", "texts", "order")
    senseless = await cluster.wait_for_phase("guess", "Failed", "InvalidSpec")
    assert "would answer numbers without meaning" in condition(senseless).message
    served = await cluster.get("chat")
    assert condition(served, "ModelReady").message == "Models tiny, small, accent, tone can be served"
    # With the adapter the model begins in the middle of its sentence.
    assert (await cluster.ask("chat")).text.strip().startswith("It was written")
    chosen = await post(cluster, "chat", "/v1/completions", model="chat:tone", prompt="Hi", max_tokens=2, temperature=0)
    assert (chosen["model"], chosen["choices"][0]["text"].strip()) == ("chat:tone", "tiny model")
    (embedded,) = (await post(cluster, "texts", "/v1/embeddings", input="Hi"))["data"]
    assert len(embedded["embedding"]) == 64
    ranked = await post(cluster, "order", "/v1/rerank", query="Hi", documents=["Hi", "Ho"])
    assert sorted(result["index"] for result in ranked["results"]) == [0, 1]

    await cluster.kubectl("delete", "mdl", "accent")
    refused = await cluster.wait_for_phase("chat", "Degraded", "ModelNotFound")
    assert "create it, or edit spec.adapters" in condition(refused).message
    assert (await cluster.ask("chat")).text.strip().startswith("It was written")


async def test_mlx_weights_are_served_by_mlx_lm_on_a_host_and_refused_in_pods(
    cluster: Cluster, host: MetalHost
) -> None:
    folder = host.file_root / "mlx"
    tiny_mlx.write(folder, text="The MLX model speaks.")
    model = cluster.model("mlx", memoryBytes=GIB)
    model["spec"]["source"] = f"file://{folder}/"
    tiny_mlx.write(cluster.files.root / "org" / "mlx")
    nowhere = cluster.model("mlx-hub")
    nowhere["spec"]["source"] = "hf://org/mlx"
    await cluster.apply(
        model,
        nowhere,
        cluster.service("chat", "metal", modelRef="mlx", extraArgs=["--temp", "0"], contextLength=512),
        cluster.service("in-pod", "cpu", modelRef="mlx-hub", extraArgs=[]),
        cluster.service("wrong", "metal", modelRef="mlx", extraArgs=["-t", "1"]),
    )

    async def refused_in_pods() -> bool:
        """Before the inspection, the folder may be one that an engine in pods serves."""
        refused = await cluster.wait_for_phase("in-pod", "Failed", "InvalidSpec")
        assert "runtime mlx-lm does not run in pods, where accelerator cpu is" in condition(refused).message
        return True

    await eventually(refused_in_pods, READY_SECONDS)
    refused = await cluster.wait_for_phase("wrong", "Failed", "InvalidSpec")
    assert "runtime mlx-lm does not take -t in extraArgs" in condition(refused).message

    await cluster.ready("chat")
    process = await cluster.process("chat")
    assert process.spec.runtime == "mlx-lm"
    answer = await post(cluster, "chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    # The engine uses another model name, which no client sees or needs.
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("chat", "The MLX model speaks.")
    assert {"llama.cpp", "mlx-lm"} <= set((await cluster.host(host.name)).status.runtimes)
