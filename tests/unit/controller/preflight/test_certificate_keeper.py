"""Secret and configuration heal by themselves, whatever is lost, damaged or cut off, and one replica writes them."""

import asyncio
import base64
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from controller.preflight.certificate_keeper import (
    DATA_KEY,
    NAME,
    PATH,
    READ_SECONDS,
    WEBHOOK,
    CertificateKeeper,
    load_certificate,
)
from controller.preflight.webhook_certificates import (
    RENEWED_BEFORE_END,
    SETTLE_TIME,
    VALID_FOR,
    WebhookCertificate,
    choose_certificate,
    decode_certificates,
    encode_certificates,
)
from controller.reconcile.plan import Leading
from kube.client import Client, Obj
from kube.errors import Conflict, LeadershipLost, NotFound, Unreachable
from kube.events import EventRecorder
from kube.resources import SECRETS, WEBHOOK_CONFIGURATIONS, Resource
from kube.store import Store
from tests.support import virtual_time
from tests.support.background import running

DNS_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
FOREIGN_WEBHOOK = {"name": "other.example", "clientConfig": {"url": "https://a.example"}}


class PreflightApi(Client):
    """An API server with the Secret and the configuration as the chart makes them."""

    def __init__(self) -> None:
        self.objects: dict[Resource, Obj] = {}
        self.writes: list[Resource] = []
        self.refuse: Callable[[Resource], None] = lambda _resource: None
        """Called before each write."""
        self.put(SECRETS, {"type": "Opaque"})
        config = {"service": {"namespace": "pomona-system", "name": NAME, "port": 443}}
        self.put(WEBHOOK_CONFIGURATIONS, {"webhooks": [FOREIGN_WEBHOOK, {"name": WEBHOOK, "clientConfig": config}]})

    def put(self, resource: Resource, body: Obj) -> None:
        metadata = {"name": NAME, "uid": f"uid-{len(self.writes)}", "resourceVersion": f"{len(self.writes)}"}
        self.objects[resource] = {**body, "metadata": metadata}

    async def get(self, resource: Resource, name: str, _namespace: str | None = None) -> Obj:
        await asyncio.sleep(0)
        assert name == NAME
        if resource not in self.objects:
            raise NotFound("get", status=404)
        return deepcopy(self.objects[resource])

    async def apply(self, resource: Resource, obj: Mapping[str, Any], **_: Any) -> Obj:
        await asyncio.sleep(0)
        self.refuse(resource)
        known = self.objects.get(resource, {"metadata": {}})
        for key in ("uid", "resourceVersion"):
            if obj["metadata"].get(key, known["metadata"].get(key)) != known["metadata"].get(key):
                raise Conflict("apply", status=409)
        self.writes.append(resource)
        if resource == SECRETS:
            self.put(resource, {"type": obj["type"], "data": obj["data"]})
        else:
            (change,) = obj["webhooks"]
            for segment in change["clientConfig"]["service"]["path"].strip("/").split("/"):
                assert DNS_LABEL.fullmatch(segment), "the API server takes no other path"
            merged = deepcopy(known["webhooks"])
            config = next(each for each in merged if each["name"] == change["name"])["clientConfig"]
            config["caBundle"] = change["clientConfig"]["caBundle"]
            config["service"] |= change["clientConfig"]["service"]
            self.put(resource, {"webhooks": merged})
        return deepcopy(self.objects[resource])

    def store_secret(self, certificates: list[WebhookCertificate]) -> None:
        data = base64.b64encode(encode_certificates(certificates)).decode()
        self.put(SECRETS, {"type": "Opaque", "data": {DATA_KEY: data}})

    @property
    def stored(self) -> tuple[WebhookCertificate, ...]:
        return decode_certificates(base64.b64decode(self.objects[SECRETS]["data"][DATA_KEY]))

    @property
    def configured(self) -> tuple[str, str]:
        """Certificates that API servers trust, and the path at which they ask."""
        config = self.objects[WEBHOOK_CONFIGURATIONS]["webhooks"][1]["clientConfig"]
        return base64.b64decode(config.get("caBundle", "")).decode(), config["service"].get("path", "")


class Cluster:
    """Two replicas, of which the first leads, and their clock."""

    def __init__(self, api: PreflightApi) -> None:
        self.api = api
        self.start = NOW
        self.replicas = [CertificateKeeper(self.read_clock) for _ in range(2)]

    def read_clock(self) -> datetime:
        return self.start + timedelta(seconds=asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def running(self, require_leadership: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        leading = Leading(
            self.api, Store(), EventRecorder(self.api, "a", "a"), lambda _resource, _key: None, require_leadership
        )
        async with running(*(each.follow(self.api) for each in self.replicas), self.replicas[0].renew(leading)):
            yield

    async def pass_rounds(self, number: int = 3) -> None:
        await asyncio.sleep(number * READ_SECONDS)

    def check_health(self) -> None:
        """Check that API servers trust what both replicas serve, and ask at a path that both know."""
        trusted, path = self.api.configured
        served = choose_certificate(self.api.stored, self.read_clock())
        assert served is not None
        assert served.certificate in trusted
        assert path == f"{PATH}{served.token}"
        for each in self.replicas:
            assert each.loaded.is_set()
            assert each.knows_path(path)
            assert not each.knows_path(PATH)
            assert handshake(each.context, trusted)


def handshake(context: ssl.SSLContext, trusted: str) -> bool:
    """Return whether a client that trusts these certificates accepts what a server's context serves, in memory."""
    trust = ssl.create_default_context(cadata=trusted)
    trust.check_hostname, trust.verify_flags = False, trust.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = context.wrap_bio(up, down, server_side=True), trust.wrap_bio(down, up)
    waiting = {client, server}
    for side in (client, server) * 3:
        try:
            side.do_handshake()
            waiting.discard(side)
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            # The clock of the library is the machine's, and not the test's.
            return error.verify_message in {"certificate has expired", "certificate is not yet valid"}
    return not waiting


def run(test: Callable[[Cluster], Any], api: PreflightApi | None = None) -> PreflightApi:
    cluster = Cluster(api or PreflightApi())

    async def main() -> None:
        async with cluster.running():
            await test(cluster)

    virtual_time.run(main())
    return cluster.api


async def settle(cluster: Cluster) -> None:
    await cluster.pass_rounds()
    cluster.check_health()


def test_leader_makes_a_certificate_and_all_replicas_serve_it() -> None:
    api = run(settle)
    assert api.writes == [SECRETS, WEBHOOK_CONFIGURATIONS], "nothing is written that did not change"
    assert api.objects[WEBHOOK_CONFIGURATIONS]["webhooks"][0] == FOREIGN_WEBHOOK


def test_restart_keeps_the_certificate() -> None:
    api = run(settle)
    before = api.stored
    run(settle, api)
    assert api.stored == before
    assert len(api.writes) == 2


def damage(api: PreflightApi) -> None:
    api.put(SECRETS, {"type": "Opaque", "data": {DATA_KEY: "bm9uc2Vuc2U="}})


def damage_base64(api: PreflightApi) -> None:
    api.put(SECRETS, {"type": "Opaque", "data": {DATA_KEY: "!"}})


def exchange_key(api: PreflightApi) -> None:
    (found,) = api.stored
    broken = WebhookCertificate(found.certificate, found.certificate, found.token, found.made_at, found.expires_at)
    api.store_secret([broken])


def expire(api: PreflightApi) -> None:
    (found,) = api.stored
    then = found.made_at - VALID_FOR
    api.store_secret([WebhookCertificate(found.certificate, found.key, found.token, then, found.made_at)])


def forget_trust(api: PreflightApi) -> None:
    config = api.objects[WEBHOOK_CONFIGURATIONS]["webhooks"][1]["clientConfig"]
    config.pop("caBundle")
    config["service"].pop("path")


@pytest.mark.parametrize(
    "harm", [damage, damage_base64, exchange_key, expire, forget_trust, lambda api: api.objects.pop(SECRETS)]
)
def test_harm_heals_by_itself(harm: Callable[[PreflightApi], object]) -> None:
    async def test(cluster: Cluster) -> None:
        await settle(cluster)
        harm(cluster.api)
        await settle(cluster)
        await cluster.pass_rounds()
        assert len(cluster.api.writes) <= 4
        assert cluster.api.objects[SECRETS]["type"] == "Opaque"

    run(test)


def test_certificate_is_renewed_for_years_without_a_gap() -> None:
    async def test(cluster: Cluster) -> None:
        await settle(cluster)
        for _ in range(3):
            (first,) = cluster.api.stored
            cluster.start = first.expires_at - RENEWED_BEFORE_END + timedelta(minutes=1) - passed()
            await settle(cluster)
            assert cluster.api.stored[0] == first
            assert cluster.api.configured[1].endswith(first.token), "a new one is not served before it is known"
            cluster.start += SETTLE_TIME
            await settle(cluster)
            assert cluster.api.configured[1].endswith(cluster.api.stored[1].token)
            cluster.start = first.expires_at - passed()
            await settle(cluster)
            assert first not in cluster.api.stored

    run(test)


def passed() -> timedelta:
    return timedelta(seconds=asyncio.get_running_loop().time())


@pytest.mark.parametrize("cut", [SECRETS, WEBHOOK_CONFIGURATIONS])
def test_crash_before_a_write_heals_under_the_next_leader(cut: Resource) -> None:
    api = PreflightApi()

    def crash(resource: Resource) -> None:
        if resource == cut:
            raise LeadershipLost

    api.refuse = crash
    with pytest.raises(ExceptionGroup):
        run(settle, api)
    assert api.writes == ([] if cut == SECRETS else [SECRETS])
    api.refuse = lambda _resource: None
    run(settle, api)
    assert api.writes == [SECRETS, WEBHOOK_CONFIGURATIONS]


def test_refused_write_is_tried_again_and_logged_once_without_secrets() -> None:
    api = PreflightApi()

    def refuse(_resource: Resource) -> None:
        raise Unreachable("apply: cut")

    async def test(cluster: Cluster) -> None:
        api.refuse = refuse
        await cluster.pass_rounds(5)
        assert api.writes == []
        api.refuse = lambda _resource: None
        await settle(cluster)

    with capture_logs() as logs:
        run(test, api)
    assert [each["event"] for each in logs].count("preflight_certificate_not_kept") == 1
    (found,) = api.stored
    for secret in (found.key, found.token):
        assert secret not in repr(logs)


def test_missing_configuration_is_named_with_the_way_out() -> None:
    api = PreflightApi()
    del api.objects[WEBHOOK_CONFIGURATIONS]

    async def test(cluster: Cluster) -> None:
        await cluster.pass_rounds()

    with capture_logs() as logs:
        run(test, api)
    (problem,) = [each for each in logs if each["event"] == "preflight_certificate_not_kept"]
    assert "preflight.enabled=true" in problem["way_out"]
    assert api.writes == [SECRETS], "a configuration that was deleted stays away"


def test_replica_that_has_lost_leadership_writes_nothing() -> None:
    def lost() -> None:
        raise LeadershipLost

    cluster = Cluster(PreflightApi())

    async def main() -> None:
        async with cluster.running(lost):
            await cluster.pass_rounds()

    with pytest.raises(ExceptionGroup):
        virtual_time.run(main())
    assert cluster.api.writes == []


def test_certificate_that_the_library_refuses_is_not_served() -> None:
    damaged = WebhookCertificate("nonsense", "nonsense", "0" * 20, NOW, NOW + VALID_FOR)
    with pytest.raises(OSError, match="PEM"):
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), damaged)


def test_text_longer_than_a_pipe_is_loaded() -> None:
    api = run(settle)
    (found,) = api.stored
    long = WebhookCertificate(found.certificate * 300, found.key, found.token, found.made_at, found.expires_at)
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), long)
