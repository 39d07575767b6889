"""The settings to read a source, out of the options of a test."""

import dataclasses
from typing import Any

from artifacts.repositories.repository import SourceAccess
from tests.support.file_server import ALLOWED_NETWORKS


def take_access(options: dict[str, Any], **defaults: Any) -> SourceAccess:
    """Take the fields of `SourceAccess` out of `options`, with `defaults`, and with loopback allowed."""
    names = {field.name for field in dataclasses.fields(SourceAccess)} & options.keys()
    return SourceAccess(
        **{"allowed_networks": ALLOWED_NETWORKS} | defaults | {name: options.pop(name) for name in names}
    )
