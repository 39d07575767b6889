"""The hand-over matches engines that serve the same weights in the same way, whatever their names are."""

from typing import Any

import msgspec
import pytest

from crds.metalprocess import Artifact, FurtherArtifact, MetalProcessSpec
from metal_agent.assignments import UNREADABLE, Assignment
from metal_agent.supervise.handover import exceeds_memory, fingerprint_engine, match_engines
from tests.support.api_objects import GIB

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
def test_names_and_place_do_not_change_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint_engine(spec(**changes)) == fingerprint_engine(SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"artifact": Artifact(source=SPEC.artifact.source, revision="c0ffee", sha256="b" * 64)},
        {"artifact": Artifact(source=SPEC.artifact.source, revision="c0ffee")},
        {"runtime": "ollama"},
        {"context_length": 8192},
        {"parallel": 2},
        {"prompt_cache": "1Gi"},
        {"cache_type_k": "q8_0"},
        {"extra_args": ["-t", "1"]},
        {"mode": "embeddings"},
        {"chat_template": "{{ 1 }}"},
        {"further_artifacts": [FurtherArtifact(role="draft", artifact=Artifact(source="hf://a/b/c.gguf"))]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_weights_and_arguments_change_the_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint_engine(spec(**changes)) != fingerprint_engine(SPEC)


def test_stated_default_does_not_change_the_engine() -> None:
    stated = {"mode": "chat", "cacheTypeK": "f16", "cacheTypeV": "f16", "extraArgs": []}
    read = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(SPEC) | stated), type=MetalProcessSpec)
    assert fingerprint_engine(read) == fingerprint_engine(SPEC)


def test_source_and_revision_identify_weights_without_digest() -> None:
    one = Artifact(source="https://a.example/m.gguf", revision="1")
    assert fingerprint_engine(spec(artifact=one)) == fingerprint_engine(
        spec(artifact=Artifact(source=one.source, revision="1"))
    )
    assert fingerprint_engine(spec(artifact=one)) != fingerprint_engine(
        spec(artifact=Artifact(source=one.source, revision="2"))
    )


def test_engine_is_claimed_once_and_first_by_its_own_service() -> None:
    running = {"standalone-1": spec(service_name="other"), "standalone-2": SPEC}
    assert match_engines(running, [assignment("u1")]) == {"standalone-2": assignment("u1")}
    assert set(match_engines(running, [assignment("u1"), assignment("u2"), assignment("u3")])) == set(running)
    assert match_engines(running, [assignment("u1", parallel=4)]) == {}


def test_deleted_or_unreadable_assignment_claims_nothing() -> None:
    gone = Assignment("u1", "team", "u1", SPEC, deleted=True)
    assert match_engines({"standalone-1": SPEC}, [gone, Assignment("u2", "team", "u2", UNREADABLE)]) == {}


def test_room_is_needed_if_not_all_assignments_fit() -> None:
    wanted = [assignment("u1"), assignment("u2"), Assignment("u3", "team", "u3", UNREADABLE)]
    assert not exceeds_memory(wanted, 2 * GIB)
    assert exceeds_memory(wanted, 2 * GIB - 1)
    assert not exceeds_memory([], 0)
