"""YAML as kubectl reads it, with the lines of its fields: a date is a string, and a repeated field is an error."""

from collections.abc import Hashable, Iterable
from typing import Any, Final

import yaml

_MERGE: Final = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`, which includes another mapping and may be repeated."""


class StrictLoader(yaml.SafeLoader):
    """Loader whose errors are all yaml.MarkedYAMLError, except for a text that is nested too deeply."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node."""
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()  # YAML accepts half of a surrogate pair, JSON does not
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            problem = f"{str(node.value)[:40]!r} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping as a dict; a repeated name, or one that is no scalar, is an error.

        PyYAML itself takes the last of several values. A merge key (`<<`) may be repeated.
        """
        # The line of each name so far. _MERGE is the tag of the key `<<`.
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "the name of a field has to be a string"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in lines and key.tag != _MERGE:
                problem = f"field {key.value!r} is repeated, first in line {lines[key.value]}: merge both"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def find_line(node: yaml.Node, path: Iterable[str | int]) -> int:
    """Return the line of the field or item at `path` below `node`, counted from 1.

    If the document does not have it, such as a required field that is missing, it is the line of its nearest parent.
    """
    # mark: where the last step of the path begins that the document has
    mark = node.start_mark
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == step), None)
            if pair is None:
                break
            mark, node = pair[0].start_mark, pair[1]
        # A step into a list is the number of an item.
        elif isinstance(node, yaml.SequenceNode) and str(step).isdecimal() and int(step) < len(node.value):
            node = node.value[int(step)]
            mark = node.start_mark
    return int(mark.line) + 1
