"""Weights of a real engine: fetched by content, and pinned by the engine itself while its agent is dead."""

import hashlib
from pathlib import Path

from msgspec.structs import replace

from controller.models.served import Companion, Served
from controller.services.metal_processes import build_process_spec
from crds.metalprocess import Artifact, FurtherArtifact
from metal_agent.native.process import identify_process
from metal_agent.weights import HostWeights
from tests.support.api_objects import GIB, as_model, as_service, model, service
from tests.support.file_server import ALLOWED_NETWORKS, FileServer
from tests.support.local_host import Machine, MakeAssignment, phase, ready
from tests.support.tiny_models import tiny_gguf


async def test_engine_pins_its_weights_while_no_agent_runs(
    machine: Machine, assignment: MakeAssignment, tmp_path: Path
) -> None:
    www = tmp_path / "www"
    www.mkdir()
    tiny_gguf.write(www / "tiny.gguf")
    digest = hashlib.sha256((www / "tiny.gguf").read_bytes()).hexdigest()
    async with FileServer(www) as server:
        artifact = Artifact(source=f"{server.url}/tiny.gguf", sha256=digest)
        machine.supervisor.assign([assignment(artifact=artifact), assignment("u2", artifact=artifact)])
        pids = [await ready(machine), await ready(machine, "u2")]
        assert len(server.seen("/tiny.gguf")) == 1, "fetched once for both"
    store = HostWeights(machine.folder / "weights", None, ALLOWED_NETWORKS).store
    await machine.stop()
    assert [weights.in_use for weights in store.stored()] == [True]
    assert not store.remove(digest)

    await machine.start()
    assert [await ready(machine), await ready(machine, "u2")] == pids
    machine.supervisor.assign([])
    for uid in ("u1", "u2"):
        await phase(machine, "Stopped", uid=uid)
    assert [identify_process(pid) for pid in pids] == [None, None]
    assert [weights.in_use for weights in store.stored()] == [False]
    assert store.remove(digest)


async def test_memory_that_is_understated_for_a_fetched_file_is_refused(
    machine: Machine, assignment: MakeAssignment, tmp_path: Path
) -> None:
    www = tmp_path / "www"
    www.mkdir()
    tiny_gguf.write(www / "tiny.gguf")
    async with FileServer(www) as server:
        artifact = Artifact(source=f"{server.url}/tiny.gguf")
        machine.supervisor.assign([assignment(artifact=artifact, memory_bytes=1)])
        message = await phase(machine, "Rejected", "MemoryUnderstated")
        assert "raise spec.memoryBytes of Model" in message
        needed = int(message.rpartition(" to ")[2].split()[0])

        machine.supervisor.assign([assignment("u2", artifact=artifact, memory_bytes=needed)])
        await ready(machine, "u2")


async def test_fetched_weights_are_pinned_while_others_cannot_be_fetched(
    machine: Machine, assignment: MakeAssignment, tmp_path: Path
) -> None:
    www = tmp_path / "www"
    www.mkdir()
    tiny_gguf.write(www / "tiny.gguf")
    async with FileServer(www) as server:
        draft = FurtherArtifact(role="draft", artifact=Artifact(source=f"{server.url}/none.gguf"))
        wanted = assignment(artifact=Artifact(source=f"{server.url}/tiny.gguf"), further_artifacts=[draft])
        machine.supervisor.assign([wanted])
        await phase(machine, "Failed", "SourceNotFound")
        store = HostWeights(machine.folder / "weights", None, ALLOWED_NETWORKS).store
        assert [weights.in_use for weights in store.stored()] == [True]
        machine.supervisor.assign([])
        await phase(machine, "Stopped")
        assert [weights.in_use for weights in store.stored()] == [False]


async def test_secret_of_a_model_is_the_token_by_which_a_host_fetches_its_weights(
    machine: Machine, assignment: MakeAssignment, tmp_path: Path
) -> None:
    """From the fields of two Models, one the draft of the other, over their process, to what the server is sent."""
    www = tmp_path / "www"
    www.mkdir()
    for name in ("tiny.gguf", "draft.gguf"):
        tiny_gguf.write(www / name)
    machine.secrets |= {("team-a", "hub"): "hub-token", ("team-a", "drafts"): "drafts-token"}
    async with FileServer(www) as server:
        unread = {"revision": "", "sha256": "", "sizeBytes": None}
        tiny = model(source=f"{server.url}/tiny.gguf", sourceSecretRef={"name": "hub"}, status=unread)
        draft = model(source=f"{server.url}/draft.gguf", sourceSecretRef={"name": "drafts"}, status=unread)
        companion = Companion("draft", "speculative.draftModelRef", "draft", model=as_model(draft))
        served = Served(as_model(tiny), "llama.cpp", (companion,))
        spec = build_process_spec(as_service(service()), served, GIB // 2)
        machine.supervisor.assign([replace(assignment(), spec=spec)])
        await ready(machine)
        sent = {
            path: {request.authorization for request in server.seen(path)} for path in ("/tiny.gguf", "/draft.gguf")
        }
    assert sent == {"/tiny.gguf": {"Bearer hub-token"}, "/draft.gguf": {"Bearer drafts-token"}}
