"""The administrator's file of accelerators: what it changes, and the errors by line."""

import pytest

from crds.meta import Toleration
from devices.vendor_file import VendorFileError, parse_vendors
from devices.vendors import VENDORS

NPU = """\
npu:
  resource: example.com/npu
  tolerations: [{key: example.com/npu, operator: Exists, effect: NoSchedule}]
  memoryLabel: example.com/npu.memory
  images: {llama.cpp: registry.example/llama-npu@sha256:0123}
"""


def test_new_vendor_is_one_entry() -> None:
    npu = parse_vendors(NPU)["npu"]
    assert npu.resource == "example.com/npu"
    assert npu.tolerations == (Toleration(key="example.com/npu", operator="Exists", effect="NoSchedule"),)
    assert npu.images == {"llama.cpp": "registry.example/llama-npu@sha256:0123"}
    assert npu.has_devices


def test_stated_fields_replace_those_of_a_known_vendor() -> None:
    table = parse_vendors("nvidia: {runtimeClass: nvidia, images: {vllm: mirror.example/vllm:1}}\n")
    assert table["nvidia"].runtime_class == "nvidia"
    assert table["nvidia"].images["vllm"] == "mirror.example/vllm:1"
    assert table["nvidia"].resource == VENDORS["nvidia"].resource
    assert table["amd"] == VENDORS["amd"]


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_empty_file_changes_nothing(text: str) -> None:
    assert parse_vendors(text) == VENDORS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nvidia:\n  image: x\n", "line 2: nvidia: Object contains unknown field `image`; the fields are resource, "),
        ("\nnvidia:\n  exporter:\n    port: 0\n", "line 4: nvidia: Expected `int` >= 1"),
        ("nvidia:\n  images:\n    vllm: a b\n", "line 2: nvidia: Expected `str` matching regex"),
        ("nvidia:\n  tolerations:\n  - key: a\n  - kez: b\n  - operator: Like\n", "line 5: nvidia: Invalid enum"),
        ("amd: [1]\n", "line 1: amd must have fields"),
        ("metal: {resource: a/b}\n", "line 1: metal is outside of the cluster"),
        ("npu: {inPods: false}\n", "line 1: npu: inPods must be true"),
        ("Big NPU: {}\n", "line 1: 'Big NPU' is no name"),
        ("- nvidia\n", "line 1: must be a mapping"),
        ("nvidia: {\n", "line 2: not valid YAML"),
        ("npu: {resource: nodomain}\n", "line 1: npu: Expected `str` matching regex"),
    ],
)
def test_mistake_is_an_error_with_its_line(text: str, says: str) -> None:
    with pytest.raises(VendorFileError) as caught:
        parse_vendors(text)
    assert says in str(caught.value)
