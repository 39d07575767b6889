"""Fields that were sent and that the answer to a write lacks."""

import pytest

from kube.client import Obj
from kube.comparison import list_dropped


@pytest.mark.parametrize(
    ("sent", "answer", "dropped"),
    [
        ({"a": 1}, {"a": 2, "b": 3}, []),
        ({"a": 1}, {}, [".a"]),
        ({"a": {}, "b": [], "c": 0, "d": False, "e": "", "f": {"g": [], "h": 0}}, {}, []),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {}}}, [".a.b.c"]),
        ({"v": [{"name": "m", "image": {"r": 1}}, {"name": "t"}]}, {"v": [{"name": "t"}]}, [".v[m].image"]),
        ({"v": [{"name": "m", "size": 1}]}, {"v": [{"name": "sidecar"}, {"name": "m", "size": "1"}]}, []),
        ({"p": [{"port": 1, "protocol": "TCP"}]}, {"p": [{"port": 1}]}, [".p[0].protocol"]),
        ({"p": [{"port": 1}]}, {"p": []}, []),
        ({"m": [{"name": "f"}, {"name": "f", "at": "a"}]}, {"m": [{"name": "f"}, {"name": "f", "at": "a"}]}, []),
        ({"t": [{"key": "a", "value": "b"}]}, {"t": [{"operator": "Exists"}, {"key": "a", "value": "b"}]}, []),
        ({"args": ["a", "b"]}, {"args": ["b"]}, []),
    ],
)
def test_dropped_fields_are_those_that_the_answer_lacks(sent: Obj, answer: Obj, dropped: list[str]) -> None:
    assert list_dropped(sent, answer) == dropped
