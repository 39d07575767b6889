"""What the API server refuses is refused without one, in the same words; tests/cluster/test_crds.py has the server."""

import json
import re
from typing import Any

import pytest

from crds import validation
from kube.resources import INFERENCE_SERVICES, MODELS, Resource
from tests.manifests import BAD, DEFAULTS, GOOD_ARGUMENTS, NULLS, SPECS, Bad, made


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_manifest_is_refused_with_the_way_out(bad: Bad) -> None:
    said = "\n".join(map(str, validation.problems(bad.manifest())))
    assert re.search(bad.says, said), said


@pytest.mark.parametrize("resource", SPECS, ids=lambda each: each.kind)
def test_good_manifest_is_taken(resource: Resource) -> None:
    assert validation.problems(made(resource)) == []


def test_tuning_is_taken() -> None:
    assert validation.problems(made(INFERENCE_SERVICES, extraArgs=GOOD_ARGUMENTS)) == []


@pytest.mark.parametrize("resource", DEFAULTS, ids=lambda each: each.kind)
def test_defaults_are_filled_in(resource: Resource) -> None:
    manifest = made(resource)
    assert validation.with_defaults(manifest)["spec"] == SPECS[resource] | DEFAULTS[resource]
    assert manifest["spec"] == SPECS[resource], "the user's own manifest stays as it is"


@pytest.mark.parametrize("nulls", NULLS, ids=lambda nulls: next(iter(nulls)))
def test_null_is_absent(nulls: dict[str, Any]) -> None:
    manifest = made(INFERENCE_SERVICES)
    manifest["spec"] |= nulls
    assert validation.problems(manifest) == []
    filled = validation.with_defaults(manifest)["spec"]
    assert filled["replicas"] == 1
    assert "null" not in json.dumps(filled)


def test_null_is_no_value_of_what_is_required() -> None:
    manifest = made(INFERENCE_SERVICES)
    manifest["spec"]["modelRef"] = None
    assert [*map(str, validation.problems(manifest))] == ["spec.modelRef: Required value"]


def test_every_problem_is_told_at_once_with_its_field() -> None:
    found = validation.problems(made(INFERENCE_SERVICES, replicas=-1, parallel=65))
    assert [each.path for each in found] == [("spec", "parallel"), ("spec", "replicas")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"apiVersion": "v1"}, 'apiVersion: Invalid value: "v1": use inference.pomona.dev/v1alpha1'),
        ({"metadata": {}}, "metadata.name: Required value: name is required"),
        ({"metadata": "one"}, "metadata.name: Required value: name is required"),
        ({"spec": ["a"]}, 'spec: Invalid value: "object": must be of type object'),
        ({"spce": {}}, "spce: unknown field; is spec meant?"),
        ({"spec": {"modelRef": "tiny", "modelref": "x"}}, "spec.modelref: unknown field; is modelRef meant?"),
        ({"spec": {"modelRef": "tiny", "hardware": {"gpu": 1}}}, "spec.hardware.gpu: unknown field"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_kubectl_would_not_send_is_refused(change: dict[str, Any], says: str) -> None:
    assert [*map(str, validation.problems(made(INFERENCE_SERVICES) | change))] == [says]


def test_a_manifest_without_spec_is_told_what_it_needs() -> None:
    manifest = made(MODELS)
    del manifest["spec"]
    assert [*map(str, validation.problems(manifest))] == ["spec.source: Required value"]


def test_rules_about_an_edit_say_nothing_about_a_new_object() -> None:
    assert validation.problems(made(MODELS, cache={"accessMode": "ReadWriteMany"})) == []
