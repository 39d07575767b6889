"""An engine is recognised by what it serves and how, never by what it is called."""

from typing import Any

import pytest

from crds.metalprocess import Artifact, FurtherArtifact, MetalProcessSpec
from metal_agent.assignments import Assignment
from metal_agent.claims import fingerprint, match, needs_room
from tests.serving import GIB

SPEC = MetalProcessSpec(
    service_name="chat",
    model_name="tiny",
    runtime="llama.cpp",
    artifact=Artifact(source="hf://org/repo/m.gguf", revision="c0ffee", sha256="a" * 64),
    memory_bytes=GIB,
    token_secret="chat-token",
)


def spec(**changes: Any) -> MetalProcessSpec:
    fields = {name: getattr(SPEC, name) for name in SPEC.__struct_fields__}
    return MetalProcessSpec(**(fields | changes))


def assignment(uid: str, **changes: Any) -> Assignment:
    return Assignment(uid, "team", uid, spec(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"service_name": "talk", "model_name": "other", "token_secret": "talk-token"},
        {"memory_bytes": 2 * GIB, "priority": "high", "host_name": "studio-1", "source_secret": "hub"},
        {"artifact": Artifact(source="https://mirror.example/m.gguf", revision="etag", sha256="a" * 64, size_bytes=7)},
    ],
    ids=["names", "place", "source of the same bytes"],
)
def test_what_the_cluster_calls_it_makes_no_other_engine(changes: dict[str, Any]) -> None:
    assert fingerprint(spec(**changes)) == fingerprint(SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"artifact": Artifact(source=SPEC.artifact.source, revision="c0ffee", sha256="b" * 64)},
        {"artifact": Artifact(source=SPEC.artifact.source, revision="c0ffee")},
        {"runtime": "ollama"},
        {"context_length": 8192},
        {"parallel": 2},
        {"cache_type_k": "q8_0"},
        {"extra_args": ["-t", "1"]},
        {"mode": "embeddings"},
        {"chat_template": "{{ 1 }}"},
        {"further_artifacts": [FurtherArtifact(role="draft", artifact=Artifact(source="hf://a/b/c.gguf"))]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_weights_and_other_arguments_are_another_engine(changes: dict[str, Any]) -> None:
    assert fingerprint(spec(**changes)) != fingerprint(SPEC)


def test_without_a_digest_the_source_and_its_revision_tell() -> None:
    one = Artifact(source="https://a.example/m.gguf", revision="1")
    assert fingerprint(spec(artifact=one)) == fingerprint(spec(artifact=Artifact(source=one.source, revision="1")))
    assert fingerprint(spec(artifact=one)) != fingerprint(spec(artifact=Artifact(source=one.source, revision="2")))


def test_each_engine_is_claimed_once_and_by_its_own_name_first() -> None:
    running = {"standalone-1": spec(service_name="other"), "standalone-2": SPEC}
    assert match(running, [assignment("u1")]) == {"standalone-2": assignment("u1")}
    assert set(match(running, [assignment("u1"), assignment("u2"), assignment("u3")])) == set(running)
    assert match(running, [assignment("u1", parallel=4)]) == {}


def test_what_is_being_deleted_or_cannot_be_read_claims_nothing() -> None:
    gone = Assignment("u1", "team", "u1", SPEC, deleted=True)
    assert match({"standalone-1": SPEC}, [gone, Assignment("u2", "team", "u2", None)]) == {}


def test_room_is_needed_where_not_all_fits() -> None:
    wanted = [assignment("u1"), assignment("u2"), Assignment("u3", "team", "u3", None)]
    assert not needs_room(wanted, 2 * GIB)
    assert needs_room(wanted, 2 * GIB - 1)
    assert not needs_room([], 0)
