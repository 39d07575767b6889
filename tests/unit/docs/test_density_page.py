"""The page of the density API has its routes, metrics, prices and the commands' examples."""

import re

import msgspec
import yaml

from console.api_routes import ROUTES
from console.density_metrics import build_process_registry, render_metrics
from console.density_prices import DensityPrices
from console.fit_table import FitTable
from tests.controlplane.process import CHECKOUT
from tests.support.density_worlds import build_feed, gpu_node
from tests.support.documents import list_blocks

PAGE = (CHECKOUT / "docs" / "density-api.md").read_text()


def test_page_has_every_route() -> None:
    assert re.findall(r"^\| `(GET|POST) (\S+)` \|", PAGE, re.MULTILINE) == [(each.method, each.path) for each in ROUTES]


def test_page_has_every_metric() -> None:
    text = render_metrics(build_process_registry(), build_feed(gpu_node("g1")).take_snapshot(), FitTable(8192)).decode()
    served = re.findall(r"^# TYPE (pomona_density_\w+)", text, re.MULTILINE)
    assert re.findall(r"^\| `(pomona_density_\w+)`", PAGE, re.MULTILINE) == served


def test_prices_of_the_page_are_prices() -> None:
    (block,) = list_blocks(PAGE, "yml")
    assert msgspec.convert(yaml.safe_load(block), DensityPrices).per_kwh == 0.3
