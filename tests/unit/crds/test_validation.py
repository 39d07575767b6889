"""Validation without an API server refuses the same manifests with the same text; tests/cluster/crds has the server."""

import json
import re
from typing import Any

import pytest

from crds import validation
from kube.resources import INFERENCE_SERVICES, MODELS, Resource
from tests.support.refused_manifests import (
    DEFAULTS,
    GOOD_ARGUMENTS,
    NULLS,
    REFUSED_MANIFESTS,
    SPECS,
    RefusedManifest,
    make_manifest,
)


@pytest.mark.parametrize("bad", REFUSED_MANIFESTS.values(), ids=REFUSED_MANIFESTS.keys())
def test_bad_manifest_is_refused_with_the_way_out(bad: RefusedManifest) -> None:
    said = "\n".join(map(str, validation.problems(bad.manifest())))
    assert re.search(bad.says, said), said


@pytest.mark.parametrize("resource", SPECS, ids=lambda resource: resource.kind)
def test_good_manifest_is_accepted(resource: Resource) -> None:
    assert validation.problems(make_manifest(resource)) == []


def test_tuning_arguments_are_accepted() -> None:
    assert validation.problems(make_manifest(INFERENCE_SERVICES, extraArgs=GOOD_ARGUMENTS)) == []


@pytest.mark.parametrize("resource", DEFAULTS, ids=lambda resource: resource.kind)
def test_defaults_are_filled_in(resource: Resource) -> None:
    manifest = make_manifest(resource)
    assert validation.with_defaults(manifest)["spec"] == SPECS[resource] | DEFAULTS[resource]
    assert manifest["spec"] == SPECS[resource], "the user's own manifest stays as it is"


@pytest.mark.parametrize("nulls", NULLS, ids=lambda nulls: next(iter(nulls)))
def test_null_counts_as_absent(nulls: dict[str, Any]) -> None:
    manifest = make_manifest(INFERENCE_SERVICES)
    manifest["spec"] |= nulls
    assert validation.problems(manifest) == []
    filled = validation.with_defaults(manifest)["spec"]
    assert filled["replicas"] == 1
    assert "null" not in json.dumps(filled)


def test_null_does_not_satisfy_a_required_field() -> None:
    manifest = make_manifest(INFERENCE_SERVICES)
    manifest["spec"]["modelRef"] = None
    assert [*map(str, validation.problems(manifest))] == ["spec.modelRef: Required value"]


def test_all_violations_are_reported_with_their_fields() -> None:
    violations = validation.problems(make_manifest(INFERENCE_SERVICES, replicas=-1, parallel=4097))
    assert [violation.path for violation in violations] == [("spec", "parallel"), ("spec", "replicas")]


def test_rules_are_evaluated_unless_the_structure_is_wrong() -> None:
    problem = "names a Model of the same namespace"
    told = [*map(str, validation.problems(make_manifest(INFERENCE_SERVICES, modelRef="other/tiny")))]
    assert [problem in text for text in sorted(told)] == [True, False], told
    told = [*map(str, validation.problems(make_manifest(INFERENCE_SERVICES, modelRef="other/tiny", parallel="two")))]
    assert not any(problem in text for text in told)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"apiVersion": "v1"}, 'apiVersion: Invalid value: "v1": use inference.pomona.dev/v1alpha1'),
        ({"metadata": {}}, "metadata.name: Required value: name is required"),
        ({"metadata": "one"}, "metadata.name: Required value: name is required"),
        ({"spec": ["a"]}, 'spec: Invalid value: "object": must be of type object'),
        ({"spce": {}}, "spce: unknown field; did you mean spec?"),
        ({"spec": {"modelRef": "tiny", "modelref": "x"}}, "spec.modelref: unknown field; did you mean modelRef?"),
        ({"spec": {"modelRef": "tiny", "hardware": {"gpu": 1}}}, "spec.hardware.gpu: unknown field"),
        ({"spec": {"modelRef": "tiny", "temperature": 0}}, "spec.temperature: unknown field"),
        ({"spec": {"modelRef": "tiny", "CONTEXT": 1}}, "spec.CONTEXT: unknown field; did you mean contextLength?"),
        (
            {"spec": {"modelRef": "tiny", "priority": "urgent"}},
            (
                'spec.priority: Unsupported value: "urgent": supported values: "batch", "critical", "high", "low", '
                '"normal"'
            ),
        ),
    ],
    ids=lambda param: next(iter(param)) if isinstance(param, dict) else "",
)
def test_malformed_manifest_is_refused(change: dict[str, Any], says: str) -> None:
    assert [*map(str, validation.problems(make_manifest(INFERENCE_SERVICES) | change))] == [says]


def test_manifest_without_spec_names_the_required_fields() -> None:
    manifest = make_manifest(MODELS)
    del manifest["spec"]
    assert [*map(str, validation.problems(manifest))] == ["spec.source: Required value"]


def test_transition_rules_do_not_apply_to_a_new_object() -> None:
    assert validation.problems(make_manifest(MODELS, cache={"accessMode": "ReadWriteMany"})) == []
