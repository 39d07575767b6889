"""The lines of an engine's metrics that are passed on: those that Prometheus reads, of names that are the engine's."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.proxy.exposition import MOST_LINES, FilteredExposition, filter_exposition
from runtimes.registry import RUNTIMES
from tests.support.pod_engines.dialects import DIALECTS

ANY = (b"",)
"""Prefix of all names."""


def kept(text: bytes | str, prefixes: tuple[bytes, ...] = ANY, *, is_whole: bool = True) -> FilteredExposition:
    content = text if isinstance(text, bytes) else text.encode()
    return asyncio.run(filter_exposition(content, prefixes, is_whole=is_whole))


def test_series_of_an_engine_are_passed_on_as_they_are() -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running", ["model_name"], registry=registry).labels('a "b"\\\n}{ü').set(2)
    Counter("vllm:prompt_tokens", "Tokens\nof \\ prompts", registry=registry).inc(7)
    Histogram("vllm:time_to_first_token_seconds", "Time", ["engine"], registry=registry).labels("0").observe(0.2)
    Summary("empty:summary", "", registry=registry).observe(1e-300)
    Gauge("special", "", ["of"], registry=registry).labels("infinity").set(float("-inf"))
    registry_text = generate_latest(registry)
    assert kept(registry_text) == (registry_text, True)


@pytest.mark.parametrize(
    "line",
    [
        "a 1",
        "a_b:c 0.5",
        "a\t-1.5e-07",
        'a{b="c",d="",} +Inf',
        'a{b="\\\\ \\" \\n { } , ="} NaN',
        "a{} 1",
        "# TYPE a untyped",
        "# HELP a",
        "# HELP a \\\\ and \\n, ü",
    ],
)
def test_valid_line_is_kept(line: str) -> None:
    assert kept(f"{line}\n").text.decode() == f"{line}\n"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# EOF",
        "# a remark",
        "# UNIT a seconds",
        "# TYPE a stateset",
        "# TYPE a",
        "# HELP 1a text",
        "# HELP a \\x",
        "<html>",
        "a",
        "a one",
        "a 1 2 3",
        "a 1_000",
        "a 0x10",
        "a 1e999",
        # Prometheus drops a whole scrape because of a negative time, and takes another one for the time of the sample.
        "a 1 -5",
        "a{} 1 1700000000000",
        "a 1 99999999999999999999",
        "a 1\r",
        "a 1 ",
        'a 1 # {trace_id="x"} 1',
        "1a 1",
        "a-b 1",
        "ü 1",
        " a 1",
        'a{b="c} 1',
        "a{b='c'} 1",
        'a{b="c" d="e"} 1',
        'a{b="\\x"} 1',
        'a{b="\0"} 1',
        'a{1b="c"} 1',
        'a{"b"} 1',
        'a{b="1",b="2"} 1',
        'a{__name__="pomona_proxy_queued"} 1',
        'a{b="' + "c" * (1 << 15) + '"} 1',
    ],
)
def test_line_that_prometheus_cannot_read_is_dropped(line: str) -> None:
    assert kept(f"before 1\n{line}\nafter 2\n").text == b"before 1\nafter 2\n"


def test_line_of_invalid_utf_8_is_dropped() -> None:
    assert kept(b'a{b="\xff"} 1\n# HELP a \xff\nb 1\n').text == b"b 1\n"


@pytest.mark.parametrize("name", ["pomona_proxy_queued", "pomona_", "up", "scrape_duration_seconds"])
def test_names_of_pomona_and_prometheus_are_dropped(name: str) -> None:
    lines = f'# HELP {name} x\n# TYPE {name} gauge\n{name} 1\n{name}{{a="b"}} 1\n'
    assert kept(f"{lines}uptime 1\n").text == b"uptime 1\n"


@pytest.mark.parametrize("name", ["ALERTS", "kube_node_status_condition", "vllm", "Xvllm:x", "process"])
def test_names_that_are_not_the_engines_are_dropped(name: str) -> None:
    lines = f'# HELP {name} x\n# TYPE {name} gauge\n{name} 1\n{name}{{a="b"}} 1\n'
    own = "# HELP vllm:x x\n# TYPE vllm:x gauge\nvllm:x 1\nprocess_open_fds 3\n"
    assert kept(lines + own + lines, (b"vllm:", b"process_")).text.decode() == own


def test_no_prefix_keeps_no_line() -> None:
    assert kept("# TYPE a gauge\na 1\n", ()).text == b""


@pytest.mark.parametrize("engine", DIALECTS)
def test_names_that_the_real_engine_has_are_kept(engine: str) -> None:
    pod = RUNTIMES[engine].pod
    assert pod is not None
    assert pod.metrics is not None
    lines = "".join(f"# TYPE {name} {kind}\n{name} 1\n" for name, kind in DIALECTS[engine].read_metrics().items())
    assert kept(lines, tuple(prefix.encode() for prefix in pod.metrics.prefixes)).text.decode() == lines


def test_help_and_type_are_kept_once_and_before_their_samples() -> None:
    twice = "# HELP a x\n# TYPE a gauge\n# HELP a y\n# TYPE a counter\na 1\n# TYPE b gauge\nb 1\n# HELP a z\na 2\n"
    assert kept(twice).text.decode() == "# HELP a x\n# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\na 2\n"
    assert kept("a 1\n# TYPE a gauge\n").text == b"a 1\n"


def test_last_line_needs_no_end_if_the_text_is_whole() -> None:
    assert kept("a 1\nb 2") == (b"a 1\nb 2\n", True)


def test_last_family_of_a_text_that_is_cut_is_dropped() -> None:
    text = '# TYPE a gauge\na 1\n# HELP h x\n# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 1\nh_cou'
    assert kept(text, is_whole=False) == (b"# TYPE a gauge\na 1\n", False)
    assert kept("a 1\nb 1\nc 1\nc 12", is_whole=False).text == b"a 1\nb 1\n"


def test_lines_beyond_the_limit_are_cut() -> None:
    lines = [f"a{number} 1\n" for number in range(MOST_LINES)]
    assert kept("".join(lines)).is_whole
    text, is_whole = kept("".join([*lines, "b 1\n"]))
    assert (text.count(b"\n"), is_whole) == (MOST_LINES - 1, False)


PARTS = ["a", "a_sum", "pomona_x", "{", "}", 'b="c"', ",", '"', "\\", "\n", "\n", " ", " 1", " 1\n", "# TYPE ", "\0"]


@given(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=60), st.booleans())
def test_what_is_kept_of_any_text_is_valid(parts: list[str], is_whole: bool) -> None:
    content = "".join(["# HELP a x\n", *parts]).encode("utf-8", "replace")
    text = kept(content, is_whole=is_whole).text.decode()
    assert text == "" or text.endswith("\n")
    families = list(text_string_to_metric_families(text))
    assert not any(family.name.startswith("pomona_") for family in families)
    assert set(text.splitlines()) <= set(content.decode().split("\n"))


@pytest.mark.parametrize(
    "line",
    [b"a 1\n", b"a{" + b'b="",' * 2000 + b"\n", b'a{b="' + b"\\n" * 8000 + b"\n", b"# HELP a " + b"x" * 16000 + b"\n"],
    ids=["short", "many labels", "many escapes", "long"],
)
async def test_other_work_goes_on_meanwhile(line: bytes) -> None:
    longest, last = 0.0, time.process_time()
    work = asyncio.ensure_future(filter_exposition(line * ((1 << 20) // len(line)), ANY, is_whole=True))
    passes = 0
    while not work.done():
        await asyncio.sleep(0)
        now = time.process_time()
        longest, last, passes = max(longest, now - last), now, passes + 1
    assert passes > 20
    assert longest < 0.25, "the processor may be shared; it takes a few milliseconds"
