"""The meter with a real HTTP server, and its schedule in virtual time; only the source of the Secret is a stand-in."""

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from controller.placement.replacement import ReplacementRules
from controller.reconcile.plan import Leading
from controller.services import traffic_meter
from controller.services.endpoints import Endpoint
from controller.services.speed_watch import SpeedWatch
from controller.services.traffic import (
    LONE_SECONDS,
    LONE_TOKENS,
    REQUESTS,
    SECONDS,
    TOKENS,
    UNKNOWN_TRAFFIC,
    TokenSource,
    Traffic,
)
from controller.services.traffic_meter import TrafficMeter, TrafficTarget
from kube.client import Client, Obj
from kube.resources import ObjectKey, Resource
from kube.store import Store
from tests.support import virtual_time
from tests.support.background import running
from tests.support.eventually import eventually

KEY = ObjectKey("team", "chat")
UNREAD = Traffic(-1)


def write_series(requests: float, seconds: float) -> bytes:
    """Return the series of a proxy."""
    return f"{REQUESTS} {requests}\n{SECONDS} {seconds}\n".encode()


def write_tokens(number: float) -> bytes:
    """Return the series of a proxy without requests."""
    return f"{REQUESTS} 0\n{TOKENS} {number}\n".encode()


class Secrets(Client):
    """An API that has only the token Secret, and counts its reads."""

    def __init__(self) -> None:
        self.token = "first"
        self.reads = 0

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert (resource.plural, namespace) == ("secrets", "team")
        self.reads += 1
        owners = [{"uid": f"uid-{name.removesuffix('-token')}", "controller": True}]
        data = {"token": base64.b64encode(self.token.encode()).decode()}
        return {"metadata": {"name": name, "ownerReferences": owners}, "data": data}


class Pod:
    """A pod that counts two requests, of half a second, at each reading."""

    def __init__(self, secrets: Secrets) -> None:
        self.secrets = secrets
        self.readings = 0
        self.nonsense: bytes | None = None
        self.endpoint = Endpoint("127.0.0.1", 0)

    async def metrics(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.secrets.token}":
            return web.Response(status=401)
        self.readings += 1
        # With the series of its engine, the answer may be longer than the meter reads.
        assert request.query_string == "engine=false"
        if self.nonsense is not None:
            return web.Response(body=self.nonsense)
        return web.Response(body=write_series(2 * self.readings, self.readings))


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[Pod]:
    served = Pod(Secrets())
    app = web.Application()
    app.router.add_get("/metrics", served.metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.endpoint = Endpoint("127.0.0.1", runner.addresses[0][1])
    yield served
    await runner.cleanup()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BUSY_SECONDS", "IDLE_SECONDS", "LEAST_SECONDS"):
        monkeypatch.setattr(traffic_meter, name, 0.05)
    monkeypatch.setattr(traffic_meter, "STALE_SECONDS", 0.3)


def leading(client: Client, enqueued: list[ObjectKey]) -> Leading:
    recorder: Any = None
    return Leading(client, Store(), recorder, lambda _resource, key: enqueued.append(key))


def target(*endpoints: Endpoint) -> TrafficTarget:
    return TrafficTarget("uid-chat", endpoints)


def follow_chat(meter: TrafficMeter, followed: TrafficTarget) -> Traffic:
    """Follow a service as its decision does, and return its traffic; UNREAD if it was not read yet."""
    meter.follow(KEY, followed)
    return meter.find_traffic(KEY, followed.service_uid) or UNREAD


@pytest.mark.usefixtures("often")
async def test_service_is_enqueued_when_its_traffic_is_known(pod: Pod) -> None:
    meter, enqueued = TrafficMeter(), list[ObjectKey]()
    async with running(meter.run(leading(pod.secrets, enqueued))):
        assert follow_chat(meter, target(pod.endpoint)) == UNREAD
        await eventually(lambda: enqueued)
        traffic = follow_chat(meter, target(pod.endpoint))
    assert traffic.average_ms == 500
    assert traffic.requests_per_minute
    assert pod.secrets.reads == 1


@pytest.mark.usefixtures("often")
async def test_service_that_is_made_anew_has_not_the_traffic_of_its_predecessor(pod: Pod) -> None:
    meter, enqueued = TrafficMeter(), list[ObjectKey]()
    async with running(meter.run(leading(pod.secrets, enqueued))):
        meter.follow(KEY, target(pod.endpoint))
        await eventually(lambda: enqueued)
        assert meter.find_traffic(KEY, "uid-chat") is not None
        assert meter.find_traffic(KEY, "uid-later") is None
        meter.follow(KEY, TrafficTarget("uid-later", (pod.endpoint,)))
        assert meter.find_traffic(KEY, "uid-later") is None


@pytest.mark.usefixtures("often")
async def test_replaced_token_is_read_again(pod: Pod) -> None:
    meter = TrafficMeter()
    async with running(meter.run(leading(pod.secrets, []))):
        meter.follow(KEY, target(pod.endpoint))
        await eventually(lambda: pod.readings)
        pod.secrets.token = "second"
        readings = pod.readings
        await eventually(lambda: pod.readings > readings)
    assert pod.secrets.reads == 2


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "nonsense",
    [b"", b"<html>REQUESTS</html>", b"REQUESTS nan\n", b"x" * ((1 << 20) + 1) + b"\nREQUESTS 5\n"],
    ids=["empty", "HTML", "no number", "too long"],
)
async def test_traffic_of_pods_that_send_nonsense_is_unknown_after_a_time(pod: Pod, nonsense: bytes) -> None:
    meter, enqueued = TrafficMeter(), list[ObjectKey]()
    pod.nonsense = nonsense.replace(b"REQUESTS", REQUESTS.encode())
    async with running(meter.run(leading(pod.secrets, enqueued))):
        assert follow_chat(meter, target(pod.endpoint)) == UNREAD
        await eventually(lambda: pod.readings >= 2)
        await eventually(lambda: enqueued)
        assert follow_chat(meter, target(pod.endpoint)) == UNKNOWN_TRAFFIC


@pytest.mark.usefixtures("often")
async def test_pod_that_is_gone_hides_no_other(pod: Pod) -> None:
    meter, enqueued = TrafficMeter(), list[ObjectKey]()
    async with running(meter.run(leading(pod.secrets, enqueued))):
        meter.follow(KEY, target(Endpoint("127.0.0.1", 1), pod.endpoint))
        await eventually(lambda: enqueued)
        assert follow_chat(meter, target(pod.endpoint)) not in (UNREAD, UNKNOWN_TRAFFIC)


@pytest.fixture
def read_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Times at which pods are read, by their address; each of them counts 100 requests from one reading to the next."""
    read_at: dict[str, list[float]] = {}

    async def read(_session: object, endpoint: Endpoint, _token: str) -> bytes:
        times = read_at.setdefault(endpoint.address, [])
        times.append(asyncio.get_running_loop().time())
        return write_series(100 * len(times), 50 * len(times))

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)
    return read_at


async def follow(enqueued: list[ObjectKey], services: int = 50, pods: int = 1, minutes: float = 5) -> None:
    """Follow services for some time."""
    meter = TrafficMeter()
    for number in range(services):
        endpoints = tuple(Endpoint(f"10.{pod}.{number // 250}.{number % 250}", 8080) for pod in range(pods))
        meter.follow(ObjectKey("team", f"s{number}"), TrafficTarget(f"uid-s{number}", endpoints))
    async with running(meter.run(leading(Secrets(), enqueued))):
        await asyncio.sleep(60 * minutes)


def list_pauses(read_at: Mapping[str, list[float]]) -> set[int]:
    """Return the seconds between two readings of a pod."""
    return {round(later - earlier) for times in read_at.values() for earlier, later in itertools.pairwise(times)}


def test_services_with_requests_are_read_every_ten_seconds(read_at: dict[str, list[float]]) -> None:
    virtual_time.run(follow([]))
    assert list_pauses(read_at) == {10}
    assert len({round(times[0]) for times in read_at.values()}) > 20, "at different times"


def test_services_without_requests_are_read_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    read_at = list[float]()

    async def read(*_: object) -> bytes:
        now = asyncio.get_running_loop().time()
        read_at.append(now)
        # The controller asks one question in ten minutes by itself.
        return write_series(now // 600, now // 600)

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)
    enqueued = list[ObjectKey]()
    virtual_time.run(follow(enqueued, services=1, minutes=60))
    assert [round(later - earlier) for earlier, later in itertools.pairwise(read_at)][:3] == [10, 30, 30]
    assert len(enqueued) == 1, "own questions are no traffic"


@pytest.mark.parametrize(("services", "pods"), [(1000, 1), (10, 100)])
def test_many_pods_are_read_less_often(read_at: dict[str, list[float]], services: int, pods: int) -> None:
    virtual_time.run(follow([], services, pods))
    assert len(read_at) == 1000
    assert list_pauses(read_at) == {20}


def test_service_with_the_same_traffic_is_enqueued_once(read_at: dict[str, list[float]]) -> None:
    enqueued = list[ObjectKey]()
    virtual_time.run(follow(enqueued))
    assert len(enqueued) == len(set(enqueued)) == len(read_at) == 50


def test_traffic_that_changes_all_the_time_is_written_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(*_: object) -> bytes:
        now = asyncio.get_running_loop().time()
        return write_series(now**2, now)

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)
    enqueued = list[ObjectKey]()
    virtual_time.run(follow(enqueued, services=1, minutes=60))
    assert 10 < len(enqueued) <= 60


def test_service_with_a_silent_pod_is_read_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    read_at = list[float]()

    async def read(_session: object, endpoint: Endpoint, *_: object) -> bytes | None:
        now = asyncio.get_running_loop().time()
        if endpoint.address.startswith("10.1."):
            return None
        read_at.append(now)
        return write_series(now, now)

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)
    virtual_time.run(follow([], services=1, pods=2, minutes=60))
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(read_at)]
    assert (pauses[:6], max(pauses)) == ([20, 40, 80, 160, 300, 300], 300)


def test_tokens_are_counted_over_a_minute_and_reported_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueued = list[tuple[float, ObjectKey]]()

    async def read(*_: object) -> bytes:
        now = asyncio.get_running_loop().time()
        return write_tokens(10 * now if now < 3000 else 30_000 + 20 * (now - 3000))

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)

    async def main() -> Traffic:
        meter = TrafficMeter()
        chat = TrafficTarget("uid-chat", (Endpoint("10.0.0.1", 8080),))
        meter.follow(KEY, chat)
        recorder: Any = None
        loop = asyncio.get_running_loop()
        follower = Leading(Secrets(), Store(), recorder, lambda _resource, key: enqueued.append((loop.time(), key)))
        async with running(meter.run(follower)):
            await asyncio.sleep(2900)
            assert follow_chat(meter, chat).fields() == {"requestsPerMinute": 0, "tokensPerSecond": "10.0"}
            assert len(enqueued) == 1
            await asyncio.sleep(1000)
            return follow_chat(meter, chat)

    assert virtual_time.run(main()).tokens_per_second == pytest.approx(20, rel=0.11)
    first, *others = (at for at, _ in enqueued)
    assert first < 45
    assert 3000 < others[0] < 3030, "a change after a quiet minute is seen at once"
    assert len(others) <= 3


def test_tokens_are_shown_by_node_and_no_longer_than_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = dict[ObjectKey, Mapping[TokenSource, float]]()
    silent = False

    async def read(_session: object, endpoint: Endpoint, *_: object) -> bytes | None:
        rate = {"10.0.0.1": 3, "10.0.0.2": 4, "10.0.0.3": 5}[endpoint.address]
        return None if silent else write_tokens(rate * asyncio.get_running_loop().time())

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)
    pods = tuple(Endpoint(f"10.0.0.{number}", 8080, node=f"gpu-{number // 3}") for number in (1, 2, 3))
    expected = {
        TokenSource("team", "qwen", "vllm", "gpu-0"): pytest.approx(7),
        TokenSource("team", "qwen", "vllm", "gpu-1"): pytest.approx(5),
    }

    async def main() -> None:
        nonlocal silent
        meter = TrafficMeter(shown.__setitem__)
        meter.follow(KEY, TrafficTarget("uid-chat", pods, "qwen", "vllm"))
        async with running(meter.run(leading(Secrets(), []))):
            await asyncio.sleep(100)
            assert shown == {KEY: expected}
            silent = True
            await asyncio.sleep(120)
            assert shown == {KEY: expected}
            await asyncio.sleep(480)
            assert shown == {KEY: {}}
            silent = False
            await asyncio.sleep(400)
            assert shown == {KEY: expected}
            meter.forget(KEY)
            assert shown == {KEY: {}}

    virtual_time.run(main())


def watch_lone_streams(monkeypatch: pytest.MonkeyPatch, speed: float, hours: float) -> tuple[SpeedWatch, list[float]]:
    """Read a pod whose lone streams have this speed, of which 100 tokens/s are expected."""
    read_at, tokens = list[float](), [0.0]
    watch = SpeedWatch(ReplacementRules(), lambda _key: None)

    async def read(*_: object) -> bytes:
        read_at.append(asyncio.get_running_loop().time())
        tokens[0] += 600
        return write_tokens(tokens[0]) + f"{LONE_TOKENS} {tokens[0]}\n{LONE_SECONDS} {tokens[0] / speed}\n".encode()

    monkeypatch.setattr(traffic_meter, "_read_metrics", read)

    async def main() -> None:
        meter, endpoint = TrafficMeter(watch=watch), Endpoint("10.0.0.1", 8080, node="a")
        watch.follow(KEY, {endpoint: 100.0})
        meter.follow(KEY, TrafficTarget("uid-chat", (endpoint,)))
        async with running(meter.run(leading(Secrets(), []))):
            await asyncio.sleep(hours * 3600)

    virtual_time.run(main())
    return watch, read_at


def test_watch_over_the_speed_costs_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, read_at = watch_lone_streams(monkeypatch, 95.0, 1)
    assert {round(later - earlier) for earlier, later in itertools.pairwise(read_at)} == {10}
    assert watch.follow(KEY, {Endpoint("10.0.0.1", 8080, node="a"): 100.0}).healthy == ("node/a",)


@pytest.mark.parametrize(("minutes", "is_known"), [(4, False), (7, True)])
def test_speed_is_read_over_five_minutes(monkeypatch: pytest.MonkeyPatch, minutes: float, *, is_known: bool) -> None:
    watch, _ = watch_lone_streams(monkeypatch, 50.0, minutes / 60)
    slow = watch.follow(KEY, {Endpoint("10.0.0.1", 8080, node="a"): 100.0}).slow
    assert [(place.place, round(place.observed)) for place in slow] == ([("node/a", 50)] if is_known else [])
