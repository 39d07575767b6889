"""Usage by key and service: bounded, as series and as a plain structure."""

import msgspec

from gateway.cluster.usage import MOST_LABEL_SETS, UsageTable


def test_usage_is_counted_by_key_and_service() -> None:
    table = UsageTable()
    table.count("team-a", "ci", "team-b/tiny", prompt_tokens=10, generated_tokens=3)
    table.count("team-a", "ci", "team-b/tiny", prompt_tokens=5, generated_tokens=0)
    table.count("team-a", "ci", "small", prompt_tokens=1, generated_tokens=1)
    assert msgspec.to_builtins(table.list_usages()) == [
        {"namespace": "team-a", "key": "ci", "service": "team-b/tiny"}
        | {"requests": 2, "prompt_tokens": 15, "generated_tokens": 3},
        {"namespace": "team-a", "key": "ci", "service": "small"}
        | {"requests": 1, "prompt_tokens": 1, "generated_tokens": 1},
    ]
    assert (
        'pomona_gateway_key_prompt_tokens_total{key="ci",namespace="team-a",service="team-b/tiny"} 15.0\n'
        in table.render_metrics().decode()
    )


def test_label_sets_are_bounded_and_free_again() -> None:
    table = UsageTable()
    for number in range(MOST_LABEL_SETS + 50):
        table.count("team-a", f"key-{number}", "tiny", prompt_tokens=1, generated_tokens=1)
    assert len(table.list_usages()) == MOST_LABEL_SETS + 1
    assert table.list_usages()[-1] == msgspec.structs.replace(
        table.list_usages()[-1], namespace="other", key="other", service="other", requests=50
    )
    for namespace, key in (("team-a", "key-7"), ("team-a", "key-8"), ("team-b", "key-9")):
        table.forget_key(namespace, key)
    assert len(table.list_usages()) == MOST_LABEL_SETS - 1
    table.count("team-a", "new", "tiny", prompt_tokens=1, generated_tokens=1)
    assert table.list_usages()[-1].key == "new"
