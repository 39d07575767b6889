"""Kubernetes quantities as bytes."""

import pytest

from crds.quantity import quantity_bytes


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
