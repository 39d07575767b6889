"""The NetworkPolicies of the documents: one keeps engines from any other system, one lets Jobs reach their sources."""

import ipaddress

import pytest
import yaml

from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS
from tests.controlplane.process import CHECKOUT
from tests.support.api_objects import model
from tests.support.documents import list_blocks
from tests.support.service_decisions import chat_service, decide_chat, list_applied
from tests.support.simulated_model import make_inspected


def is_selected(policy: Obj, pod: Obj) -> bool:
    labels = pod["metadata"].get("labels", {})
    return all(
        expression["operator"] == "Exists" and expression["key"] in labels
        for expression in policy["spec"]["podSelector"]["matchExpressions"]
    )


def read_policy(document: str) -> Obj:
    """Return the only NetworkPolicy of a document."""
    blocks = list_blocks((CHECKOUT / "docs" / document).read_text(), "yaml")
    (policy,) = (yaml.safe_load(block) for block in blocks if "kind: NetworkPolicy" in block)
    manifest: Obj = policy
    return manifest


def make_engine_pod() -> Obj:
    (deployment,) = list_applied(decide_chat(chat_service(), (MODELS, model())), DEPLOYMENTS)
    template: Obj = deployment["spec"]["template"]
    return template


def make_job_pods() -> list[Obj]:
    """Return the pods of the Jobs that inspect and fetch."""
    simulated = make_inspected()
    simulated.add_consumer()
    simulated.settle()
    return [simulated.job(verb)["spec"]["template"] for verb in ("inspect", "fetch")]


def test_policy_of_engines_selects_no_job() -> None:
    policy = read_policy("security.md")
    assert (policy["spec"]["policyTypes"], policy["spec"]["egress"]) == (["Egress"], [])
    assert is_selected(policy, make_engine_pod())
    assert [is_selected(policy, pod) for pod in make_job_pods()] == [False, False]


def test_policy_of_jobs_selects_no_engine() -> None:
    policy = read_policy("pods.md")
    assert policy["spec"]["policyTypes"] == ["Egress"]
    assert [is_selected(policy, pod) for pod in make_job_pods()] == [True, True]
    assert not is_selected(policy, make_engine_pod())


@pytest.mark.parametrize(
    ("address", "is_open"),
    [
        ("18.155.68.10", True),
        ("2600:9000:2490::1", True),
        *(
            (each, False)
            for each in ("10.96.0.1", "172.20.0.1", "192.168.1.1", "169.254.169.254", "fd00::1", "fe80::1")
        ),
    ],
)
def test_job_reaches_public_addresses_by_https(address: str, *, is_open: bool) -> None:
    names, sources = read_policy("pods.md")["spec"]["egress"]
    assert [(name["port"], name["protocol"]) for name in names["ports"]] == [(53, "UDP"), (53, "TCP")]
    assert sources["ports"] == [{"port": 443, "protocol": "TCP"}]
    blocks = [source["ipBlock"] for source in sources["to"]]
    target = ipaddress.ip_address(address)
    assert is_open is any(
        target in ipaddress.ip_network(block["cidr"])
        and not any(target in ipaddress.ip_network(cidr) for cidr in block["except"])
        for block in blocks
    )
