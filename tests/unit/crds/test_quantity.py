"""Kubernetes quantities as bytes."""

from typing import Final

import pytest

from crds.quantity import parse_quantity, quantity_bytes
from crds.size import size_text

_MOST: Final = 2**63 - 1
"""The largest quantity of Kubernetes."""


@pytest.mark.parametrize(
    ("quantity", "size_bytes"),
    [(7, 7), ("0", 0), ("1.5Gi", 3 << 29), ("80Gi", 80 << 30), ("2k", 2000), ("500m", 0), ("1T", 10**12)],
)
def test_quantity_is_read_as_bytes(quantity: int | str, size_bytes: int) -> None:
    assert quantity_bytes(quantity) == size_bytes


@pytest.mark.parametrize("text", ["", "much", "1 Gi", "- 1", "٣"])
def test_text_that_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity_bytes(text)


@pytest.mark.parametrize(
    ("quantity", "size_bytes"),
    [
        ("9" * 32, _MOST),
        ("9e999", _MOST),
        ("100E", _MOST),
        ("8Ei", _MOST),
        (_MOST + 1, _MOST),
        (10**5000, _MOST),
        ("-9e999", -_MOST),
        ("1e-999", 0),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_quantity_is_capped_as_kubernetes_does(quantity: int | str, size_bytes: int) -> None:
    assert quantity_bytes(quantity) == size_bytes
    assert len(size_text(abs(quantity_bytes(quantity)))) < 32


@pytest.mark.parametrize(
    "text", ["9" * 990_000, "9" * 990_000 + "x", "0." + "0" * 990_000 + "1Gi", "1e" + "9" * 99], ids=range(4)
)
def test_text_of_a_million_digits_is_no_quantity_at_once(text: str) -> None:
    """It would take a minute to read it, in which the controller does nothing else."""
    assert parse_quantity(text) is None
    with pytest.raises(ValueError, match="is not a quantity") as caught:
        quantity_bytes(text)
    assert len(str(caught.value)) < 200
