"""The administrator's file of accelerators: what it changes, and the errors by line."""

import pytest

from crds.meta import Toleration
from devices.vendor_file import VendorFileError, find_vendor_problem, parse_vendors
from devices.vendors import VENDORS
from runtimes.registry import list_pod_engines

NPU = """\
npu:
  resource: example.com/npu
  tolerations: [{key: example.com/npu, operator: Exists, effect: NoSchedule}]
  memoryLabel: example.com/npu.memory
  images: {llama.cpp: registry.example/llama-npu@sha256:0123}
"""


def test_new_vendor_is_one_entry() -> None:
    npu = parse_vendors(NPU, list_pod_engines())["npu"]
    assert npu.resource == "example.com/npu"
    assert npu.tolerations == (Toleration(key="example.com/npu", operator="Exists", effect="NoSchedule"),)
    assert npu.images == {"llama.cpp": "registry.example/llama-npu@sha256:0123"}
    assert npu.has_devices


def test_stated_fields_replace_those_of_a_known_vendor() -> None:
    table = parse_vendors("nvidia: {runtimeClass: nvidia, images: {vllm: mirror.example/vllm:1}}\n", list_pod_engines())
    assert table["nvidia"].runtime_class == "nvidia"
    assert table["nvidia"].images["vllm"] == "mirror.example/vllm:1"
    assert table["nvidia"].resource == VENDORS["nvidia"].resource
    assert table["amd"] == VENDORS["amd"]


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_empty_file_changes_nothing(text: str) -> None:
    assert parse_vendors(text, list_pod_engines()) == VENDORS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nvidia:\n  image: x\n", "line 2: nvidia: Object contains unknown field `image`; the fields are resource, "),
        ("\nnvidia:\n  exporter:\n    port: 0\n", "line 4: nvidia: Expected `int` >= 1"),
        ("nvidia:\n  images:\n    vllm: a b\n", "line 2: nvidia: Expected `str` matching regex"),
        ("nvidia:\n  tolerations:\n  - key: a\n  - kez: b\n  - operator: Like\n", "line 5: nvidia: Invalid enum"),
        ("amd: [1]\n", "line 1: amd must have fields"),
        ("metal: {resource: a/b}\n", "line 1: metal is outside of the cluster"),
        ("amd: {}\nauto: {resource: a/b}\n", "line 2: auto stands for any accelerator: choose another name"),
        ("npu: {inPods: false}\n", "line 1: npu: inPods must be true"),
        ("Big NPU: {}\n", "line 1: 'Big NPU' is no name"),
        ("- nvidia\n", "line 1: must be a mapping"),
        ("nvidia: {\n", "line 2: not valid YAML"),
        ("? [npu]\n: {resource: a/b}\n", "line 1: not valid YAML: the name of a field has to be a string"),
        ("npu: {resource: nodomain}\n", "line 1: npu: Expected `str` matching regex"),
        (
            "nvidia:\n  images:\n    vllm: a\n    vlm: b\n",
            "line 4: nvidia: images names vlm, which is no engine in pods: use one of llama.cpp, ",
        ),
        (
            "nvidia: {images: {mlx-lm: a}}\n",
            "line 1: nvidia: images names mlx-lm, which is no engine in pods: use one of ",
        ),
        (
            "amd: {}\nnvidia:\n  resource: a/b\namd:\n  resource: c/d\n",
            "line 4: not valid YAML: field 'amd' is repeated, first in line 1: merge both",
        ),
        ("nvidia:\n  images:\n    vllm: a\n    vllm: b\n", "field 'vllm' is repeated, first in line 3: merge both"),
        (
            "intel-gaudi:\n  environment:\n    A: b\n    HABANA_VISIBLE_DEVICES: all\n",
            "line 4: intel-gaudi: environment sets HABANA_VISIBLE_DEVICES to 'all', by which a node would give the ",
        ),
        (
            "amd: {environment: {HIP_VISIBLE_DEVICES: all}}\n",
            "HIP_VISIBLE_DEVICES to 'all', which overrides the device plugin's choice of devices: remove it",
        ),
        (
            "nvidia: {environment: {CUDA_VERSION: '12.4'}}\n",
            "CUDA_VERSION to '12.4', by which a node would give the container devices of other pods: remove it",
        ),
        ("amd: {environment: {DOCKER_RESOURCE_GPU: all}}\n", "amd: environment sets DOCKER_RESOURCE_GPU to 'all', by"),
        (
            "npu:\n  resource: a/npu\n  tolerations:\n  - {key: a/npu}\n  - operator: Exists\n",
            "line 5: npu: tolerations[1] has no key, so it tolerates every taint: state the key of the vendor's own",
        ),
        ("nvidia: {tolerations: [{kez: a/b}]}\n", "line 1: nvidia: tolerations[0] has no key"),
        (
            "npu:\n  tolerations:\n  - key: node-role.kubernetes.io/control-plane\n    operator: Exists\n",
            "line 3: npu: tolerations[0] has key node-role.kubernetes.io/control-plane, which keeps pods off nodes of ",
        ),
        (
            "npu: {tolerations: [{key: node-role.kubernetes.io/master}]}\n",
            "such as control planes: remove it; services ",
        ),
        (
            "npu:\n  tolerations:\n  - key: node.kubernetes.io/not-ready\n",
            "line 3: npu: tolerations[0] has key node.kubernetes.io/not-ready, which keeps pods off unhealthy nodes ",
        ),
        (
            "npu: {tolerations: [{key: a.example/npu-unhealthy, operator: Exists}]}\n",
            "unhealthy nodes or devices: remove it",
        ),
        ("npu: {tolerations: [{key: a.example/Unhealthy}]}\n", "off unhealthy nodes or devices"),
        (
            "npu:\n  tolerations:\n  - key: node.cloudprovider.kubernetes.io/shutdown\n    operator: Exists\n",
            "line 3: npu: tolerations[0] has key node.cloudprovider.kubernetes.io/shutdown, which keeps pods off ",
        ),
        ("npu: {tolerations: [{key: a.node.kubernetes.io/b}]}\n", "has key a.node.kubernetes.io/b, which keeps"),
        ("npu:\n  resource: a.b/c\n\n  # \a\n", "line 4: not valid YAML: character U+0007 is not allowed: remove it"),
        ("npu:\n  environment: {A: !!int b}\n", "line 2: not valid YAML: 'b' is not a valid int"),
        (
            'npu:\n  resource: "example.com/npu*"\n',
            "line 2: npu: resource example.com/npu* ends in *, which only furtherResources may: name one resource",
        ),
        (
            "npu:\n  environment:\n    A: b\n    X=Y: z\n",
            "line 4: npu: environment has 'X=Y', which is no name of a variable: use letters, digits, ",
        ),
        ('npu: {environment: {"": q}}\n', "line 1: npu: environment has '', which is no name"),
        ("npu: {environment: {1A: q}}\n", "environment has '1A', which is no name"),
    ],
)
def test_mistake_is_an_error_with_its_line(text: str, says: str) -> None:
    with pytest.raises(VendorFileError) as caught:
        parse_vendors(text, list_pod_engines())
    assert says in str(caught.value)


@pytest.mark.parametrize("name", VENDORS)
def test_built_in_vendor_keeps_the_rules_of_the_file(name: str) -> None:
    assert find_vendor_problem(VENDORS[name], list_pod_engines()) is None


def test_parts_that_yaml_shares_are_not_stated_twice() -> None:
    text = "amd: &all\n  images: {vllm: a}\nnvidia:\n  <<: *all\n  runtimeClass: nvidia\nintel: *all\n"
    table = parse_vendors(text, list_pod_engines())
    assert [table[name].images["vllm"] for name in ("amd", "nvidia", "intel")] == ["a", "a", "a"]


def test_several_parts_may_be_included() -> None:
    text = "amd: &one\n  images: {vllm: a}\nintel: &two\n  runtimeClass: b\nnvidia:\n  <<: *one\n  <<: *two\n"
    nvidia = parse_vendors(text, list_pod_engines())["nvidia"]
    assert (nvidia.images["vllm"], nvidia.runtime_class) == ("a", "b")


def test_variables_that_choose_no_devices_and_other_taints_are_accepted() -> None:
    taints = "[{key: gpu-pool, operator: Exists}, {key: example.com/node-role, value: a}]"
    variables = "{NCCL_DEBUG: INFO, _a.b-2: x}"
    table = parse_vendors(f"nvidia: {{environment: {variables}, tolerations: {taints}}}\n", list_pod_engines())
    assert table["nvidia"].environment == {"NCCL_DEBUG": "INFO", "_a.b-2": "x"}
    assert [toleration.key for toleration in table["nvidia"].tolerations] == ["gpu-pool", "example.com/node-role"]


def test_administrator_may_give_pods_with_devices_more_of_their_node() -> None:
    table = parse_vendors("nvidia: {environment: {NVIDIA_MOFED: enabled}}\n", list_pod_engines())
    assert table["nvidia"].environment == {"NVIDIA_MOFED": "enabled"}


def test_further_resources_may_end_in_a_star() -> None:
    npu = parse_vendors('npu: {resource: a.b/npu, furtherResources: ["a.b/npu-*"]}\n', list_pod_engines())["npu"]
    assert (npu.offers("a.b/npu-half"), npu.offers("a.b/other")) == (True, False)


@pytest.mark.parametrize("engine", list_pod_engines())
def test_image_of_every_engine_in_pods_may_be_stated(engine: str) -> None:
    table = parse_vendors(f"npu: {{images: {{{engine}: registry.example/engine:1}}}}\n", list_pod_engines())
    assert table["npu"].images == {engine: "registry.example/engine:1"}
