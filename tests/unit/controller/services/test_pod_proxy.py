"""Pods of services: Pomona's proxy is the main container, and the engine its sidecar."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from artifacts.repositories.address_policy import NETWORKS_VARIABLE
from cli.main import main
from controller.pod_settings import PodSettings
from controller.reconcile.stamp import is_desired, stamp
from controller.services.pods.deployment import build_deployment
from controller.services.pods.pod_template import EngineChoice, MountedWeights
from controller.services.serving_choice import apply_choice
from crds.pods import ContainerOptions
from crds.serving import ServingChoice
from devices.vendors import VENDORS
from gateway.proxy.pod import REPORT_SECONDS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PODS
from tests.support.api_objects import as_service, library_model, model, planned_condition, service
from tests.support.service_decisions import (
    chat_deployment,
    chat_pod,
    chat_service,
    decide_chat,
    kept_part,
    list_applied,
    ready_outcome,
)

SETTINGS = PodSettings(image="registry.example/pomona:1", environment={NETWORKS_VARIABLE: "10.0.0.0/8", "X": "y"})
ON_VOLUME = MountedWeights("tiny-cache", "0123abcd/tiny.gguf", 10 * 2**30)
CHOICE = ServingChoice(context_length=4096, cpu="3")
OF_LIBRARY = MountedWeights(None, "ollama://tiny:1b", 2**30)


def pod(runtime: str, weights: MountedWeights = ON_VOLUME, accelerator: str = "cpu", **spec: Any) -> Obj:
    container = ContainerOptions(port=9000, model_mount_path="/weights") if runtime == "generic" else None
    choice = EngineChoice(runtime, accelerator, VENDORS[accelerator], 2**30, container=container)
    image: dict[str, Any] = {"image": "registry.example/engine:1"} if runtime == "generic" else {}
    _, obj = build_deployment(
        apply_choice(as_service(service(**image, **spec)), CHOICE), choice, weights, settings=SETTINGS
    )
    template: Obj = obj["spec"]["template"]["spec"]
    return template


def arguments(pod: Obj) -> dict[str, str]:
    """Return the options of the proxy; all have a value."""
    (proxy,) = pod["containers"]
    verb, *rest = proxy["args"]
    assert verb == "pod-proxy"
    return dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize(
    ("runtime", "accelerator", "pulse"),
    [("llama.cpp", "nvidia", "/metrics"), ("llama.cpp", "cpu", None), ("vllm", "nvidia", None)],
)
def test_proxy_asks_an_engine_on_a_device_for_its_pulse(runtime: str, accelerator: str, pulse: str | None) -> None:
    assert arguments(pod(runtime, accelerator=accelerator)).get("--pulse-path") == pulse


def split(spec: Obj) -> tuple[Obj, Obj]:
    """Return the two containers of a pod: the engine and its proxy."""
    (engine,), (proxy,) = spec["initContainers"], spec["containers"]
    return engine, proxy


def mounts(container: Obj) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def test_engine_is_a_sidecar_which_kubernetes_stops_after_the_proxy() -> None:
    engine, proxy = split(pod("ollama"))
    assert (engine["name"], engine["restartPolicy"]) == ("ollama", "Always")
    assert (proxy["name"], proxy["image"]) == ("proxy", "registry.example/pomona:1")


def test_engine_cannot_be_reached_from_outside_of_its_pod() -> None:
    engine, proxy = split(pod("ollama"))
    assert {"name": "OLLAMA_HOST", "value": "127.0.0.1:11434"} in engine["env"]
    # The kubelet would ask at the address of the pod.
    assert not {"ports", "startupProbe", "readinessProbe"} & engine.keys()
    assert proxy["ports"] == [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]
    assert proxy["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_engine_is_restarted_when_the_proxy_says_so_but_not_while_the_proxy_is_started() -> None:
    for runtime in ("ollama", "generic"):
        engine, proxy = split(pod(runtime))
        probe = engine["livenessProbe"]
        # A name would be looked up among the ports of the engine, which has none.
        assert probe["httpGet"] == {"path": "/live/engine", "port": proxy["ports"][0]["containerPort"]}
        # The sidecar is started before the image of the proxy is pulled.
        assert probe["initialDelaySeconds"] >= 1800
        # The kubelet waits at most 300 s before it starts a container again.
        assert probe["periodSeconds"] * probe["failureThreshold"] > 300 + 60


@pytest.mark.parametrize(("size_bytes", "seconds"), [(None, 3600), (2**30, 3600), (140_000_000_000, 5600)])
@pytest.mark.parametrize("runtime", ["ollama", "generic"])
def test_proxy_knows_how_long_loading_may_take(runtime: str, size_bytes: int | None, seconds: int) -> None:
    spec = pod(runtime, MountedWeights("tiny-cache", "0123abcd/tiny.gguf", size_bytes))
    assert arguments(spec)["--loading-seconds"] == str(seconds)


def test_engine_that_loads_for_too_long_is_restarted_once_while_the_proxy_says_so() -> None:
    engine, _ = split(pod("generic"))
    probe = engine["livenessProbe"]
    restart_seconds = probe["periodSeconds"] * (probe["failureThreshold"] + 1) + probe["terminationGracePeriodSeconds"]
    again_seconds = probe["initialDelaySeconds"] + probe["periodSeconds"] * (probe["failureThreshold"] - 1)
    assert restart_seconds + 300 < REPORT_SECONDS < again_seconds - 300


def test_only_the_proxy_gets_the_token() -> None:
    for runtime in ("ollama", "generic"):
        spec = pod(runtime)
        engine, proxy = split(spec)
        assert "token" not in mounts(engine)
        assert mounts(proxy)["token"] == "/run/secrets/pomona"
        assert arguments(spec)["--token-file"] == "/run/secrets/pomona/token"


def test_requests_end_within_the_grace_period_of_the_pod() -> None:
    spec = pod("ollama")
    (proxy,) = spec["containers"]
    pause = proxy["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause > 0
    assert pause + float(arguments(spec)["--drain-seconds"]) < spec["terminationGracePeriodSeconds"]


def test_both_containers_meet_the_restricted_standard() -> None:
    for runtime in ("ollama", "generic"):
        spec = pod(runtime)
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_proxy_brings_the_model_into_ollama() -> None:
    spec = pod("ollama", contextLength=2048, parallel=4)
    given = arguments(spec)
    assert (given["--engine"], given["--source"]) == ("ollama", "/models/0123abcd/tiny.gguf")
    assert (given["--context-length"], given["--concurrency"], given["--threads"]) == ("2048", "4", "3")
    assert given["--engine-model"].startswith("pomona/chat:")
    engine, proxy = split(spec)
    assert mounts(proxy)["models"] == "/models"
    # Ollama keeps a copy, for which the node needs room.
    limits = {volume["name"]: volume["emptyDir"].get("sizeLimit") for volume in spec["volumes"] if "emptyDir" in volume}
    assert limits["store"] == engine["resources"]["requests"]["ephemeral-storage"] == str(12 * 2**30)
    assert mounts(engine)["store"] == "/ollama"


def test_other_weights_or_another_context_have_another_name_in_ollama() -> None:
    names = [
        arguments(spec)["--engine-model"]
        for spec in (
            pod("ollama"),
            pod("ollama", contextLength=1024),
            pod("ollama", MountedWeights("tiny-cache", "ffff/tiny.gguf")),
        )
    ]
    assert len(set(names)) == 3


def test_model_of_the_library_needs_no_volume() -> None:
    spec = pod("ollama", OF_LIBRARY)
    assert arguments(spec)["--source"] == "ollama://tiny:1b"
    assert not [volume for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    engine, proxy = split(spec)
    assert "models" not in {**mounts(engine), **mounts(proxy)}
    assert proxy["env"] == [{"name": NETWORKS_VARIABLE, "value": "10.0.0.0/8"}]


def test_devices_are_the_engines() -> None:
    spec = pod("ollama", accelerator="nvidia")
    engine, proxy = split(spec)
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert set(proxy["resources"]["limits"]) == {"memory"}


def test_container_of_the_user_is_behind_the_proxy_as_it_is_stated() -> None:
    spec = pod("generic")
    (engine,) = spec["initContainers"]
    assert (engine["image"], mounts(engine)["models"]) == ("registry.example/engine:1", "/weights")
    variables = {variable["name"]: variable["value"] for variable in engine["env"]}
    assert variables == {"MODEL_PATH": "/weights/0123abcd/tiny.gguf", "PORT": "9000", "SERVICE_NAME": "chat"}
    given = arguments(spec)
    assert (given["--engine-port"], given["--health-path"], given["--mode"]) == ("9000", "/health", "chat")
    assert not {"--source", "--engine-model", "--concurrency"} & given.keys()


def test_pomona_takes_the_arguments_of_the_proxy(tmp_path: Path) -> None:
    log = tmp_path / "termination"
    for runtime in ("ollama", "generic", "vllm"):
        (proxy,) = pod(runtime)["containers"]
        here = ["--token-file", "/nonexistent/token", "--termination-log", str(log)]
        result = CliRunner().invoke(main, [*proxy["args"], *here])
        assert result.exit_code == 1, result.output
        assert log.read_text() == "cannot read --token-file /nonexistent/token: No such file or directory"
        log.unlink()


OLLAMA = chat_service(runtime="ollama")


def test_applied_deployment_with_a_proxy_is_applied_once() -> None:
    base = (OLLAMA, (MODELS, model()))
    there = kept_part(stamp(chat_deployment(*base)))
    (wanted,) = list_applied(decide_chat(*base, (DEPLOYMENTS, there)), DEPLOYMENTS)
    assert is_desired(wanted, there)


def test_better_estimate_of_an_engine_behind_a_proxy_replaces_no_pod() -> None:
    base = (OLLAMA, (MODELS, model()))
    there = chat_deployment(*base)
    (engine,) = there["spec"]["template"]["spec"]["initContainers"]
    engine["resources"]["requests"]["memory"] = "1234567"
    there = kept_part(stamp(there))
    (wanted,) = list_applied(decide_chat(*base, (DEPLOYMENTS, there)), DEPLOYMENTS)
    assert is_desired(wanted, there)


def test_pod_that_prepares_its_model_says_where_its_progress_is() -> None:
    base = (OLLAMA, (MODELS, model()))
    running = {"started": True, "state": {"running": {}}}
    # The store has the sidecars with the main containers.
    statuses = [{"name": "ollama", "ready": True, **running}, {"name": "proxy", "ready": False, **running}]
    there = (DEPLOYMENTS, chat_deployment(*base, ready=0))
    plan = decide_chat(*base, there, (PODS, chat_pod(ready=False, containerStatuses=statuses)))
    message = planned_condition(plan, "Ready")["message"]
    assert message.endswith("the engine is loading the model: see `kubectl logs -n team chat-1 --all-containers`")
    assert ready_outcome(plan) == ("Progressing", "False", "Loading")
    assert [event.type for event in plan.events] == ["Normal"], "a slow load is no trouble"


def test_end_of_the_proxy_is_the_cause_also_after_the_kubelet_has_restarted_the_engine_without_it() -> None:
    base = (OLLAMA, (MODELS, model()))
    engine = {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    ended = {"exitCode": 1, "reason": "Error", "message": "file does not exist"}
    proxy = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
    statuses = [{"name": "ollama", **engine}, {"name": "proxy", **proxy}]
    there = (DEPLOYMENTS, chat_deployment(*base, ready=0))
    plan = decide_chat(*base, there, (PODS, chat_pod(ready=False, containerStatuses=statuses)))
    assert ready_outcome(plan) == ("Failed", "False", "CrashLoopBackOff")
    message = planned_condition(plan, "Ready")["message"]
    assert message.endswith("proxy ended with exit code 1: file does not exist")


PROXY_KILLED = (
    "proxy was killed (OOMKilled): Pomona's proxy took more than its memory of 512Mi, which no field of the "
    "service raises, or its node ran out of memory: raise replicas, so that each proxy holds fewer requests, or send "
    "smaller requests, such as with smaller images"
)
ENGINE_KILLED = (
    "ollama was killed (OOMKilled): it took more than its memory of 3Gi, or its node ran out of memory: raise "
    "resources.memory, or lower contextLength or parallel"
)


@pytest.mark.parametrize(("killed", "says"), [("proxy", PROXY_KILLED), ("ollama", ENGINE_KILLED)])
def test_killed_container_is_reported_with_its_own_memory_and_way_out(killed: str, says: str) -> None:
    base = (chat_service(runtime="ollama", resources={"memory": "3Gi"}), (MODELS, model()))
    statuses: list[Obj] = [{"name": name, "state": {"running": {}}} for name in ("ollama", "proxy")]
    for status in statuses:
        if status["name"] == killed:
            status["lastState"] = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    # The store keeps less of a Deployment than the API server sends.
    there = kept_part(stamp(chat_deployment(*base, ready=0)))
    plan = decide_chat(*base, (DEPLOYMENTS, there), (PODS, chat_pod(ready=False, containerStatuses=statuses)))
    assert ready_outcome(plan) == ("Progressing", "False", "Restarting")
    assert planned_condition(plan, "Ready")["message"].endswith(f"pod chat-1: {says}")


WAITS: Obj = {"name": "proxy", "state": {"waiting": {"reason": "PodInitializing"}}}
RUNS: Obj = {"name": "proxy", "started": True, "ready": False, "state": {"running": {}}}


@pytest.mark.parametrize(
    ("engine", "proxy", "expected", "says"),
    [
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
            WAITS,
            ("Failed", "False", "ImagePullBackOff"),
            "pod chat-1: no such image",
        ),
        (
            {"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            RUNS,
            ("Progressing", "False", "Restarting"),
            f"pod chat-1: {ENGINE_KILLED}",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such device\n"}},
            },
            RUNS,
            ("Failed", "False", "CrashLoopBackOff"),
            "pod chat-1: ollama ended with exit code 1: no such device",
        ),
    ],
    ids=["image pull", "out of memory", "last line"],
)
def test_trouble_of_an_engine_that_is_a_sidecar_is_the_cause(
    engine: Obj, proxy: Obj, expected: tuple[str, str, str], says: str
) -> None:
    """The kubelet reports a sidecar among the init containers."""
    base = (chat_service(runtime="ollama", resources={"memory": "3Gi"}), (MODELS, model()))
    statuses: Obj = {"initContainerStatuses": [{"name": "ollama", **engine}], "containerStatuses": [proxy]}
    there = kept_part(stamp(chat_deployment(*base, ready=0)))
    plan = decide_chat(*base, (DEPLOYMENTS, there), (PODS, chat_pod(ready=False, **statuses)))
    assert ready_outcome(plan) == expected
    assert planned_condition(plan, "Ready")["message"].endswith(says)


def test_memory_of_a_container_of_the_user_must_be_stated() -> None:
    stated = {"runtime": "generic", "image": "registry.example/engine:1"}
    plan = decide_chat(chat_service(**stated), (MODELS, model()))
    assert ready_outcome(plan) == ("Failed", "False", "MemoryUnknown")
    assert planned_condition(plan, "Ready")["message"].endswith("set resources.memory")
    plan = decide_chat(chat_service(**stated, resources={"memory": "1Gi"}), (MODELS, model()))
    assert list_applied(plan, DEPLOYMENTS)


def test_model_of_the_library_is_served_in_pods_without_a_volume() -> None:
    plan = decide_chat(chat_service(), (MODELS, library_model()))
    (wanted,) = list_applied(plan, DEPLOYMENTS)
    assert wanted["spec"]["template"]["spec"]["initContainers"][0]["name"] == "ollama"


def pull_secrets(runtime: str, *of_user: str) -> list[str] | None:
    """Return the names of the pull secrets of a pod; None if it states none."""
    container = ContainerOptions(port=9000, model_mount_path="/weights") if runtime == "generic" else None
    choice = EngineChoice(runtime, "cpu", VENDORS["cpu"], 2**30, container=container)
    options: Obj = {"pod": {"imagePullSecrets": [{"name": name} for name in of_user]}} if of_user else {}
    settings = replace(SETTINGS, image_pull_secrets=("registry", "mirror"))
    chat = as_service(service(image="registry.example/engine:1", **options))
    _, obj = build_deployment(chat, choice, ON_VOLUME, settings=settings)
    secrets = obj["spec"]["template"]["spec"].get("imagePullSecrets")
    return None if secrets is None else [secret["name"] for secret in secrets]


@pytest.mark.parametrize("runtime", ["llama.cpp", "ollama", "generic"])
def test_pod_has_the_pull_secrets_of_user_and_controller_once(runtime: str) -> None:
    assert pull_secrets(runtime) == ["registry", "mirror"]
    assert pull_secrets(runtime, "theirs", "mirror") == ["theirs", "mirror", "registry"]


def test_pod_needs_an_image_of_pomona() -> None:
    stated: Obj = {"image": "registry.example/engine:1", "container": {}, "resources": {"memory": "1Gi"}}
    chat = (chat_service(runtime="generic", **stated), (MODELS, model()))
    refused = decide_chat(*chat, settings=PodSettings(image=""))
    assert ready_outcome(refused) == ("Failed", "False", "NoImage")
    assert "start `pomona controller` with --image" in planned_condition(refused, "Ready")["message"]
    assert not list_applied(refused, DEPLOYMENTS)
    assert list_applied(decide_chat(*chat), DEPLOYMENTS)
