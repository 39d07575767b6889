"""The chart's preflight: it fails open, and its rights are to one Secret and one configuration."""

from controller.preflight.certificate_keeper import DNS_NAME, NAME, WEBHOOK
from kube.resources import INFERENCE_SERVICES
from tests.cluster.install.test_chart import CONTROLLER, Identity, render

ON = "--set=preflight.enabled=true"
SYSTEM = "pomona-system"
CONFIGURATION: Identity = ("ValidatingWebhookConfiguration", "", NAME)


async def test_preflight_is_off_by_default() -> None:
    objects = await render()
    assert [each for each in objects if each[2] == NAME] == []
    (container,) = objects[CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert "preflight" not in str(container)
    assert NAME not in str(objects["ValidatingAdmissionPolicy", "", "pomona-controller-objects"])


async def test_webhook_fails_open_and_concerns_changed_specs_only() -> None:
    (webhook,) = (await render(ON))[CONFIGURATION]["webhooks"]
    assert (webhook["name"], webhook["failurePolicy"], webhook["sideEffects"]) == (WEBHOOK, "Ignore", "None")
    assert (webhook["matchPolicy"], webhook["timeoutSeconds"]) == ("Equivalent", 2)
    (rule,) = webhook["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE", "UPDATE"], [INFERENCE_SERVICES.plural])
    assert rule["apiVersions"] == [INFERENCE_SERVICES.version]
    assert [each["expression"] for each in webhook["matchConditions"]] == [
        "oldObject == null || object.spec != oldObject.spec"
    ]


async def test_service_leads_to_the_port_of_the_controller_by_the_name_of_the_certificate() -> None:
    objects = await render(ON)
    (webhook,) = objects[CONFIGURATION]["webhooks"]
    where = webhook["clientConfig"]["service"]
    assert f"{where['name']}.{where['namespace']}.svc" == DNS_NAME
    spec = objects["Service", where["namespace"], where["name"]]["spec"]
    (port,) = spec["ports"]
    pod = objects[CONTROLLER]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert spec["selector"].items() <= pod["metadata"]["labels"].items()
    assert where["port"] == port["port"]
    assert {"name": port["targetPort"], "containerPort": 9443} in container["ports"]
    assert "--preflight-bind-address=:9443" in container["args"]


async def test_rights_are_to_one_secret_and_one_configuration() -> None:
    before, objects = await render(), await render(ON)
    added = {each: objects[each] for each in objects if each[0] in {"Role", "ClusterRole"} and each not in before}
    assert {each: obj["rules"] for each, obj in added.items()} == {
        ("Role", SYSTEM, NAME): [
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [NAME], "verbs": ["get", "create", "patch"]}
        ],
        ("ClusterRole", "", NAME): [
            {
                "apiGroups": ["admissionregistration.k8s.io"],
                "resources": ["validatingwebhookconfigurations"],
                "resourceNames": [NAME],
                "verbs": ["get", "patch"],
            }
        ],
    }
    assert [each for each in before if "Role" in each[0] and before[each] != objects[each]] == []
    assert objects["Secret", SYSTEM, NAME]["type"] == "Opaque"
    assert "data" not in objects["Secret", SYSTEM, NAME]
