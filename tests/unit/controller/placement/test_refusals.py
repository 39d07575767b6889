"""Each reason has a row of `REFUSALS`: one without would be taken for that of a closed cell."""

import ast
import inspect
from types import ModuleType
from typing import get_args

from controller.placement import explanation, queued_service, units
from controller.placement.pool_limits import LimitReason
from controller.placement.refusals import REFUSALS
from crds.placement import SpeedRefusal


def read_returned_reasons(module: ModuleType) -> set[str]:
    """Return each CamelCase word, literal or constant, that a function of refusals in the module returns."""
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)]
    refusing = [function for function in functions if "refus" in function.name]
    returns = [node for function in refusing for node in ast.walk(function) if isinstance(node, ast.Return)]
    nodes = [node for returned in returns for node in ast.walk(returned)]
    literals = [node.value for node in nodes if isinstance(node, ast.Constant)]
    constants = [getattr(module, node.id) for node in nodes if isinstance(node, ast.Name) and node.id.isupper()]
    return {word for word in (*literals, *constants) if isinstance(word, str) and word[:1].isupper()}


def test_each_reason_has_a_row_and_each_row_a_reason() -> None:
    returned = [read_returned_reasons(module) for module in (explanation, queued_service, units)]
    assert {*get_args(LimitReason), *get_args(SpeedRefusal)}.union(*returned) == REFUSALS.keys()
