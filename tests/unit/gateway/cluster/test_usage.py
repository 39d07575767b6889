"""Usage by key and service: bounded, counted, and as the documented series."""

import asyncio
import re

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.cluster.gateway_process import build_health
from gateway.cluster.usage import MOST_LABEL_SETS, USAGE_PATH, KeyTotal, ReplicaUsage, UsageTable, render_usage
from gateway.http.whole_answers import serve_answers
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.metrics import render_in_turns, render_metrics
from gateway.proxy.service import Service
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, ObjectKey
from tests.controlplane.process import CHECKOUT
from tests.unit.gateway.cluster.running_gateway import AUTHORIZED, SECRET, RunningGateway, digest
from tests.unit.gateway.proxy.running_proxy import fake_engine, make_service


def test_usage_is_counted_by_key_and_service() -> None:
    table = UsageTable()
    key = KeyTotal("team-a", "ci")
    table.count(key, "team-b/tiny", prompt_tokens=10, generated_tokens=3)
    table.count(key, "team-b/tiny", prompt_tokens=5, generated_tokens=0)
    table.count(key, "small", prompt_tokens=1, generated_tokens=1)
    assert (key.requests, key.tokens) == (3, 20)
    assert msgspec.to_builtins(table.list_usages()) == [
        {"namespace": "team-a", "key": "ci", "service": "team-b/tiny"}
        | {"requests": 2, "prompt_tokens": 15, "generated_tokens": 3},
        {"namespace": "team-a", "key": "ci", "service": "small"}
        | {"requests": 1, "prompt_tokens": 1, "generated_tokens": 1},
    ]
    assert (
        'pomona_gateway_key_prompt_tokens_total{key="ci",namespace="team-a",service="team-b/tiny"} 15.0\n'
        in "".join(table.list_series())
    )


def test_label_sets_are_bounded_and_free_again() -> None:
    table = UsageTable()
    for number in range(MOST_LABEL_SETS + 50):
        table.count(KeyTotal("team-a", f"key-{number}"), "tiny", prompt_tokens=1, generated_tokens=1)
    assert len(table.list_usages()) == MOST_LABEL_SETS + 1
    assert table.list_usages()[-1] == msgspec.structs.replace(
        table.list_usages()[-1], namespace="other", key="other", service="other", requests=50
    )
    for namespace, key in (("team-a", "key-7"), ("team-a", "key-8"), ("team-b", "key-9")):
        table.forget_key(namespace, key)
    assert len(table.list_usages()) == MOST_LABEL_SETS - 1
    table.count(KeyTotal("team-a", "new"), "tiny", prompt_tokens=1, generated_tokens=1)
    assert table.list_usages()[-1].key == "new"


def test_total_has_no_bound_of_keys_and_an_engine_cannot_spoil_the_answer() -> None:
    """The controller reads no answer in which one number is too large."""
    table, totals = UsageTable(), {f"uid-{number}": KeyTotal("team-a", f"key-{number}") for number in range(10_000)}
    for total in totals.values():
        table.count(total, "tiny", prompt_tokens=1 << 53, generated_tokens=1 << 53)
    text = render_usage(totals.items())
    assert len(msgspec.json.decode(text, type=ReplicaUsage).keys) == 10_000


def test_documented_metrics_are_those_that_only_the_gateway_has() -> None:
    table = UsageTable()
    table.count(KeyTotal("team-a", "ci"), "tiny", prompt_tokens=1, generated_tokens=1)
    service = Service(make_service(name="team-a/tiny"), InFlight(lambda _: None))
    of_proxy = {family.name for family in families(render_metrics({"team-a/tiny": service}, "pomona_gateway"))}
    service.metrics.fallbacks["NoCapacity"] += 1
    of_keys = "".join(table.list_series()).encode()
    served = {
        f"{family.name}_total": {label for sample in family.samples for label in sample.labels}
        for family in families(render_metrics({"team-a/tiny": service}, "pomona_gateway") + of_keys)
        if family.name not in of_proxy
    }
    page = (CHECKOUT / "docs" / "metrics.md").read_text()
    section = page.partition("## Metrics of the gateway\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    assert {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[3])) for row in rows} == served


def families(text: bytes) -> list[Metric]:
    return list(text_string_to_metric_families(text.decode()))


async def test_usage_has_the_total_of_a_key_by_uid_as_long_as_it_exists(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    """A key that gets the name of a deleted one has not used what that one has."""

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": 5}
        return web.json_response({"choices": [{"message": {"content": "x"}}], "model": "chat", "usage": usage})

    cluster = gateway.cluster
    async with (
        fake_engine(answer) as backend,
        serve_answers(build_health(cluster.feed, asyncio.Event()), "127.0.0.1", 0) as (_, port),
    ):

        async def read_usage() -> ReplicaUsage:
            async with http.get(f"http://127.0.0.1:{port}{USAGE_PATH}") as response:
                return msgspec.json.decode(await response.read(), type=ReplicaUsage)

        async def ask() -> None:
            body = {"model": "chat", "messages": []}
            async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=AUTHORIZED) as response:
                assert response.status == 200
                await response.read()

        cluster.put_key()
        cluster.put_key(name="idle", secret="pomona-another-secret-that-is-long")
        cluster.serve("team-a", "chat", backend.url)
        for _ in range(2):
            await ask()
        usage = await read_usage()
        assert usage.keys.keys() == {"uid-of-team-a-ci"}
        count = usage.keys["uid-of-team-a-ci"]
        assert (count.requests, count.tokens) == (2, 24)

        cluster.remove(GATEWAY_KEYS, "team-a", "ci")
        cluster.put(GATEWAY_KEYS, "team-a", "ci", uid="another", spec={}, status={"digest": digest(SECRET)})
        assert (await read_usage()) == ReplicaUsage(usage.replica, {})
        await ask()
        assert (await read_usage()).keys["another"].requests == 1

        table = cluster.feed.admissions.usage
        assert [usage.service for usage in table.list_usages()] == ["team-a/chat"]
        cluster.remove(INFERENCE_SERVICES, "team-a", "chat")
        assert table.list_usages() == [], "a service for each pull request would take all places"


async def test_written_usage_keeps_what_a_key_has_found(gateway: RunningGateway) -> None:
    """The controller writes up to five keys a second, each of which may list thousands of services."""
    cluster = gateway.cluster
    cluster.serve("team-a", "chat", "http://127.0.0.1:1")
    status = {"digest": digest(SECRET)}
    cluster.put(GATEWAY_KEYS, "team-a", "ci", spec={}, status=status)
    key = cluster.feed.keys.keys[ObjectKey("team-a", "ci")]
    listed = key.list_models()
    cluster.put(GATEWAY_KEYS, "team-a", "ci", spec={}, status=status | {"usage": {"requests": 1}})
    assert key.list_models() is listed


async def test_other_work_goes_on_while_series_are_rendered() -> None:
    rendering = asyncio.ensure_future(render_in_turns(["a"] * 1000))
    turns = 0
    while not rendering.done():
        turns += 1
        await asyncio.sleep(0)
    assert rendering.result() == b"a" * 1000
    assert turns > 50
