"""The page of the density API has its routes, metrics, prices and the commands' examples."""

import re

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from cli.main import main
from console.api_routes import ROUTES
from console.density_metrics import build_process_registry, render_metrics
from console.density_prices import DensityPrices
from console.fit_table import FitTable
from tests.controlplane.process import CHECKOUT
from tests.support.density_worlds import GIB, build_source, gpu_node, host
from tests.support.documents import list_blocks

PAGE = (CHECKOUT / "docs" / "density-api.md").read_text()


def test_page_has_every_route() -> None:
    assert re.findall(r"^\| `(GET|POST) (\S+)` \|", PAGE, re.MULTILINE) == [
        (route.method, route.path) for route in ROUTES
    ]


def test_page_has_every_metric() -> None:
    text = render_metrics(
        build_process_registry(), build_source(gpu_node("g1")).take_snapshot(), FitTable(8192)
    ).decode()
    served = re.findall(r"^# TYPE (pomona_density_\w+)", text, re.MULTILINE)
    assert re.findall(r"^\| `(pomona_density_\w+)`", PAGE, re.MULTILINE) == served


def test_prices_of_the_page_are_prices() -> None:
    (block,) = list_blocks(PAGE, "yml")
    assert msgspec.convert(yaml.safe_load(block), DensityPrices).per_kwh == 0.3


def test_example_of_fit_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    world = [*gpu_node("gpu-1"), *gpu_node("gpu-2", free=4 * GIB, product="NVIDIA H100 80GB HBM3"), host("studio-1")]
    snapshot = build_source(world).take_snapshot()

    monkeypatch.setattr("cli.density.reading.read_density", lambda *_: (snapshot, FitTable(8192)))
    monkeypatch.setattr("cli.density.fit.progress_width", lambda: None)
    result = CliRunner().invoke(main, ["fit", "qwen3-8b", "--min-fit", "too_tight"])
    example = PAGE.partition("$ pomona fit qwen3-8b --min-fit too_tight\n")[2].partition("```")[0]
    assert result.stdout == example
