"""A refusal of the API server becomes one line with the missing right, the owner of a field, or the right name."""

import pytest

from cli.cluster_access import describe_missing
from cli.cluster_errors import describe_api_error
from crds.meta import GROUP, HOSTS_NAMESPACE
from kube.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS

SERVER = "https://10.0.0.1"
EVE = 'User "eve" cannot'
GRANT = "an administrator of the cluster can grant it by a"
VIEWERS = "the cluster role view, edit or admin"
MACHINES = (
    "an administrator of the cluster can grant it: kubectl create clusterrolebinding NAME "
    "--clusterrole=pomona-machines-view --user=eve"
)
ADMINISTRATORS = "administrators of the cluster may, and can bind a role that allows it (docs/security.md)"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            f'secrets "chat-token" is forbidden: {EVE} get resource "secrets" in API group "" in the namespace "team"',
            f"eve may not get secrets in namespace team: {GRANT} role binding to the cluster role edit or admin",
        ),
        (
            f'metalhosts is forbidden: {EVE} list resource "metalhosts" in API group "{GROUP}" at the cluster scope',
            f"eve may not list metalhosts.{GROUP} in the whole cluster: {MACHINES}",
        ),
        (
            f'x is forbidden: {EVE} list resource "metalprocesses" in API group "{GROUP}" in the namespace "team"',
            f"eve may not list metalprocesses.{GROUP} in namespace team: {MACHINES}",
        ),
        (
            f'x: {EVE} get resource "serviceaccounts" in API group "" in the namespace "{HOSTS_NAMESPACE}"',
            f"eve may not get serviceaccounts in namespace {HOSTS_NAMESPACE}: {ADMINISTRATORS}",
        ),
        (
            f'models is forbidden: {EVE} list resource "models" in API group "{GROUP}" in the namespace "team"',
            f"eve may not list models.{GROUP} in namespace team: {GRANT} role binding to {VIEWERS}",
        ),
        (
            f'models is forbidden: {EVE} list resource "models" in API group "{GROUP}" at the cluster scope',
            f"eve may not list models.{GROUP} in the whole cluster: {GRANT} cluster role binding",
        ),
        ("denied by policy x: no", "list pods is refused: denied by policy x: no"),
    ],
)
def test_missing_right_is_named(message: str, text: str) -> None:
    error = Forbidden("list pods", status=403, reason="Forbidden", message=message)
    assert describe_api_error(error, SERVER) == text


def test_owner_of_a_field_is_named() -> None:
    error = Conflict(
        "apply inferenceservices.inference.pomona.dev team/chat",
        status=409,
        reason="Conflict",
        message=f'Apply failed with 1 conflict: conflict with "argocd" using {GROUP}/v1alpha1: .spec.replicas',
        causes=((".spec.replicas", 'conflict with "argocd"'),),
    )
    assert describe_api_error(error, SERVER) == (
        "inferenceservices team/chat belongs to argocd, which has set spec.replicas to another value, and nothing is "
        "overwritten: change it there, or deploy under another name"
    )


def test_namespace_that_is_missing_is_named_with_the_way_out() -> None:
    error = NotFound("apply x", status=404, reason="NotFound", message='namespaces "nope" not found')
    assert describe_api_error(error, SERVER).startswith("namespace nope does not exist: create it (kubectl create name")


def test_other_refusals_keep_the_words_of_the_server() -> None:
    assert describe_api_error(Invalid("apply x", status=422, message="spec.a: no"), SERVER) == "spec.a: no"
    assert describe_api_error(ApiError("get log", status=400, message="is waiting"), SERVER) == "is waiting"
    assert "cannot answer now: list: 503" in describe_api_error(ApiError("list", status=503), SERVER)


def test_similar_name_is_suggested() -> None:
    assert describe_missing(INFERENCE_SERVICES, "chta", "team", ["chat", "code"]).endswith("team: did you mean chat?")
    assert describe_missing(INFERENCE_SERVICES, "zzz", "team", ["chat", "code"]).endswith("there are chat, code")
    assert describe_missing(INFERENCE_SERVICES, "zzz", "team", ["chat"]).endswith("there is chat")
    assert describe_missing(INFERENCE_SERVICES, "zzz", "team", []).endswith("another namespace is chosen with -n")
    assert describe_missing(METAL_HOSTS, "zzz", None, []) == "MetalHost zzz does not exist: there is none"
    many = [f"host-{number}" for number in range(20)]
    assert describe_missing(METAL_HOSTS, "zzz", None, many).endswith("host-15, ...")
