"""`refreshPolicy: OnChange` of a registry's tag and of a bucket: the controller's Jobs, run on real servers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path

from controller.models import refresh
from controller.models.jobs import TERMINATION_LOG
from controller.models.volume import MODELS_PATH
from crds.cache import CachedWeights
from crds.meta import SecretReference
from tests.support.registry_artifacts import build_artifact, push
from tests.support.servers.registry import serve_registry
from tests.support.servers.s3 import run_s3_server
from tests.support.simulated_model import SimulatedModel
from tests.support.tiny_models import tiny_gguf
from tests.unit.artifacts.pomona_call import run_pomona

BUCKET = "models"


async def run_job(simulated: SimulatedModel, verb: str, volume: Path, environment: Mapping[str, str]) -> None:
    """Run the only Job of this verb as a process, with its volume at `volume`, and let the Model see its end."""
    result = volume / "result.json"
    (container,) = simulated.job(verb)["spec"]["template"]["spec"]["containers"]
    arguments = [str(result) if argument == TERMINATION_LOG else argument for argument in container["args"]]
    arguments = [
        f"{volume}{argument.removeprefix(MODELS_PATH)}" if argument.startswith(f"{MODELS_PATH}/") else argument
        for argument in arguments
    ]
    ran = await run_pomona(*arguments, "--allow-private-sources", "127.0.0.0/8", no_proxy="*", **environment)
    assert ran.code == 0, ran.err
    simulated.end(verb, ran.code, await asyncio.to_thread(result.read_text))
    simulated.settle()


async def follow_change(
    simulated: SimulatedModel,
    publish: Callable[[bytes], Awaitable[object]],
    volume: Path,
    environment: Mapping[str, str],
) -> None:
    """Publish weights, and others after they are cached; the next look finds these and fetches them beside the first.

    A look at a source that did not change fetches nothing.
    """
    await asyncio.to_thread(volume.mkdir)
    held: list[tuple[CachedWeights, bytes]] = []
    simulated.add_consumer()
    simulated.settle()
    for name in ("first", "first", "second"):
        tiny_gguf.write(volume / "published.gguf", name=name)
        content = await asyncio.to_thread((volume / "published.gguf").read_bytes)
        is_new = not held or held[-1][1] != content
        if is_new:
            await publish(content)
        if held:
            simulated.now += timedelta(seconds=refresh.wait_seconds(simulated.model, simulated.now))
            simulated.settle()
        await run_job(simulated, "inspect", volume, environment)
        if is_new:
            await run_job(simulated, "fetch", volume, environment)
        cached = simulated.model.status.cached
        assert cached is not None
        assert await asyncio.to_thread((volume / cached.path).read_bytes) == content
        assert simulated.condition("Refreshed").reason == ("RevisionChanged" if held and is_new else "UpToDate")
        assert is_new == (cached not in [weights for weights, _content in held])
        held.append((cached, content))
    assert simulated.condition("Ready").status == "True"


async def test_moved_tag_is_fetched_beside_the_earlier_artifact(tmp_path: Path) -> None:
    async with serve_registry(tmp_path / "registry") as url:

        async def publish(weights: bytes) -> None:
            await push(url, "acme/tiny", "nightly", build_artifact({"tiny.gguf": weights}))

        source = f"oci://{url.removeprefix('http://')}/acme/tiny:nightly"
        simulated = SimulatedModel(source=source, files=["*.gguf"], refresh_policy="OnChange")
        await follow_change(simulated, publish, tmp_path / "volume", {})


async def test_replaced_object_is_fetched_beside_the_earlier_one(tmp_path: Path) -> None:
    async with run_s3_server(tmp_path / "s3") as server:
        await server.make_bucket(BUCKET)

        async def publish(weights: bytes) -> None:
            await server.put(BUCKET, "nightly/tiny.gguf", weights)

        for source, files in (("s3://models/nightly/tiny.gguf", []), ("s3://models/nightly/", ["*.gguf"])):
            simulated = SimulatedModel(
                source=source, files=files, refresh_policy="OnChange", source_secret_ref=SecretReference(name="bucket")
            )
            volume = tmp_path / ("folder" if files else "file")
            await follow_change(simulated, publish, volume, server.environment())
