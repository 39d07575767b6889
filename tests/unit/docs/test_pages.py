"""Pages of engines and vendors agree with the tables of the product, and every page can be found from the README.

`make golden` writes the tables of a page; the text around them names nothing that the tables do not have.
"""

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from devices.vendor_file import parse_vendors
from devices.vendors import VENDORS, Vendor
from runtimes.registry import RUNTIMES, list_pod_engines
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import refuse_demand
from tests.controlplane.process import CHECKOUT
from tests.support.documents import DOCUMENTS, list_blocks
from tests.support.kept_text import check_kept_text
from tests.support.page_tables import BEGIN, END, describe_engine, describe_pairs, describe_vendor

README = CHECKOUT / "README.md"
DOCS = CHECKOUT / "docs"
CONCEPTS = DOCS / "concepts.md"
VENDOR_GUIDE = DOCS / "vendors" / "README.md"
FILES = {"metal": "apple"}
"""Pages with another name than the accelerator."""
ENGINE_PAGES = {name: DOCS / "engines" / f"{name}.md" for name in RUNTIMES}
VENDOR_PAGES = {name: DOCS / "vendors" / f"{FILES.get(name, name)}.md" for name in VENDORS}
PAGES = [*ENGINE_PAGES.values(), *VENDOR_PAGES.values()]
WRONG_GUIDES = {"amd.com/gpu.present"}
"""Labels that a page names because others do, although nothing writes them."""


def with_tables(path: Path, tables: str) -> str:
    """Return the text of a page with these tables between its marks."""
    assert path.exists(), f"{path.relative_to(CHECKOUT)} is missing: write it, with the lines {BEGIN} and {END}"
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{path.name} lacks the line {BEGIN}"
    assert end, f"{path.name} lacks the line {END}"
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def split_page(path: Path) -> tuple[str, str]:
    """Return the text that a person wrote, and the tables."""
    before, _, rest = path.read_text().partition(BEGIN)
    tables, _, after = rest.partition(END)
    return before + after, tables


@pytest.mark.parametrize("name", ENGINE_PAGES)
def test_page_of_an_engine_has_its_tables(name: str) -> None:
    check_kept_text(ENGINE_PAGES[name], with_tables(ENGINE_PAGES[name], describe_engine(RUNTIMES[name])))


@pytest.mark.parametrize("name", VENDOR_PAGES)
def test_page_of_a_vendor_has_its_tables(name: str) -> None:
    check_kept_text(VENDOR_PAGES[name], with_tables(VENDOR_PAGES[name], describe_vendor(name, VENDORS[name])))


def test_page_of_concepts_has_the_table_of_engines() -> None:
    check_kept_text(CONCEPTS, with_tables(CONCEPTS, describe_pairs()))


@pytest.mark.parametrize(("folder", "pages"), [("engines", ENGINE_PAGES), ("vendors", VENDOR_PAGES)])
def test_every_page_has_an_engine_or_vendor(folder: str, pages: dict[str, Path]) -> None:
    assert set((DOCS / folder).iterdir()) - {VENDOR_GUIDE} == set(pages.values())


def list_vendors_names() -> dict[str, set[str]]:
    """Return the resources, labels and taints of the tables, by their domain."""
    named: dict[str, set[str]] = {}
    for vendor in VENDORS.values():
        taints = [toleration.key for toleration in vendor.tolerations]
        labels = [vendor.product_label, vendor.memory_label, vendor.shared_label]
        for name in (vendor.resource, *vendor.further_resources, *taints, *labels):
            if name:
                named.setdefault(name.partition("/")[0], set()).add(name)
    return named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_text_of_a_page_names_no_resource_or_label_that_the_tables_lack(path: Path) -> None:
    for domain, names in list_vendors_names().items():
        for name in re.findall(rf"(?<![\w./-]){re.escape(domain)}/[\w.*-]*[\w*]", path.read_text()):
            is_known = name in names | WRONG_GUIDES or any(vendor.offers(name) for vendor in VENDORS.values())
            assert is_known, f"{name} is in no table"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_text_of_a_page_names_no_metric_or_image_that_the_tables_lack(path: Path) -> None:
    text, tables = split_page(path)
    named = re.findall(r"`((?:llamacpp|sglang|vllm):\w+|(?:tgi|DCGM_FI|gpu|habanalabs)_\w+)`", text)
    named += re.findall(r"`([a-z0-9.-]+/[a-z0-9./_-]+:[^\s`/]+)`", text)
    assert [term for term in named if f"`{term}`" not in tables] == []


@pytest.mark.parametrize("name", ENGINE_PAGES)
def test_extra_arguments_of_the_examples_are_taken(name: str) -> None:
    runtime = RUNTIMES[name]
    for block in list_blocks(ENGINE_PAGES[name].read_text(), "yaml"):
        for manifest in yaml.safe_load_all(block):
            spec = manifest.get("spec", {})
            if "modelRef" in spec:
                assert spec.get("runtime", name) == name
                flags = [flag for flag in spec.get("extraArgs", []) if flag.startswith("-")]
                assert set(flags) <= set(runtime.tuning)


def test_every_page_is_found_from_the_readme() -> None:
    reached, waiting = set[Path](), [README]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page.read_text())
        waiting += [
            target for link in links if "://" not in link and (target := (page.parent / link).resolve()).exists()
        ]
    assert set(DOCUMENTS) - reached == set()


@pytest.fixture
def added() -> tuple[str, Vendor]:
    """The vendor that the example of a vendors file adds, with its name."""
    blocks = list_blocks(VENDOR_GUIDE.read_text(), "yaml")
    (text,) = [block for block in blocks if "modelRef" not in block and "kind" not in block]
    table = parse_vendors(text, list_pod_engines())
    (name,) = set(table) - set(VENDORS)
    return name, table[name]


def test_example_of_a_vendors_file_adds_a_vendor_that_an_engine_serves_on(added: tuple[str, Vendor]) -> None:
    name, vendor = added
    assert None not in (vendor.resource, vendor.memory_label)
    runtime = RUNTIMES[next(iter(vendor.images))]
    demand = RuntimeDemand(min(runtime.formats), name, in_pods=True, vendors={name: vendor})
    assert refuse_demand(runtime, demand) is None


def test_example_of_a_service_uses_the_added_vendor(added: tuple[str, Vendor]) -> None:
    blocks = list_blocks(VENDOR_GUIDE.read_text(), "yaml")
    service = next(
        manifest for block in blocks for manifest in yaml.safe_load_all(block) if "modelRef" in manifest.get("spec", {})
    )
    assert service["spec"]["hardware"]["accelerator"] == added[0]


def test_vendor_guide_lists_every_field_of_an_entry() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", VENDOR_GUIDE.read_text(), re.MULTILINE))
    fields = {field.encode_name for field in msgspec.structs.fields(Vendor)}
    assert listed == fields - {"inPods"}


def test_removal_deletes_each_kind() -> None:
    page = (CHECKOUT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^kubectl delete crd (.+)$", page, re.MULTILINE)
    kinds = {path.stem.replace("inference.pomona.dev_", "") for path in (CHECKOUT / "crds").glob("*.yaml")}
    assert {*command.split()} == {f"{kind}.inference.pomona.dev" for kind in kinds}
