"""A Secret is sent to a source only if its owner gave it to sources."""

from typing import Any

import pytest

from controller.models.source_secret import ACCEPTED, LABEL, TYPE, SecretVerdict, judge_secret, required_keys
from crds.meta import SecretReference
from kube.resources import JOBS
from tests.support.simulated_model import HTTP, SimulatedModel, make_inspected

REFERENCE = SecretReference(name="hub")
MARKED = {LABEL: "true"}
CONFIG = {".dockerconfigjson": "e30="}


def _secret(kind: str = "Opaque", labels: dict[str, str] | None = None, **data: str) -> Any:
    return {"metadata": {"name": "hub", "labels": labels}, "type": kind, "data": data or {"token": "c2VjcmV0"}}


@pytest.mark.parametrize(
    ("secret", "reason", "way_out"),
    [
        (_secret(TYPE), "Accepted", ""),
        (_secret(labels=MARKED), "Accepted", ""),
        (_secret(), "SecretNotMarked", f"kubectl -n team label secret hub {LABEL}=true"),
        (_secret(labels={LABEL: "false"}), "SecretNotMarked", f"label secret hub {LABEL}=true"),
        (_secret("kubernetes.io/service-account-token", MARKED), "SecretRefused", f"--type={TYPE}"),
        (_secret("bootstrap.kubernetes.io/token", MARKED), "SecretRefused", f"--type={TYPE}"),
        (_secret(TYPE, other="eA=="), "SecretNotFound", """patch secret hub -p '{"stringData": {"token": "TOKEN"}}'"""),
        (None, "SecretNotFound", "create secret generic hub"),
    ],
)
def test_verdict_on_a_secret_states_the_way_out(secret: Any, reason: str, way_out: str) -> None:
    verdict = judge_secret("team", "hub", secret)
    assert (verdict.reason, verdict.accepted) == (reason, reason == "Accepted")
    assert way_out in verdict.message
    assert "c2VjcmV0" not in verdict.message


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        (_secret("kubernetes.io/dockerconfigjson", MARKED, **CONFIG), "Accepted"),
        (_secret("kubernetes.io/dockerconfigjson", None, **CONFIG), "SecretNotMarked"),
        (_secret(TYPE, username="dQ==", password="cA=="), "Accepted"),
        (_secret(TYPE), "Accepted"),
        (_secret(TYPE, username="dQ=="), "SecretNotFound"),
        (_secret("kubernetes.io/basic-auth", MARKED, username="dQ==", password="cA=="), "SecretRefused"),
    ],
)
def test_login_of_a_registry_has_other_keys_too(secret: Any, reason: str) -> None:
    required = required_keys(SimulatedModel(source="oci://ghcr.io/acme/tiny:v1").model)
    assert judge_secret("team", "hub", secret, required).reason == reason


def test_docker_configuration_is_no_token_for_another_server() -> None:
    secret = _secret("kubernetes.io/dockerconfigjson", MARKED, **CONFIG)
    assert judge_secret("team", "hub", secret).reason == "SecretNotFound"


def test_job_has_the_login_of_a_registry_in_files() -> None:
    simulated = SimulatedModel(source="oci://ghcr.io/acme/tiny:v1", source_secret_ref=REFERENCE)
    simulated.secret = SecretVerdict(accepted=True)
    simulated.settle()
    spec = simulated.job("inspect")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (volume,) = spec["volumes"]
    keys = {entry["key"]: entry["path"] for entry in volume["secret"].pop("items")}
    assert volume == {"name": "login", "secret": {"secretName": "hub", "defaultMode": 0o440, "optional": True}}
    assert keys == {key: key for key in (".dockerconfigjson", "username", "password", "token")}
    assert container["volumeMounts"] == [{"name": "login", "mountPath": "/run/secrets/pomona", "readOnly": True}]
    assert {"name": "POMONA_SOURCE_SECRET", "value": "/run/secrets/pomona"} in container["env"]
    assert not [variable for variable in container["env"] if "valueFrom" in variable]


def _simulate(verdict: SecretVerdict | None) -> SimulatedModel:
    simulated = SimulatedModel(source=HTTP, source_secret_ref=REFERENCE)
    simulated.secret = verdict
    return simulated


def test_no_job_gets_a_secret_that_is_refused() -> None:
    simulated = _simulate(judge_secret("team", "hub", _secret()))
    plan = simulated.settle()
    assert simulated.jobs == {}
    assert plan.again_seconds
    for kind in ("Ready", ACCEPTED):
        assert simulated.condition(kind).reason == "SecretNotMarked"

    simulated.secret = SecretVerdict(accepted=True)
    simulated.settle()
    assert simulated.job("inspect")
    assert simulated.condition(ACCEPTED).status == "True"


def test_inspected_model_whose_secret_is_unmarked_stays_ready_and_says_what_to_do() -> None:
    simulated = make_inspected(source_secret_ref=REFERENCE)
    simulated.secret = judge_secret("team", "hub", _secret())
    simulated.settle()
    assert simulated.model.status.phase == "Ready"
    assert (simulated.condition("Ready").status, simulated.condition(ACCEPTED).status) == ("True", "False")

    simulated.add_consumer()
    plan = simulated.settle()
    assert not [obj for kind, obj in plan.create if kind == JOBS]
    assert simulated.condition("Cached").reason == "SecretNotMarked"
    assert simulated.condition("Ready").status == "True"


def test_verdict_stays_while_the_secret_is_not_read_again() -> None:
    simulated = _simulate(SecretVerdict(accepted=True))
    simulated.settle()
    simulated.secret = None
    simulated.settle()
    assert simulated.condition(ACCEPTED).status == "True"


def test_secret_of_a_bucket_needs_both_keys() -> None:
    simulated = SimulatedModel(source="s3://models/tiny.gguf", source_secret_ref=REFERENCE)
    required = required_keys(simulated.model)
    assert judge_secret("team", "hub", _secret(TYPE, AWS_ACCESS_KEY_ID="eA==", AWS_SECRET_ACCESS_KEY="eA=="), required)[
        0
    ]
    missing = judge_secret("team", "hub", _secret(TYPE, AWS_ACCESS_KEY_ID="eA=="), required)
    assert (missing.accepted, missing.reason) == (False, "SecretNotFound")
    assert "no key `AWS_ACCESS_KEY_ID` with `AWS_SECRET_ACCESS_KEY`: kubectl" in missing.message
    assert '{"stringData": {"AWS_ACCESS_KEY_ID": "ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"' in missing.message
    none = judge_secret("team", "hub", None, required).message
    assert "--from-literal=AWS_ACCESS_KEY_ID=ACCESS_KEY_ID --from-literal=AWS_SECRET_ACCESS_KEY=SECRET_ACCESS" in none


def test_job_of_a_bucket_gets_the_keys_by_reference_only() -> None:
    simulated = SimulatedModel(source="s3://models/tiny.gguf", source_secret_ref=REFERENCE)
    simulated.settle()
    (container,) = simulated.job("inspect")["spec"]["template"]["spec"]["containers"]
    references = {
        variable["name"]: (
            variable["valueFrom"]["secretKeyRef"]["key"],
            variable["valueFrom"]["secretKeyRef"]["optional"],
        )
        for variable in container["env"]
        if "valueFrom" in variable
    }
    assert references == {
        "AWS_ACCESS_KEY_ID": ("AWS_ACCESS_KEY_ID", False),
        "AWS_SECRET_ACCESS_KEY": ("AWS_SECRET_ACCESS_KEY", False),
        "AWS_SESSION_TOKEN": ("AWS_SESSION_TOKEN", True),
        "AWS_REGION": ("AWS_REGION", True),
        "AWS_ENDPOINT_URL": ("AWS_ENDPOINT_URL", True),
    }


@pytest.mark.parametrize(
    "source", ["s3://models/$(AWS_SECRET_ACCESS_KEY).gguf", "https://a.example/$(AWS_SECRET_ACCESS_KEY)/x.gguf"]
)
def test_source_brings_no_secret_into_the_arguments_of_its_job(source: str) -> None:
    simulated = SimulatedModel(source=source, source_secret_ref=REFERENCE)
    simulated.secret = SecretVerdict(accepted=True)
    simulated.settle()
    arguments = simulated.job("inspect")["spec"]["template"]["spec"]["containers"][0]["args"]
    # As Kubernetes replaces variables: $$ is a dollar.
    assert source.replace("$", "$$") in arguments
