"""docs/reference.md lists each field once."""

import re

from crds.reference import render_reference


def test_fields_that_are_left_out_are_listed_where_their_row_says() -> None:
    page = render_reference()
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]}
    places = re.findall(r"Its fields are those of `(\w+) ([^`]+)`", page)
    assert ("MetalProcess", "spec.artifact") in places
    for kind, path in places:
        assert re.search(rf"^\| `{re.escape(path)}(\[\])?\.", sections[kind], re.MULTILINE), path
