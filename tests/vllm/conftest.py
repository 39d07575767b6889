"""Options of the tests with the real vLLM."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what the real vLLM answers into the recording")
