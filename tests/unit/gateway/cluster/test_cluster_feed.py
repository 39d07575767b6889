"""Objects that are not as the gateway expects: one odd object costs no other anything."""

import base64

import msgspec

from crds.meta import PREVIOUS_TOKENS_KEY
from gateway.cluster.catalog import ServiceTokens
from gateway.cluster.cluster_feed import ClusterFeed, read_tokens
from gateway.cluster.limiter import Limiter
from gateway.cluster.token_estimate import estimate_tokens
from gateway.cluster.watched_objects import SELECTIONS, WatchedShard
from gateway.proxy.request_body import read_short_body
from kube.resources import GATEWAY_KEYS, ObjectKey


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_key_of_a_newer_release_admits_nobody_and_hides_no_other() -> None:
    feed = ClusterFeed(Limiter())
    (selection,) = (selection for selection in SELECTIONS if selection.resource == GATEWAY_KEYS)
    assert selection.read
    for name, overlap_seconds, version in (("new", 10**12, "1"), ("old", 60, "2")):
        metadata = {"namespace": "team-a", "name": name, "uid": name, "resourceVersion": version}
        key = {"metadata": metadata, "spec": {"overlapSeconds": overlap_seconds}, "status": {"digest": name}}
        feed._store.put(GATEWAY_KEYS, selection.read(msgspec.Raw(msgspec.json.encode(key))))
    assert list(feed.keys.keys) == [ObjectKey("team-a", "old")]


def test_odd_entry_of_a_shard_leaves_the_others() -> None:
    data = {
        "team-a_chat_token": encode("t"),
        "future": encode("x"),
        "team-b_chat_token": "no base64",
        PREVIOUS_TOKENS_KEY: encode("no JSON"),
    }
    shard = msgspec.convert({"metadata": {"name": "pomona-gateway-0"}, "data": data}, WatchedShard)
    assert read_tokens(shard) == {ObjectKey("team-a", "chat"): ServiceTokens("t")}


def test_long_list_of_prompts_is_counted_without_being_decoded() -> None:
    for prompt, prompts in (
        ([1] * 5000, 1),
        ("[1, 2]", 1),
        (["a", "b"], 2),
        ([[1, 2], [3]], 2),
        ([], 1),
        (["a"] * 30_000, 29_999),
    ):
        content = msgspec.json.encode({"model": "chat", "prompt": prompt, "max_tokens": 10})
        body = read_short_body(content)
        assert body
        answers = estimate_tokens("completions", body, None) - -(-len(content) // 3)
        assert answers == 10 * prompts
