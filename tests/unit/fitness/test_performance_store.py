"""Measurements survive ConfigMaps as they are, damaged ones cost only themselves, and no object becomes too large."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitness.performance import MeasuredPerformance
from fitness.performance_store import (
    LABEL_MODEL_HASH,
    PerformanceTable,
    RecordKey,
    build_config_map,
    build_flexinfer_export,
    decode_records,
    encode_record,
    find_model_hash,
    limit_host_records,
    put_host_record,
    put_record,
)

HASH = "3f9a0c51d2e84b77"
H100 = "nvidia-h100-80gb-hbm3x1"
FAST = MeasuredPerformance(tokens_per_second=112.4, model="llama", measured_at="2026-11-26T10:00:00Z")
SLOW = MeasuredPerformance(tokens_per_second=7.5, model="llama", measured_at="2026-11-25T10:00:00Z")

speeds = st.floats(min_value=1e-3, max_value=1e8)
records = st.builds(
    MeasuredPerformance,
    tokens_per_second=speeds,
    runs=st.lists(speeds, max_size=5),
    prompt_tokens_per_second=st.none() | speeds,
    concurrency=st.dictionaries(st.integers(1, 64).map(str), speeds, max_size=6),
    model=st.text(max_size=40),
    measured_at=st.datetimes().map(lambda moment: moment.isoformat()),
)
keys = st.builds(
    RecordKey,
    st.from_regex(r"[a-z0-9][-.a-z0-9]{0,30}", fullmatch=True),
    st.just("") | st.from_regex(r"[a-z0-9][-a-z0-9]{0,20}", fullmatch=True),
)


def table_of(*maps: dict[str, Any]) -> PerformanceTable:
    table = PerformanceTable()
    for config_map in maps:
        assert table.update(config_map) == ()
    return table


@given(st.dictionaries(keys, records, max_size=8))
def test_records_are_read_as_they_were_written(measured: dict[RecordKey, MeasuredPerformance]) -> None:
    data: dict[str, str] = {}
    for key, record in measured.items():
        data = put_record(data, key, record).data
    assert decode_records(build_config_map(HASH, data)) == (measured, ())


def test_keys_are_device_classes_in_an_object_by_hash() -> None:
    config_map = build_config_map(HASH, put_record({}, RecordKey(H100), FAST).data)
    assert config_map["metadata"]["name"] == f"bench-{HASH}"
    assert config_map["metadata"]["namespace"] == "pomona-system"
    assert config_map["metadata"]["labels"]["inference.pomona.dev/benchmark"] == "true"
    assert config_map["metadata"]["labels"]["inference.pomona.dev/model-hash"] == HASH
    assert msgspec.json.decode(config_map["data"][H100])["tokensPerSecond"] == 112.4


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        pytest.param("gpu", "{", "no measurement", id="cut"),
        pytest.param("gpu", '{"tokensPerSecond": 0}', "no measurement", id="zero"),
        pytest.param("gpu", '{"tokensPerSecond": 1e12}', "no measurement", id="beyond all hardware"),
        pytest.param("gpu", '{"tokensPerSecond": "5"}', "no measurement", id="text"),
        pytest.param("gpu", '{"tokensPerSecond": 5, "concurrency": {"x": 1}}', "no measurement", id="concurrency"),
        pytest.param("gpu", "[" * 10_000, "no measurement", id="nested"),
        pytest.param("gpu", " " * 20_000, "at most", id="long"),
        pytest.param("GPU", encode_record(FAST), "no device class", id="capitals"),
        pytest.param("a_b_c", encode_record(FAST), "no device class", id="two namespaces"),
    ],
)
def test_damaged_value_is_skipped_and_named(key: str, value: str, problem: str) -> None:
    decoded = decode_records(build_config_map(HASH, {key: value, H100: encode_record(FAST)}))
    assert decoded.records == {RecordKey(H100): FAST}
    (damaged,) = decoded.damaged
    assert problem in str(damaged)
    assert f"pomona-system/bench-{HASH}, key '{key}'" in str(damaged)


def test_object_without_matching_label_is_no_measurement() -> None:
    foreign = build_config_map(HASH, {H100: encode_record(FAST)})
    foreign["metadata"]["labels"][LABEL_MODEL_HASH] = "0" * 16
    table = PerformanceTable()
    (damaged,) = table.update(foreign)
    assert "do not fit the name" in str(damaged)
    assert table.find(HASH, H100) is None
    assert table.find("0" * 16, H100) is None
    assert find_model_hash({"metadata": {"name": "bench-x"}}) == ""


def test_claim_of_a_namespace_counts_there_alone() -> None:
    table = table_of(build_config_map(HASH, put_record({}, RecordKey(H100, "team-a"), FAST).data))
    assert table.find(HASH, H100, "team-a") == FAST
    assert table.find(HASH, H100, "team-b") is None
    assert table.find(HASH, H100) is None
    assert table.list_classes(HASH, "team-a") == {H100: FAST}
    assert table.list_classes(HASH) == {}
    assert list(table.list_shared()) == []


def test_measurement_for_all_is_preferred_to_the_claim_of_a_namespace() -> None:
    data = put_record(put_record({}, RecordKey(H100, "team-a"), FAST).data, RecordKey(H100), SLOW).data
    table = table_of(build_config_map(HASH, data))
    assert table.find(HASH, H100, "team-a") == SLOW
    assert table.list_classes(HASH, "team-a") == {H100: SLOW}


def test_object_that_has_lost_its_label_has_no_measurement_any_more() -> None:
    made = build_config_map(HASH, {H100: encode_record(FAST)})
    table = table_of(made)
    relabelled = {
        **made,
        "metadata": {**made["metadata"], "labels": {**made["metadata"]["labels"], LABEL_MODEL_HASH: "f" * 16}},
    }
    assert len(table.update(relabelled)) == 1
    assert table.find(HASH, H100) is None


def test_removal_of_another_object_leaves_the_measurements() -> None:
    table = table_of(build_config_map(HASH, {H100: encode_record(FAST)}))
    table.remove(HASH)
    assert table.find(HASH, H100) == FAST


def test_changed_and_removed_objects_are_followed() -> None:
    table = table_of(build_config_map(HASH, {H100: encode_record(FAST), "cpu": encode_record(SLOW)}))
    table.update(build_config_map(HASH, {"cpu": encode_record(FAST)}))
    assert table.find(HASH, H100) is None
    assert table.find(HASH, "cpu") == FAST
    table.remove(f"bench-{HASH}")
    table.remove("another")
    assert table.find(HASH, "cpu") is None


@given(st.lists(st.tuples(keys, records), min_size=1, max_size=12), st.integers(200, 4000))
def test_object_stays_within_its_bound_and_keeps_the_newest(
    measured: list[tuple[RecordKey, MeasuredPerformance]], most_bytes: int
) -> None:
    data: dict[str, str] = {}
    for key, record in measured:
        before = data
        data, dropped = put_record(before, key, record, most_bytes)
        size = sum(len(name.encode()) + len(value.encode()) for name, value in data.items())
        assert data[key.encode()] == encode_record(record)
        assert size <= most_bytes or len(data) == 1
        assert set(before) | {key.encode()} == set(data) | set(dropped)
        kept = decode_records(build_config_map(HASH, {name: data[name] for name in data if name != key.encode()}))
        gone = decode_records(build_config_map(HASH, {name: before[name] for name in dropped}))
        for old in gone.records.values():
            assert all(old.measured_at <= record.measured_at for record in kept.records.values())


def test_damaged_value_is_dropped_before_the_oldest_measurement() -> None:
    data = {"new": encode_record(FAST), "old": encode_record(SLOW), "bad": "x" * 200}
    room = sum(len(name) + len(value) for name, value in data.items())
    stored_data = put_record(data, RecordKey("third"), FAST, room)
    assert stored_data.dropped == ("bad",)
    assert put_record({"old": data["old"], "new": data["new"]}, RecordKey("third"), FAST, 230).dropped == ("old",)


def test_full_object_is_far_below_what_the_api_server_takes() -> None:
    record = msgspec.structs.replace(FAST, runs=[1.5] * 100, image="i" * 512, node="n" * 512)
    data: dict[str, str] = {}
    for number in range(1000):
        data = put_record(data, RecordKey(f"class-{number}"), record).data
    assert 500_000 < len(msgspec.json.encode(build_config_map(HASH, data))) < 1_048_576


def test_export_has_the_names_and_fields_of_flexinfer() -> None:
    data = put_record(put_record({}, RecordKey(H100), FAST).data, RecordKey("cpu", "team-a"), SLOW).data
    stored_data = build_flexinfer_export(table_of(build_config_map(HASH, data)))
    assert stored_data.data.keys() == {f"{HASH}-{H100}"}
    assert msgspec.json.decode(stored_data.data[f"{HASH}-{H100}"]) == {
        "tokensPerSecond": 112.4,
        "model": "llama",
        "timestamp": "2026-11-26T10:00:00Z",
    }


def test_export_has_what_jobs_of_administrators_measured() -> None:
    data = put_record({}, RecordKey(H100, "pomona-system"), SLOW).data
    exported = build_flexinfer_export(table_of(build_config_map(HASH, data))).data
    assert msgspec.json.decode(exported[f"{HASH}-{H100}"])["tokensPerSecond"] == SLOW.tokens_per_second
    data = put_record(data, RecordKey(H100), FAST).data
    exported = build_flexinfer_export(table_of(build_config_map(HASH, data))).data
    assert msgspec.json.decode(exported[f"{HASH}-{H100}"])["tokensPerSecond"] == FAST.tokens_per_second, "stated"


def test_export_that_has_not_room_for_all_has_the_newest() -> None:
    data = {"new": encode_record(FAST), "old": encode_record(SLOW)}
    stored_data = build_flexinfer_export(table_of(build_config_map(HASH, data)), most_bytes=120)
    assert stored_data.data.keys() == {f"{HASH}-new"}
    assert stored_data.dropped == (f"{HASH}-old",)


@given(st.dictionaries(keys, st.tuples(records, st.sampled_from(["job", "host"])), max_size=12), st.integers(1, 3))
def test_hosts_displace_only_older_measurements_of_hosts_in_their_namespace(
    measured: dict[RecordKey, tuple[MeasuredPerformance, Any]], most: int
) -> None:
    data = {
        key.encode(): encode_record(msgspec.structs.replace(record, source=source))
        for key, (record, source) in measured.items()
    } | {"damaged": "{"}
    for namespace in {key.namespace for key in measured}:
        kept = limit_host_records(data, namespace, most)
        assert kept.data.keys() | set(kept.dropped) == data.keys()
        own = {
            key.encode(): each
            for key, (each, source) in measured.items()
            if (key.namespace, source) == (namespace, "host")
        }
        assert set(kept.dropped) <= own.keys()
        assert len(own) - len(kept.dropped) == min(len(own), most)
        left = [own[name].measured_at for name in own.keys() - set(kept.dropped)]
        assert all(own[name].measured_at <= min(left) for name in kept.dropped)


def test_host_displaces_no_measurement_of_others_from_a_full_map() -> None:
    shared = put_record({}, RecordKey(H100), SLOW).data
    full = sum(len(text) for pair in shared.items() for text in pair)
    ours, host = RecordKey("mac-1", "team"), msgspec.structs.replace(FAST, source="host")
    assert put_host_record(shared, ours, host, full) == (shared, (ours.encode(),))
    stored = put_host_record(shared, ours, host)
    assert set(stored.data) == {H100, ours.encode()}
    assert not stored.dropped
