"""A size on the command line, in the form in which Pomona shows one."""

import re
from typing import Final

import click

_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_FORM: Final = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])iB?)?", re.ASCII)


class Size(click.ParamType[int]):
    """More than nothing: `12GiB`, `12Gi`, or a number of bytes."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        if isinstance(value, int):
            return value
        found = _FORM.fullmatch(str(value))
        size_bytes = int(float(found[1]) * 1024 ** _POWERS[found[2] or ""]) if found else 0
        if not size_bytes:
            self.fail(f"{value!r} is no size such as 12GiB, or 12884901888 for bytes", param, ctx)
        return size_bytes
