"""The NetworkPolicy of docs/security.md keeps engines from any other system, and no Job from its source."""

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
        each["operator"] == "Exists" and each["key"] in labels
        for each in policy["spec"]["podSelector"]["matchExpressions"]
    )


def test_policy_selects_engines_and_no_job() -> None:
    blocks = list_blocks((CHECKOUT / "docs" / "security.md").read_text(), "yaml")
    (policy,) = (yaml.safe_load(block) for block in blocks if "kind: NetworkPolicy" in block)
    assert (policy["spec"]["policyTypes"], policy["spec"]["egress"]) == (["Egress"], [])

    (deployment,) = list_applied(decide_chat(chat_service(), (MODELS, model())), DEPLOYMENTS)
    assert is_selected(policy, deployment["spec"]["template"])
    simulated = make_inspected()
    simulated.add_consumer()
    simulated.settle()
    for verb in ("inspect", "fetch"):
        assert not is_selected(policy, simulated.job(verb)["spec"]["template"])
