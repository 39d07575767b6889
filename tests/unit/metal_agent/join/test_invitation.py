"""Names and addresses with which no host could join are refused before anything is made."""

import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from crds.meta import GROUP
from kube import credentials
from kube.client import Client, Obj
from kube.credentials import Credentials, StaticToken
from kube.errors import Conflict, NotFound, Unreachable
from kube.resources import Resource
from kube.service_accounts import GrantedToken
from metal_agent.join import invitation
from metal_agent.join.host_account import code_rights, host_rights
from metal_agent.join.invitation import InvitationError, check_host_name, check_server, invite_host
from metal_agent.join.removal import removal_steps
from tests.controlplane.process import CHECKOUT
from tests.support.certificates import CA


@pytest.mark.parametrize("name", ["studio-1", "a", "9", "a" * 63])
def test_dns_label_can_name_a_host(name: str) -> None:
    check_host_name(name)


@pytest.mark.parametrize("name", ["", "Studio", "studio.join", "a_b", "-a", "a-", "a" * 64, "studio-1\n", "../x"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvitationError, match="use small letters, digits and '-', at most 63"):
        check_host_name(name)


@pytest.mark.parametrize("url", ["https://192.0.2.1:6443", "https://api.example", "https://[2001:db8::1]:6443/k8s/a"])
def test_address_that_a_host_reaches_is_taken(url: str) -> None:
    assert check_server(f"{url}/") == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://192.0.2.1:8001", "is no https URL"),
        ("192.0.2.1", "is no https URL"),
        ("https://127.0.0.1:6443", "leads to this machine only.*--server"),
        ("https://127.1.2.3", "leads to this machine only"),
        ("https://localhost:6443", "leads to this machine only"),
        ("https://[::1]:6443", "leads to this machine only"),
        ("https://me:secret@192.0.2.1", "with more around it"),
    ],
)
def test_address_that_no_host_can_use_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvitationError, match=reason) as refused:
        check_server(url)
    assert "secret" not in str(refused.value)


async def test_kubeconfig_that_checks_no_certificate_makes_no_code(tmp_path: Path) -> None:
    config = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": "https://192.0.2.1", "insecure-skip-tls-verify": True}}],
        "users": [{"name": "a", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    loaded = credentials.load(tmp_path / "config")
    assert loaded.tls is not None
    assert loaded.tls.verify_mode == ssl.CERT_NONE
    with pytest.raises(InvitationError, match="replace that by certificate-authority-data"):
        await invite_host(NoClient(), loaded, "studio-1")


def test_removal_takes_rights_first_and_tokens_next() -> None:
    before, after = removal_steps("studio-1")
    assert [str(step.resource).partition(".")[0] for step in before] == [
        "clusterrolebindings",
        "rolebindings",
        "rolebindings",
        "podtemplates",
        "serviceaccounts",
        "serviceaccounts",
    ]
    assert after[0].resource.kind == "MetalHost"


def list_rights(*rules: Obj) -> set[tuple[str, str, str, str]]:
    """Return each right as group, resource, verb and name; the name is empty if all names are meant."""
    return {
        (group, resource, verb, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames") or [""]
    }


def test_host_and_code_have_these_rights_and_no_others() -> None:
    """A right that is added here has to be argued for: docs/security.md tells what a stolen host can do."""
    (_, role), (_, binding), (_, cluster_binding) = host_rights("studio-1", ["https://api"])
    assert list_rights(*role["rules"]) == {
        *(("", "secrets", verb, "studio-1") for verb in ("get", "list", "watch")),
        *(("coordination.k8s.io", "leases", verb, "studio-1") for verb in ("get", "create", "patch")),
        ("", "serviceaccounts/token", "create", "studio-1"),
        (GROUP, "metalhosts/audience", "use", "https://api"),
    }
    (_, code_role), (_, code_binding) = code_rights("studio-1", "uid")
    assert list_rights(*code_role["rules"]) == {("", "podtemplates", "delete", "studio-1.join")}
    bound = [
        (
            role_binding["roleRef"]["kind"],
            role_binding["roleRef"]["name"],
            [subject["name"] for subject in role_binding["subjects"]],
        )
        for role_binding in (binding, cluster_binding, code_binding)
    ]
    assert bound == [
        ("Role", "studio-1", ["studio-1"]),
        ("ClusterRole", "pomona-metal-agent", ["studio-1"]),
        ("Role", "studio-1.join", ["studio-1.join"]),
    ]
    manifests = yaml.safe_load_all((CHECKOUT / "deploy" / "install" / "rbac.yaml").read_text())
    (of_all,) = (
        manifest for manifest in manifests if manifest and manifest["metadata"]["name"] == "pomona-metal-agent"
    )
    assert list_rights(*of_all["rules"]) == {
        *((GROUP, "metalhosts", verb, "") for verb in ("get", "create")),
        *((GROUP, f"{kind}/status", "patch", "") for kind in ("metalhosts", "metalprocesses")),
        *((GROUP, "metalprocesses", verb, "") for verb in ("get", "list", "watch")),
        *(("discovery.k8s.io", "endpointslices", verb, "") for verb in ("list", "create", "patch", "delete")),
        *(("events.k8s.io", "events", verb, "") for verb in ("create", "patch")),
    }


class NoClient(Client):
    """A client that must not be used."""

    def __init__(self) -> None:
        pass


class _ReplacedInvitation(Client):
    """An API on which another invitation of the same host has replaced the PodTemplate of this one."""

    def __init__(self) -> None:
        self.deleted: list[str | None] = []

    async def get(self, resource: Resource, name: str, _namespace: str | None = None) -> Obj:
        raise NotFound(f"get {resource} {name}", status=404)

    async def apply(self, resource: Resource, obj: Any, **_: Any) -> Obj:
        if obj["metadata"]["name"] == "studio-1.join":
            raise Unreachable(f"apply {resource}")
        return dict(obj)

    async def create(self, _resource: Resource, obj: Any) -> Obj:
        return {**obj, "metadata": {**obj["metadata"], "uid": "ours"}}

    async def delete(self, *_: Any, uid: str | None = None, **__: Any) -> None:
        self.deleted.append(uid)
        raise Conflict("delete", status=409)


async def test_failed_invitation_leaves_the_code_that_has_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def grant(*_: Any) -> GrantedToken:
        return GrantedToken("header.claims.signature", 900, "2026-11-24T00:00:00Z", ("api",))

    monkeypatch.setattr(invitation, "request_token", grant)
    api = _ReplacedInvitation()
    administrator = Credentials("https://192.0.2.1", StaticToken("t"), authority=CA.read_bytes())
    with pytest.raises(Unreachable):
        await invite_host(api, administrator, "studio-1")
    assert api.deleted == ["ours"]
