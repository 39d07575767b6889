"""The page of the gateway names each of its errors, each client of `pomona endpoint`, and the paths that it takes."""

import re
from http import HTTPStatus
from pathlib import Path

from cli.endpoint.client_configuration import CLIENTS
from gateway.http.peer_probes import ANSWER_SECONDS, SILENCE_SECONDS
from gateway.proxy import errors
from gateway.proxy.keep_alive import COMMENT_SECONDS, FIRST_COMMENT_SECONDS
from gateway.proxy.paths import MODELS, resolve_alias
from tests.controlplane.process import CHECKOUT

PAGE = (CHECKOUT / "docs" / "gateway.md").read_text()
ELSEWHERE = {"foreign_origin"}
"""An error of `pomona up` alone."""
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
    assert f"noticed after {ANSWER_SECONDS:.0f} s; {silent} {SILENCE_SECONDS:.0f} s" in text
