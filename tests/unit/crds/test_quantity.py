"""Quantities as bytes, in fields and options alike."""

from typing import Final

import pytest

from cli.options import parse_size
from crds.quantity import SIZE_FORMS, parse_quantity, quantity_bytes, write_quantity
from crds.size import size_text
from crds.validation import problems
from kube.resources import INFERENCE_SERVICES, MODELS
from tests.support.refused_manifests import make_manifest

_MOST: Final = 2**63 - 1
"""The largest quantity of Kubernetes."""


@pytest.mark.parametrize(
    ("quantity", "size_bytes"),
    [
        *((7, 7), ("0", 0), ("1.5Gi", 3 << 29), ("80Gi", 80 << 30), ("2k", 2000), ("500m", 0), ("1T", 10**12)),
        *(("12GiB", 12 << 30), ("12.0 GiB", 12 << 30), ("1.5 GB", 15 * 10**8), ("64 Mi", 64 << 20), ("512 B", 512)),
    ],
)
def test_quantity_is_read_as_bytes(quantity: int | str, size_bytes: int) -> None:
    assert quantity_bytes(quantity) == size_bytes


@pytest.mark.parametrize("text", ["", "much", "1  Gi", "1 ", "1 m", "8gigs", "1mB", "1e3B", "- 1", "٣"])
def test_text_that_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: give a size such as 64Mi"):
        quantity_bytes(text)


@pytest.mark.parametrize(
    ("quantity", "written"),
    [(7, "7"), ("500m", "500m"), ("80Gi", "80Gi"), ("12GiB", "12Gi"), ("1.5 GB", "1.5G"), ("512 B", "512")],
)
def test_quantity_is_written_as_kubernetes_reads_it(quantity: int | str, written: str) -> None:
    assert write_quantity(quantity) == written
    assert parse_quantity(written) == parse_quantity(quantity)


@pytest.mark.parametrize("text", ["64Mi", "64MiB", "1.5 GB", "0.5Gi", "500k", "512 B", "8 gigs", "1  Gi", "Gi"])
def test_fields_and_options_have_one_grammar(text: str) -> None:
    """A size of a Model, of a service and of an option is accepted or refused by the same rules."""
    model = make_manifest(MODELS, source="hf://a/b/c.gguf", memoryBytes=text)
    service = make_manifest(INFERENCE_SERVICES, modelRef="m", hardware={"memory": text}, promptCache=text)
    is_accepted = parse_quantity(text) is not None
    assert (problems(model) == []) == (problems(service) == []) == is_accepted
    if is_accepted:
        assert parse_size(text) == quantity_bytes(text) > 0
    else:
        assert f"give {SIZE_FORMS}" in str(problems(model)[0])


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
    with pytest.raises(ValueError, match="is not a size: give a size such as 64Mi") as caught:
        quantity_bytes(text)
    assert len(str(caught.value)) < 200
