"""The page of the gateway names each of its errors, each client of `pomona endpoint`, and the paths that it takes."""

import json
import math
import os
import re
import subprocess
from http import HTTPStatus
from pathlib import Path

import msgspec

from cli.endpoint.client_configuration import CLIENTS
from gateway.http.peer_probes import ANSWER_SECONDS, SILENCE_SECONDS
from gateway.proxy import errors
from gateway.proxy.keep_alive import COMMENT_SECONDS, FIRST_COMMENT_SECONDS
from gateway.proxy.paths import MODELS, resolve_alias
from gateway.proxy.request_record import RequestRecord
from tests.controlplane.process import CHECKOUT
from tests.support.documents import list_blocks

PAGE = (CHECKOUT / "docs" / "gateway.md").read_text()
METRICS = (
    (CHECKOUT / "docs" / "metrics.md").read_text().partition("## Metrics of the gateway\n")[2].partition("\n## ")[0]
)
ELSEWHERE = {"foreign_origin", "model_loading"}
"""Errors of `pomona up` alone."""
STATUS = {status.name: str(status.value) for status in HTTPStatus}


def test_each_error_has_a_row_with_its_status() -> None:
    stated = re.findall(r'RequestError\(HTTPStatus\.(\w+), "(\w+)"', Path(errors.__file__).read_text())
    rows = re.findall(r"^\| (\d{3}) \| (`.*?`) \|", PAGE, re.MULTILINE)
    listed = {(status, code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert {(STATUS[name], code) for name, code in stated if code not in ELSEWHERE} <= listed
    engines = {("400", errors._CONTEXT_EXCEEDED), ("400", "invalid_request")}
    assert listed <= {(STATUS[name], code) for name, code in stated} | engines


def test_each_client_has_a_row() -> None:
    table = PAGE.partition("| client | `--for` | what it sets |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| [\w' ]+ \| `([\w-]+)` \|", table, re.MULTILINE) == list(CLIENTS)


def test_base_urls_of_one_program_are_served() -> None:
    urls = re.findall(r"`http://[^/`]+(/engines/\S+/v1)`", PAGE)
    assert len(urls) == 3
    assert {resolve_alias(f"{path}/models") for path in urls} == {MODELS}


def test_times_of_streams_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"In the first {FIRST_COMMENT_SECONDS:.0f} s without a token nothing is sent" in text
    assert f"comes every {COMMENT_SECONDS:.0f} s" in text
    silent = "within a stream, and where no other one could answer, after"
    assert f"noticed after {math.ceil(ANSWER_SECONDS)} s; {silent} {SILENCE_SECONDS:.0f} s" in text


def test_sample_of_the_log_is_a_line_of_a_request() -> None:
    (sample,) = list_blocks(METRICS, "json")
    record = msgspec.json.decode(sample, type=RequestRecord)
    assert msgspec.json.encode(record).decode() == sample.strip()


def test_sums_of_the_log_have_the_names_of_the_sample() -> None:
    (sample,), (command,) = list_blocks(METRICS, "json"), list_blocks(METRICS, "sh")
    names = set(re.findall(r"\.([a-z_]+)\b", command.partition("jq ")[2]))
    assert {"key", "service", "tokens_in", "tokens_out"} < names <= json.loads(sample).keys()


def test_sums_of_the_log_are_those_of_its_lines(tmp_path: Path) -> None:
    (sample,), (command,) = list_blocks(METRICS, "json"), list_blocks(METRICS, "sh")
    line = json.loads(sample)
    others = [
        line | {"tokens_in": None, "tokens_out": None},
        line | {"key": "team-b/app"},
        {"event": "gateway_started"},
    ]
    (tmp_path / "log").write_text("Traceback\n" + "".join(f"{json.dumps(entry)}\n" for entry in (line, *others)))
    (tmp_path / "kubectl").write_text('#!/bin/sh\ncat "$(dirname "$0")/log"\n')
    (tmp_path / "kubectl").chmod(0o700)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(["sh", "-c", command], env=environment, check=True, capture_output=True, text=True).stdout
    assert [row.split("\t") for row in said.splitlines()] == [
        ["team-a/ci", "team-a/chat", "2", "6", "2"],
        ["team-b/app", "team-a/chat", "1", "6", "2"],
    ]
