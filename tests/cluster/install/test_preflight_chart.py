"""The chart's preflight: it fails open, gives the controller no right, and keeps its certificate."""

import re
from base64 import b64decode
from pathlib import Path

from controller.controller_options import ControllerOptions
from controller.preflight.preflight_webhook import PATH, PATH_FILE
from kube.resources import INFERENCE_SERVICES
from tests.cluster.install.test_chart import CONTROLLER, Identity, render
from tests.support.service_decisions import SETTINGS

NAME, WEBHOOK = "pomona-preflight", "preflight.inference.pomona.dev"
ON = "--set=preflight.enabled=true"
SYSTEM = "pomona-system"
CONFIGURATION: Identity = ("ValidatingWebhookConfiguration", "", NAME)


async def test_preflight_is_off_by_default() -> None:
    objects = await render()
    assert [identity for identity in objects if identity[2] == NAME] == []
    (container,) = objects[CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert "preflight" not in str(container)


async def test_webhook_fails_open_and_concerns_changed_specs_only() -> None:
    (webhook,) = (await render(ON))[CONFIGURATION]["webhooks"]
    assert (webhook["name"], webhook["failurePolicy"], webhook["sideEffects"]) == (WEBHOOK, "Ignore", "None")
    assert (webhook["matchPolicy"], webhook["timeoutSeconds"]) == ("Equivalent", 2)
    (rule,) = webhook["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE", "UPDATE"], [INFERENCE_SERVICES.plural])
    assert rule["apiVersions"] == [INFERENCE_SERVICES.version]
    assert [condition["expression"] for condition in webhook["matchConditions"]] == [
        "oldObject == null || object.spec != oldObject.spec"
    ]


async def test_service_leads_to_the_port_of_the_controller_by_the_name_of_the_certificate() -> None:
    objects = await render(ON)
    (webhook,) = objects[CONFIGURATION]["webhooks"]
    where = webhook["clientConfig"]["service"]
    assert f"{where['name']}.{where['namespace']}.svc" == "pomona-preflight.pomona-system.svc"
    spec = objects["Service", where["namespace"], where["name"]]["spec"]
    (port,) = spec["ports"]
    pod = objects[CONTROLLER]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert spec["selector"].items() <= pod["metadata"]["labels"].items()
    assert where["port"] == port["port"]
    assert {"name": port["targetPort"], "containerPort": 9443} in container["ports"]
    assert "--preflight-bind-address=:9443" in container["args"]


async def test_certificate_and_path_of_the_configuration_are_those_of_the_secret_that_the_controller_has() -> None:
    before, objects = await render(), await render(ON)
    config = objects[CONFIGURATION]["webhooks"][0]["clientConfig"]
    secret = objects["Secret", SYSTEM, NAME]
    assert (secret["type"], config["caBundle"]) == ("kubernetes.io/tls", secret["data"]["tls.crt"])
    segment = b64decode(secret["data"][PATH_FILE]).decode()
    assert re.fullmatch("[a-z0-9]{48}", segment)
    assert config["service"]["path"] == f"{PATH}{segment}"
    spec = objects[CONTROLLER]["spec"]["template"]["spec"]
    assert spec["volumes"] == [{"name": "preflight", "secret": {"secretName": NAME, "optional": True}}]
    (mount,) = spec["containers"][0]["volumeMounts"]
    assert (mount["name"], Path(mount["mountPath"])) == ("preflight", ControllerOptions(SETTINGS).preflight_folder)
    assert [
        identity for identity in objects if "Role" in identity[0] and objects[identity] != before.get(identity)
    ] == []
