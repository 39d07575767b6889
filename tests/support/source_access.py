"""The settings to read a source, and what it is expected to send, out of the options of a test."""

import dataclasses
from typing import Any

from artifacts.fetch import ExpectedFile
from artifacts.repositories.repository import SourceAccess
from tests.support.file_server import ALLOWED_NETWORKS


def take_access(options: dict[str, Any], **defaults: Any) -> SourceAccess:
    """Take the fields of `SourceAccess` out of `options`, with `defaults`, and with loopback allowed."""
    names = {field.name for field in dataclasses.fields(SourceAccess)} & options.keys()
    return SourceAccess(
        **{"allowed_networks": ALLOWED_NETWORKS} | defaults | {name: options.pop(name) for name in names}
    )


def take_expected(options: dict[str, Any]) -> ExpectedFile:
    """Take the fields of `ExpectedFile` out of `options`."""
    names = {field.name for field in dataclasses.fields(ExpectedFile)} & options.keys()
    return ExpectedFile(**{name: options.pop(name) for name in names})
