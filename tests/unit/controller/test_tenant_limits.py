"""Limits of what tenants may state about pods: field, value and way out of each refusal."""

import pytest

from controller.pod_settings import TenantLimits, allowed_tolerations, check_limits, refuse_hosts
from devices.vendors import VENDORS
from tests.support.api_objects import as_service, service

LIMITED = TenantLimits(("registry.example/llm/", "ghcr.io/ggml-org/llama.cpp"))
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


@pytest.mark.parametrize(
    ("image", "is_allowed"),
    [
        ("registry.example/llm/server:1", True),
        ("registry.example/llm", False),
        ("registry.example/other/server:1", False),
        ("registry.example.evil.com/llm/server:1", False),
        ("ghcr.io/ggml-org/llama.cpp:server", True),
        ("ghcr.io/ggml-org/llama.cpp@sha256:0", True),
        ("ghcr.io/ggml-org/llama.cpp", True),
        ("ghcr.io/ggml-org/llama.cpp-evil:server", False),
        ("evil/registry.example/llm/server", False),
        (None, True),
    ],
)
def test_image_begins_with_an_allowed_prefix(image: str | None, *, is_allowed: bool) -> None:
    stated = as_service(service(image=image) if image else service())
    problem = check_limits(stated, LIMITED)
    assert (problem is None) == is_allowed
    assert check_limits(stated, TenantLimits()) is None, "without the flag, all images are allowed"
    if problem:
        assert problem.reason == "ImageNotAllowed"
        assert f"spec.image {image}" in problem.message
        assert "registry.example/llm/ or ghcr.io/ggml-org/llama.cpp" in problem.message


@pytest.mark.parametrize(
    ("toleration", "is_allowed"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"key": CONTROL_PLANE, "operator": "Exists", "effect": "NoSchedule"}, False),
        ({"key": "node-role.kubernetes.io/master", "value": ""}, False),
        ({"key": "node-role.kubernetes.io/etcd", "operator": "Exists"}, False),
        ({"key": "node-role.kubernetes.io/controlplane", "value": "true"}, False),
        ({"key": "CriticalAddonsOnly", "operator": "Exists"}, False),
        ({"operator": "Exists"}, False),
        ({"key": "", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_taints_of_the_control_plane_are_not_tolerated(toleration: dict[str, str], *, is_allowed: bool) -> None:
    stated = as_service(service(tolerations=[{"key": "team", "value": "a"}, toleration]))
    problem = check_limits(stated, LIMITED)
    assert (problem is None) == is_allowed
    assert len(allowed_tolerations(stated.spec.tolerations, LIMITED)) == 1 + is_allowed
    assert check_limits(stated, TenantLimits(control_plane=True)) is None
    if problem:
        assert problem.reason == "TolerationNotAllowed"
        assert "spec.tolerations[1]" in problem.message
        assert "--allow-control-plane-tolerations" in problem.message


def test_controller_of_some_namespaces_runs_nothing_on_hosts() -> None:
    refused = refuse_hosts("metal", VENDORS, TenantLimits(hosts=False))
    assert refused is not None
    assert refused.reason == "HostsOutOfScope"
    assert "accelerator metal" in refused.message
    assert "--namespace: set hardware.accelerator to one of amd, cpu" in refused.message
    assert refuse_hosts("metal", VENDORS, TenantLimits()) is None
    assert refuse_hosts("cpu", VENDORS, TenantLimits(hosts=False)) is None
    assert refuse_hosts("of-tomorrow", VENDORS, TenantLimits(hosts=False)) is None, "refused for another reason"


@pytest.mark.parametrize(
    ("key", "is_allowed"),
    [
        ("node-role.kubernetes.io/infra", False),
        ("system.example/a", False),
        ("system.example", True),
        ("other.example/a", True),
        ("", False),
    ],
)
@pytest.mark.parametrize("control_plane", [False, True])
def test_taints_of_the_platform_team_are_not_tolerated(key: str, *, is_allowed: bool, control_plane: bool) -> None:
    limits = TenantLimits(
        control_plane=control_plane, system_taints=("node-role.kubernetes.io/infra", "system.example/")
    )
    problem = check_limits(as_service(service(tolerations=[{"key": key, "operator": "Exists"}])), limits)
    assert (problem is None) == is_allowed
    if problem and (key or control_plane):
        assert "--system-taint" in problem.message
