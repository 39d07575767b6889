"""A join code is good for one use, which the API server decides, and opens nothing else."""

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crds.meta import GROUP, HOSTS_NAMESPACE, VERSION
from kube.client import Client, Obj
from kube.credentials import Credentials
from kube.errors import ApiError, Forbidden, Unauthorized
from kube.resources import (
    CLUSTER_ROLE_BINDINGS,
    LEASES,
    METAL_HOSTS,
    METAL_PROCESSES,
    POD_TEMPLATES,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    Resource,
)
from kube.service_accounts import request_token
from kube.transport import Request
from metal_agent.cluster.host_identity import FILE_NAME, read_joined_host
from metal_agent.join import invitation
from metal_agent.join.exchange import JoinError, join_cluster
from metal_agent.join.host_account import join_code_name
from metal_agent.join.invitation import InvitationError, invite_host
from metal_agent.join.join_code import split_certificates
from tests.cluster.join.conftest import HOST, Invite, connect_with
from tests.cluster.join.signed_tokens import end_token
from tests.controlplane.plane import ControlPlane
from tests.support.certificates import CA
from tests.support.eventually import eventually

CODE = join_code_name(HOST)


async def test_code_is_exchanged_for_a_token_that_renews_itself_only(
    invite: Invite, admin: Credentials, client: Client, tmp_path: Path
) -> None:
    code = await invite()
    joined = await join_cluster(code, tmp_path)

    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert read_joined_host(tmp_path) == joined
    assert joined.token not in repr(joined)
    assert (joined.host, joined.server) == (HOST, admin.server)
    days = (datetime.fromisoformat(joined.expires_at) - datetime.now(UTC)).days
    assert days >= 29, "the first token, of 16 minutes, was replaced"
    assert CODE not in await list_names(client, POD_TEMPLATES)

    async def rights_are_collected() -> bool:
        return not any([CODE in await list_names(client, kind) for kind in (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS)])

    await eventually(rights_are_collected)


async def test_code_is_good_for_15_minutes_and_what_it_opens_for_one_more(
    invite: Invite, admin: Credentials, client: Client
) -> None:
    """By the claims that the API server has signed, for which it is good whatever the code says."""
    before = datetime.now(UTC).timestamp()
    code = await invite()
    template = await client.get(POD_TEMPLATES, CODE, HOSTS_NAMESPACE)
    (rest,) = template["metadata"]["annotations"].values()
    for token, seconds in ((code.token, 900), (rest, 960)):
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        assert claims["exp"] - claims["iat"] == seconds
        assert claims["exp"] - before < seconds + 30
    assert abs(code.expires_at - before - 900) < 30
    assert await opens(admin, f"{rest}.{code.signature}")


async def test_server_of_another_authority_uses_up_no_code(invite: Invite, client: Client, tmp_path: Path) -> None:
    code = await invite()
    foreign = msgspec.structs.replace(code, authority=split_certificates(CA.read_bytes()))
    with pytest.raises(
        JoinError, match=r"certificate verify failed.*nothing secret was sent, and the code is not used"
    ):
        await join_cluster(foreign, tmp_path)
    assert CODE in await list_names(client, POD_TEMPLATES)
    assert (await join_cluster(code, tmp_path)).authority == code.authority_pem


async def test_code_that_is_used_twice_is_noticed(invite: Invite, tmp_path: Path) -> None:
    code = await invite()
    await join_cluster(code, tmp_path / "thief")
    with pytest.raises(JoinError, match=r"used already.*if it was not you.*pomona host remove studio-1"):
        await join_cluster(code, tmp_path / "owner")
    assert read_joined_host(tmp_path / "owner") is None


async def test_of_two_uses_at_the_same_moment_one_wins(invite: Invite, tmp_path: Path) -> None:
    code = await invite()
    results = await asyncio.gather(
        *(join_cluster(code, tmp_path / str(number)) for number in range(8)), return_exceptions=True
    )
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    assert all("used already" in str(exception) for exception in results if isinstance(exception, BaseException))


async def test_code_that_was_replaced_opens_nothing(invite: Invite, tmp_path: Path) -> None:
    """The server remembers its token for ten seconds, in which it can end the next code, and no more."""
    before = await invite()
    await invite()
    with pytest.raises(JoinError, match="replaced by another one"):
        await join_cluster(before, tmp_path)
    assert read_joined_host(tmp_path) is None


async def test_expired_code_is_refused_by_the_server(
    invite: Invite, plane: ControlPlane, client: Client, tmp_path: Path
) -> None:
    code = await invite()
    ended = int(datetime.now(UTC).timestamp()) - 60
    key = (plane.certificates / "apiserver.key").read_text()
    expired = msgspec.structs.replace(code, token=end_token(code.token, key, ended), expires_at=ended)
    with pytest.raises(JoinError, match="expired: get another code by `pomona host join studio-1`"):
        await join_cluster(expired, tmp_path)
    assert await client.get(SERVICE_ACCOUNTS, CODE, HOSTS_NAMESPACE)
    alive = msgspec.structs.replace(code, token=end_token(code.token, key, ended + 660))
    await join_cluster(alive, tmp_path)  # so it is for its end that the server refuses the other


async def test_who_may_view_the_namespace_of_hosts_completes_no_code(
    invite: Invite, plane: ControlPlane, admin: Credentials, client: Client, namespace: str
) -> None:
    """The role `view`, which is often given to many, shows no kind that has the rest of the first token."""
    code = await invite()
    account = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    role = {"apiGroup": ROLES.group, "kind": "ClusterRole", "name": "view"}
    binding = {"metadata": {"namespace": HOSTS_NAMESPACE, "name": "viewer"}, "roleRef": role, "subjects": [account]}
    await client.create(ROLE_BINDINGS, binding)
    try:
        viewer_token = (await request_token(client, namespace, "default", 600)).token
        async with connect_with(admin, viewer_token) as viewer:
            await eventually(lambda: is_shown(viewer, SERVICE_ACCOUNTS))
            shown = {kind: await is_shown(viewer, kind) for kind in await namespaced_kinds(plane)}
            texts = [str((await viewer.list(kind, HOSTS_NAMESPACE)).items) for kind, seen in shown.items() if seen]
    finally:
        await client.delete(ROLE_BINDINGS, "viewer", HOSTS_NAMESPACE)
    assert any(f"'{CODE}'" in text for text in texts), "the account of the code is shown"
    rests = re.findall(r"eyJ[\w-]+\.eyJ[\w-]+", "".join(texts))
    assert [candidate for candidate in rests if await opens(admin, f"{candidate}.{code.signature}")] == []
    (rest,) = re.findall(r"eyJ[\w-]+\.eyJ[\w-]+", str((await client.list(POD_TEMPLATES, HOSTS_NAMESPACE)).items))
    assert await opens(admin, f"{rest}.{code.signature}"), "an administrator sees the rest"
    for alone in (rest, f"{rest}."):
        assert not await opens(admin, alone)


async def list_names(client: Client, kind: Resource) -> list[str]:
    return [item["metadata"]["name"] for item in (await client.list(kind, HOSTS_NAMESPACE)).items]


async def namespaced_kinds(plane: ControlPlane) -> list[Resource]:
    """Return the namespaced kinds of Kubernetes' own core group and of ours."""
    kinds = []
    for group, version in (("", "v1"), ("apps", "v1"), ("batch", "v1"), (GROUP, VERSION)):
        path = f"/apis/{group}/{version}" if group else f"/api/{version}"
        kinds += [
            Resource(group, version, resource["name"], resource["kind"])
            for resource in (await plane.request("GET", path))["resources"]
            if resource["namespaced"] and "list" in resource["verbs"]
        ]
    return kinds


async def is_shown(viewer: Client, kind: Resource) -> bool:
    try:
        await viewer.list(kind, HOSTS_NAMESPACE)
    except Forbidden:
        return False
    return True


async def opens(admin: Credentials, token: str) -> bool:
    """Return whether a token is a credential."""
    async with connect_with(admin, token) as thief:
        try:
            await thief.list(METAL_PROCESSES)
        except Unauthorized:
            return False
    return True


def delete_code(thief: Client, query: dict[str, str], name: str | None = CODE) -> Awaitable[Obj]:
    """Delete the PodTemplate with options in the query, as no client of ours sends them."""
    request = Request("DELETE", POD_TEMPLATES.path(HOSTS_NAMESPACE, name), query)
    return thief._call("delete", POD_TEMPLATES, HOSTS_NAMESPACE, name, request)


Attempt = Callable[[Client], Awaitable[object]]
BY_CODE: dict[str, Attempt] = {
    "to read the rest": lambda thief: thief.get(POD_TEMPLATES, CODE, HOSTS_NAMESPACE),
    "to read it without using the code": lambda thief: thief.take(POD_TEMPLATES, CODE, HOSTS_NAMESPACE, dry_run=True),
    "to read it and leave it for others": lambda thief: thief.delete(
        POD_TEMPLATES, CODE, HOSTS_NAMESPACE, propagation="Foreground"
    ),
    "to keep it": lambda thief: thief.delete(POD_TEMPLATES, CODE, HOSTS_NAMESPACE, propagation="Orphan"),
    "to try in another form": lambda thief: delete_code(thief, {"dryRun": "All", "gracePeriodSeconds": "3600"}),
    "to keep it by an older field": lambda thief: delete_code(thief, {"orphanDependents": "false"}),
    "to keep it by a parameter": lambda thief: delete_code(thief, {"propagationPolicy": "Foreground"}),
    "to try with all codes": lambda thief: delete_code(thief, {"dryRun": "All"}, None),
    # An error would quote the value: a copy into a label, which is too long for one.
    "to see it in an error": lambda thief: thief.patch_json(
        POD_TEMPLATES,
        CODE,
        HOSTS_NAMESPACE,
        [{"op": "copy", "from": f"/metadata/annotations/{GROUP}~1join-claims", "path": "/metadata/labels/a"}],
    ),
    "to delete its account": lambda thief: thief.delete(SERVICE_ACCOUNTS, CODE, HOSTS_NAMESPACE),
    "to list accounts": lambda thief: thief.list(SERVICE_ACCOUNTS, HOSTS_NAMESPACE),
    "a token of the host": lambda thief: request_token(thief, HOSTS_NAMESPACE, HOST, 600),
    "a longer life": lambda thief: request_token(thief, HOSTS_NAMESPACE, CODE, 86400),
    "to delete the host's account": lambda thief: thief.delete(SERVICE_ACCOUNTS, HOST, HOSTS_NAMESPACE),
    "Secrets": lambda thief: thief.list(SECRETS, HOSTS_NAMESPACE),
    "processes": lambda thief: thief.list(METAL_PROCESSES),
    "a MetalHost": lambda thief: thief.create(METAL_HOSTS, {"metadata": {"name": CODE}, "spec": {}}),
    "a Lease": lambda thief: thief.create(LEASES, {"metadata": {"namespace": HOSTS_NAMESPACE, "name": CODE}}),
}


async def test_stolen_code_opens_nothing_but_the_exchange(invite: Invite, admin: Credentials, tmp_path: Path) -> None:
    code = await invite()
    async with connect_with(admin, code.token) as thief:
        for what, attempt in BY_CODE.items():
            with pytest.raises(Forbidden):
                print(what, await attempt(thief))
    await join_cluster(code, tmp_path)


BY_HOST: dict[str, Attempt] = {
    "a token of another host": lambda host: request_token(host, HOSTS_NAMESPACE, "studio-2", 600),
    "a token of another host's code": lambda host: request_token(
        host, HOSTS_NAMESPACE, join_code_name("studio-2"), 600
    ),
    "to use another host's code": lambda host: host.take(POD_TEMPLATES, join_code_name("studio-2"), HOSTS_NAMESPACE),
    "to widen its rights": lambda host: host.apply(
        ROLES,
        {
            "metadata": {"namespace": HOSTS_NAMESPACE, "name": HOST},
            "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}],
        },
        field_manager="thief",
    ),
    "another binding": lambda host: host.create(
        CLUSTER_ROLE_BINDINGS,
        {
            "metadata": {"name": "thief"},
            "roleRef": {"apiGroup": ROLES.group, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": HOST, "namespace": HOSTS_NAMESPACE}],
        },
    ),
    "to read its account": lambda host: host.get(SERVICE_ACCOUNTS, HOST, HOSTS_NAMESPACE),
    # What trusts the cluster's issuer, or asks the API server about a token, would take it for a workload's.
    "a token for another than the API server": lambda host: request_own(host, audiences=["sts.example"]),
    "a token for the API server and another": lambda host: request_own(
        host, audiences=["https://kubernetes.default.svc", "sts.example"]
    ),
    "a token that names a node": lambda host: request_own(
        host, boundObjectRef={"apiVersion": "v1", "kind": "Node", "name": "cpu-1"}
    ),
    "the existence of a Secret": lambda host: request_own(
        host, boundObjectRef={"apiVersion": "v1", "kind": "Secret", "name": "studio-2"}
    ),
}


def request_own(host: Client, **spec: Any) -> Awaitable[Obj]:
    """Request a token of the host's own account, with more than agents ask for."""
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {"name": HOST}}
    body = {**request, "spec": {"expirationSeconds": 600, **spec}}
    return host.create_subresource(SERVICE_ACCOUNTS, HOST, HOSTS_NAMESPACE, "token", body)


async def test_host_gets_tokens_for_itself_only(invite: Invite, admin: Credentials, tmp_path: Path) -> None:
    joined = await join_cluster(await invite(), tmp_path)
    await invite("studio-2")
    async with connect_with(admin, joined.token) as host:
        granted = await request_token(host, HOSTS_NAMESPACE, HOST, 600)
        assert granted.lifetime_seconds == 600
        assert await request_own(host, audiences=[*granted.audiences])
        for what, attempt in BY_HOST.items():
            with pytest.raises(Forbidden):
                print(what, await attempt(host))


async def test_remains_of_a_code_after_its_use_are_no_credential(
    invite: Invite, admin: Credentials, tmp_path: Path
) -> None:
    code = await invite()
    await join_cluster(code, tmp_path)
    async with connect_with(admin, code.token) as thief:
        with pytest.raises(ApiError):
            await thief.take(POD_TEMPLATES, CODE, HOSTS_NAMESPACE)

        async def is_ended() -> bool:
            try:
                await thief.list(METAL_PROCESSES)
            except Unauthorized:
                return True
            except Forbidden:  # the API server remembers a token for ten seconds
                return False
            raise AssertionError("it opens something")

        await eventually(is_ended)


async def test_without_its_policy_no_code_is_made(
    plane: ControlPlane, client: Client, invite: Invite, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/pomona-host-tokens"
    binding = await plane.request("GET", path)
    await plane.request("DELETE", path)

    async def is_refused() -> bool:
        try:
            await invite()
        except InvitationError as error:
            return "pomona-host-tokens" in str(error)
        return False  # the server still applies the policy

    try:
        with monkeypatch.context() as shortened:
            shortened.setattr(invitation, "_POLICY_SECONDS", 1.0)
            await eventually(is_refused)
        assert await list_names(client, POD_TEMPLATES) == []
    finally:
        kept = {"metadata": {"name": binding["metadata"]["name"]}, "spec": binding["spec"]}
        await plane.request("POST", path.rpartition("/")[0], binding | kept)
    await invite()


async def test_dotted_name_of_another_host_is_not_taken_for_a_code(client: Client, admin: Credentials) -> None:
    account = {"metadata": {"namespace": HOSTS_NAMESPACE, "name": "office.join"}}
    await client.create(SERVICE_ACCOUNTS, account)
    try:
        with pytest.raises(InvitationError, match=r"office\.join is not that of a join code"):
            await invite_host(client, admin, "office")
    finally:
        await client.delete(SERVICE_ACCOUNTS, "office.join", HOSTS_NAMESPACE)
