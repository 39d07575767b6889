"""The replacement of a service's token: when it is done, in which steps, and what it never rolls."""

import asyncio
import base64
from datetime import timedelta

import pytest

from controller.reconcile.plan import Plan, Snapshot
from controller.services.reconciler import decide_service, service_reconciler
from controller.services.service_view import ServiceInputs
from controller.services.tokens import KnownTokens, TokenStep, digest_rotation_request, token_secret
from crds.meta import GROUP, ROTATE_TOKEN, TOKEN_ROTATION
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, MODELS, SECRETS, ObjectKey, Resource
from tests.support.api_objects import NOW, as_service, condition, model, service, store
from tests.support.service_decisions import KEY, list_applied, plain_sources

SECRET = ObjectKey("team", "chat-token")


class OneSecret(Client):
    """An API with the token Secret of `chat`, or none."""

    def __init__(self, secret: Obj | None) -> None:
        self.secret = secret
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource, name, namespace) == (SECRETS, "chat-token", "team")
        self.reads += 1
        if self.secret is None:
            raise NotFound("get", status=404)
        return self.secret


class SlowSecret(OneSecret):
    """An API that answers after others have asked too."""

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        secret = await super().get(resource, name, namespace)
        await asyncio.sleep(0)
        return secret


def annotated(value: str | None, rotation: str = "") -> Obj:
    """Return the service with this annotation, whose status has the last rotation."""
    obj = service(status={"tokenRotation": rotation} if rotation else None)
    obj["metadata"]["annotations"] = {ROTATE_TOKEN: value} if value else {}
    return obj


def stored_secret(value: str | None = None) -> Obj:
    _, secret = token_secret(as_service(annotated(value)), "first")
    metadata = {"uid": "uid-secret", "resourceVersion": "5", **secret["metadata"]}
    return secret | {"metadata": metadata}


def noted(obj: Obj, **annotations: str | None) -> Obj:
    """Return a Secret with these annotations besides the others; None removes one."""
    merged = {
        **obj["metadata"].get("annotations", {}),
        **{f"{GROUP}/{key}": annotation for key, annotation in annotations.items()},
    }
    kept = {key: text for key, text in merged.items() if text is not None}
    return obj | {"metadata": obj["metadata"] | {"annotations": kept}}


def edited(obj: Obj, token: str) -> Obj:
    return obj | {"data": {"token": base64.b64encode(token.encode()).decode()}}


def patched(secret: Obj, step: TokenStep) -> Obj:
    """Return the Secret after the patch of a step, which is of exactly this version."""
    assert step.patch is not None
    test, *writes = step.patch.operations
    assert test == {"op": "test", "path": "/metadata/resourceVersion", "value": secret["metadata"]["resourceVersion"]}
    by_path = {write["path"]: write["value"] for write in writes}
    metadata = secret["metadata"] | {"annotations": by_path["/metadata/annotations"], "resourceVersion": "6"}
    return secret | {"metadata": metadata, "data": by_path.get("/data", secret["data"])}


def token_of(secret: Obj) -> str:
    return base64.b64decode(secret["data"]["token"]).decode()


def rotation_of(secret: Obj) -> str:
    rotation: str = secret["metadata"]["annotations"].get(TOKEN_ROTATION, "")
    return rotation


def served(value: str | None, rotation: str = "") -> Obj:
    """Return the service with this annotation, about which was decided before."""
    obj = annotated(value, rotation)
    obj["status"] = obj.get("status", {}) | {"conditions": [condition("Ready", "True")]}
    return obj


async def find_step(
    api: Client,
    obj: Obj,
    tokens: KnownTokens | None = None,
    *,
    after: timedelta = timedelta(),
    waits: bool = False,
) -> TokenStep:
    known_tokens = tokens or KnownTokens()
    return await known_tokens.find_step(
        api, KEY, as_service(obj), NOW + after, has_replicas=True, all_replicas_wait=waits
    )


async def test_new_value_of_the_annotation_replaces_the_token_once() -> None:
    secret = stored_secret()
    after = patched(secret, await find_step(OneSecret(secret), served("monday")))
    assert len(token_of(after)) >= 40
    assert (rotation_of(after), "monday" in rotation_of(after)) == (
        digest_rotation_request(as_service(annotated("monday"))),
        False,
    )
    assert (await find_step(OneSecret(after), served("monday"))).rotation == rotation_of(after)
    done = await find_step(OneSecret(after), served("monday", rotation_of(after)))
    assert (done.new_token, done.rotation, done.patch) == (None, "", None)
    removed = await find_step(OneSecret(after), served(None, rotation_of(after)))
    assert removed.patch is None, "an annotation that is removed asks for nothing"


async def test_edited_token_is_followed_and_not_replaced() -> None:
    secret = edited(stored_secret("monday"), "mine")
    after = patched(secret, await find_step(OneSecret(secret), served("monday", rotation_of(secret))))
    assert token_of(after) == "mine"
    assert rotation_of(after) != rotation_of(secret)
    step = await find_step(OneSecret(after), served("monday", rotation_of(secret)))
    assert (step.rotation, step.patch) == (rotation_of(after), None)
    again = edited(after, "other")
    twice = patched(again, await find_step(OneSecret(again), served("monday", rotation_of(after))))
    assert len({rotation_of(version) for version in (secret, after, twice)}) == 3


async def test_annotation_after_an_edit_follows_the_edit_at_once() -> None:
    secret, tokens = stored_secret("monday"), KnownTokens()
    api = OneSecret(secret)
    await find_step(api, served("monday", rotation_of(secret)), tokens)
    api.secret = edited(secret, "mine")
    seen = await find_step(api, served("monday", rotation_of(secret)), tokens)
    assert (seen.patch, api.reads) == (None, 1), "not read again yet"
    after = patched(api.secret, await find_step(api, served("tuesday", rotation_of(secret)), tokens))
    assert (token_of(after), rotation_of(after)) == ("mine", digest_rotation_request(as_service(annotated("tuesday"))))
    assert (await find_step(OneSecret(after), served("tuesday", rotation_of(after)))).patch is None


async def test_annotation_of_the_secret_replaces_its_token_and_is_removed() -> None:
    secret = noted(stored_secret(), **{"rotate-token": "now", "note": "kept"})
    after = patched(secret, await find_step(OneSecret(secret), served(None)))
    assert token_of(after) != "first"
    assert rotation_of(after)
    assert ROTATE_TOKEN not in after["metadata"]["annotations"]
    assert after["metadata"]["annotations"][f"{GROUP}/note"] == "kept"
    assert (await find_step(OneSecret(after), served(None, rotation_of(after)))).patch is None


@pytest.mark.parametrize(
    "data",
    [{"data": {"token": token}} for token in ("", "Cg==", "//4AYmlu", "dHdvIHdvcmRz", "QUFB" * 9000)]
    + [{"data": None}],
    ids=["empty", "newline", "bytes", "two words", "longer than the head of a request", "none"],
)
async def test_token_that_no_client_can_send_is_replaced(data: Obj) -> None:
    secret = stored_secret() | data
    after = patched(secret, await find_step(OneSecret(secret), served(None)))
    assert len(token_of(after)) >= 40
    assert rotation_of(after), "engines without a key would serve everybody"


async def test_edit_is_found_within_ten_minutes_without_an_event() -> None:
    secret, tokens = stored_secret(), KnownTokens()
    api = OneSecret(secret)
    step = await find_step(api, served(None), tokens)
    assert step.again_seconds is not None
    assert 300 <= step.again_seconds <= 600
    api.secret = edited(secret, "mine")
    early = await find_step(api, served(None), tokens, after=timedelta(seconds=299))
    assert (early.patch, api.reads) == (None, 1)
    late = await find_step(api, served(None), tokens, after=timedelta(seconds=step.again_seconds))
    assert (late.patch is not None, api.reads) == (True, 2)


async def test_secret_of_a_service_that_waits_is_read_when_it_starts() -> None:
    secret, tokens = stored_secret(), KnownTokens()
    api = OneSecret(secret)
    for minutes in (0, 20, 40):
        step = await find_step(api, served(None), tokens, after=timedelta(minutes=minutes), waits=True)
        assert step.again_seconds is not None
        assert 300 <= step.again_seconds <= 600, "its place is reported then"
    api.secret = edited(secret, "mine")
    assert api.reads == 1
    started = await find_step(api, served(None), tokens, after=timedelta(minutes=41))
    assert (started.patch is not None, api.reads) == (True, 2)


async def test_secret_is_read_at_once_if_a_probe_found_an_edit() -> None:
    tokens = KnownTokens()
    observe = service_reconciler(plain_sources()._replace(tokens=tokens)).observe
    assert observe is not None
    api = OneSecret(stored_secret())
    for reads in (1, 1, 2):
        if reads > 1:
            tokens.read_again(KEY)
        await observe(api, Snapshot(store((INFERENCE_SERVICES, served(None))), NOW), KEY)
        assert api.reads == reads


async def test_secrets_that_a_new_leader_reads_at_once_are_read_again_one_after_the_other() -> None:
    due = set()
    for number in range(100):
        obj = served(None)
        obj["metadata"] |= {"uid": f"uid-{number}"}
        _, secret = token_secret(as_service(obj), "first")
        step = await find_step(OneSecret(secret), obj)
        due.add(int((step.again_seconds or 0) / 30))
    assert len(due) == 10, "in each half minute of the five, some"


async def test_secret_that_was_deleted_is_replaced_and_its_replicas_follow() -> None:
    obj = served("monday", "abc")
    step = await find_step(OneSecret(None), obj)
    assert step.new_token
    _, made = token_secret(as_service(obj), step.new_token, step.rotation)
    assert rotation_of(made) == step.rotation != ""
    stored = made | {"metadata": {"uid": "uid-secret", "resourceVersion": "7", **made["metadata"]}}
    tokens = KnownTokens()
    tokens.remember(SECRETS, stored)
    followed = await find_step(OneSecret(None), served("monday", step.rotation), tokens)
    assert (followed.new_token, followed.rotation, followed.patch) == (None, "", None)


async def test_secret_of_another_owner_is_not_used() -> None:
    foreign = stored_secret()
    foreign["metadata"]["ownerReferences"][0]["uid"] = "uid-other"
    step = await find_step(OneSecret(foreign), served("monday"))
    assert (bool(step.new_token), step.patch) == (True, None)


async def test_secret_that_may_not_be_read_is_to_be_created_so_that_the_refusal_is_reported() -> None:
    class Closed(OneSecret):
        async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
            raise Forbidden(f"get {resource} {namespace}/{name}", status=403)

    step = await find_step(Closed(None), served(None))
    assert step.new_token
    assert step._replace(new_token=None) == TokenStep()


async def find_token(api: Client, tokens: KnownTokens, rotation: str = "", uid: str = "uid-chat") -> str | None:
    return await tokens.find_token(api, SECRET, uid, rotation)


async def test_hosts_get_the_token_of_a_new_service_without_a_read() -> None:
    secret, tokens, nothing = stored_secret(), KnownTokens(), OneSecret(None)
    tokens.remember(SECRETS, secret)
    assert await find_token(nothing, tokens) == secret["data"]["token"]
    assert nothing.reads == 0


@pytest.mark.parametrize("hosts_first", [False, True])
async def test_secret_is_read_once_for_its_service_and_all_hosts(*, hosts_first: bool) -> None:
    api, tokens = OneSecret(stored_secret()), KnownTokens()
    looks = [find_step(api, served(None), tokens), *(find_token(api, tokens) for _ in range(3))]
    for look in reversed(looks) if hosts_first else looks:
        await look
    assert api.reads == 1
    tokens.restart()
    await find_token(api, tokens)
    assert api.reads == 2, "another leader may have written it"


async def test_edit_that_a_host_met_is_followed_at_the_next_reconcile_of_the_service() -> None:
    api, tokens = OneSecret(stored_secret()), KnownTokens()
    await find_step(api, served(None), tokens)
    api.secret = edited(stored_secret(), "mine")
    assert await find_token(api, tokens, "of another replacement") == api.secret["data"]["token"]
    step = await find_step(api, served(None), tokens)
    assert step.patch is not None


async def test_hosts_get_a_replaced_token_once_it_was_written() -> None:
    secret, tokens = stored_secret(), KnownTokens()
    api = OneSecret(secret)
    api.secret = patched(secret, await find_step(api, served("monday"), tokens))
    tokens.remember(SECRETS, api.secret)
    reads = api.reads
    assert await find_token(api, tokens, rotation_of(api.secret)) == api.secret["data"]["token"]
    assert api.reads == reads


@pytest.mark.parametrize("owner_uid", [None, "uid-other"])
async def test_hosts_get_no_token_of_another_owner(owner_uid: str | None) -> None:
    foreign = stored_secret()
    foreign["metadata"]["ownerReferences"][0]["uid"] = owner_uid
    tokens = KnownTokens()
    tokens.remember(SECRETS, stored_secret())
    api = OneSecret(foreign if owner_uid else None)
    assert await find_token(api, tokens, "of another replacement") is None
    assert await find_token(api, tokens) is None, "what was known is disproved"
    assert (await find_step(api, served(None), tokens)).new_token


@pytest.mark.parametrize("owner_uid", [None, "uid-other"])
async def test_hosts_get_no_token_that_the_service_found_deleted(owner_uid: str | None) -> None:
    foreign = stored_secret()
    foreign["metadata"]["ownerReferences"][0]["uid"] = owner_uid
    api, tokens = OneSecret(stored_secret()), KnownTokens()
    await find_step(api, served(None), tokens)
    api.secret = foreign if owner_uid else None
    assert (await find_step(api, served(None), tokens, after=timedelta(minutes=11))).new_token
    assert await find_token(api, tokens) is None


async def test_hosts_of_a_former_service_get_no_token_of_its_successor() -> None:
    api, tokens = OneSecret(stored_secret()), KnownTokens()
    await find_step(api, served(None), tokens)
    assert await find_token(api, tokens, uid="uid-former") is None
    assert await find_token(OneSecret(None), tokens) is not None, "the successor's is known still"


async def test_token_of_a_service_that_is_gone_is_not_kept() -> None:
    tokens = KnownTokens()
    tokens.remember(SECRETS, stored_secret())
    tokens.forget(KEY)
    assert await find_token(OneSecret(None), tokens) is None


async def test_answer_that_is_older_than_a_write_is_not_kept() -> None:
    api, tokens = SlowSecret(stored_secret()), KnownTokens()
    after = noted(edited(stored_secret(), "mine"), **{"token-rotation": "r2"})
    after = patched(after, await find_step(OneSecret(after), served("monday")))
    reading = asyncio.ensure_future(find_token(api, tokens))
    await asyncio.sleep(0)
    tokens.remember(SECRETS, after)
    await reading
    assert await find_token(OneSecret(None), tokens, rotation_of(after)) == after["data"]["token"]


def decided(obj: Obj, token: TokenStep) -> Plan:
    cluster = store((INFERENCE_SERVICES, obj), (MODELS, model()))
    return decide_service(Snapshot(cluster, NOW, ServiceInputs(token=token)), KEY)


def rotation_of_pods(plan: Plan) -> str | None:
    ((deployment),) = list_applied(plan, DEPLOYMENTS)
    rotation: str | None = deployment["spec"]["template"]["metadata"]["annotations"].get(TOKEN_ROTATION)
    return rotation


def test_pods_are_replaced_after_the_secret() -> None:
    done = decided(annotated("monday"), TokenStep(rotation="abc"))
    assert done.status is not None
    assert (done.status["tokenRotation"], rotation_of_pods(done)) == ("abc", None)
    assert done.again_seconds == 1
    rolled = decided(annotated("monday", "abc"), TokenStep())
    assert rotation_of_pods(rolled) == "abc"
    assert rolled.status is not None
    assert rolled.status["tokenRotation"] == "abc"


def test_service_whose_token_was_never_replaced_is_not_rolled() -> None:
    plan = decided(annotated(None), TokenStep())
    assert rotation_of_pods(plan) is None
    assert plan.status is not None
    assert "tokenRotation" not in plan.status
