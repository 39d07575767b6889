"""Options of spec.pod: what they add to a pod, what they cannot take, and the affinity of user and hardware."""

from typing import Any

import msgspec
import pytest

from controller.services.pods.pod_options import find_option_problem, pin_to_node
from controller.services.pods.pod_template import EngineChoice, MountedWeights, build_pod
from crds.meta import Accelerator
from crds.pods import ContainerOptions
from devices.vendors import VENDORS
from kube.client import Obj
from kube.resources import DEPLOYMENTS, MODELS, PVCS
from tests.support.api_objects import NAMESPACE, as_service, model, planned_condition, service
from tests.support.service_decisions import METAL, chat_service, decide_chat, list_applied

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
DISK = {"key": "disk", "operator": "Exists"}
L4 = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]}
SCRATCH = {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}


def pod(accelerator: Accelerator = "cpu", *, hardware: Obj | None = None, **options: Any) -> Obj:
    chat = as_service(service(pod=options, hardware=hardware or {}))
    choice = EngineChoice("llama.cpp", accelerator, VENDORS[accelerator], 2**30)
    return build_pod(chat, choice, MountedWeights("tiny-cache", "0123abcd/tiny.gguf"))


def refusal(options: Obj, **spec: Any) -> str:
    """Return the message with which the service is refused; empty if it is not."""
    claim = {"metadata": {"name": "tiny-cache", "namespace": NAMESPACE, "uid": "uid-claim", "resourceVersion": "1"}}
    plan = decide_chat(chat_service(pod=options, **spec), (MODELS, model()), (PVCS, claim))
    ready = planned_condition(plan, "Ready")
    is_refused = ready["reason"] == "InvalidSpec"
    assert is_refused is not bool(list_applied(plan, DEPLOYMENTS))
    return str(ready["message"]) if is_refused else ""


def test_pod_has_pull_secrets_runtime_class_and_variables_of_the_user() -> None:
    spec = pod(imagePullSecrets=[{"name": "registry"}], runtimeClassName="gvisor", env=[{"name": "A", "value": "b"}])
    assert (spec["imagePullSecrets"], spec["runtimeClassName"]) == ([{"name": "registry"}], "gvisor")
    assert spec["initContainers"][0]["env"][-1] == {"name": "A", "value": "b"}


def test_scheduler_is_that_of_the_user_or_else_of_the_cluster() -> None:
    assert pod(schedulerName="pomona-scheduler")["schedulerName"] == "pomona-scheduler"
    assert "schedulerName" not in pod()


@pytest.mark.parametrize(
    ("of_vendor", "of_user", "expected"),
    [("nvidia", None, "nvidia"), ("nvidia", "gvisor", "gvisor"), (None, None, None)],
)
def test_runtime_class_is_that_of_the_user_or_else_of_the_vendor(
    of_vendor: str | None, of_user: str | None, expected: str | None
) -> None:
    vendor = msgspec.structs.replace(VENDORS["nvidia"], runtime_class=of_vendor)
    chat = as_service(service(pod={} if of_user is None else {"runtimeClassName": of_user}))
    spec = build_pod(
        chat, EngineChoice("llama.cpp", "nvidia", vendor, 2**30), MountedWeights("tiny-cache", "tiny.gguf")
    )
    assert spec.get("runtimeClassName") == expected


def test_volumes_of_the_user_are_added_under_names_of_their_own() -> None:
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}
    files = {"name": "tmp", "configMap": {"name": "templates"}}
    mount = {"name": "tmp", "mountPath": "/etc/templates", "readOnly": True}
    spec, bare = pod(volumes=[SCRATCH, claim, files], volumeMounts=[mount]), pod()
    own_mounts = bare["initContainers"][0]["volumeMounts"]
    assert spec["volumes"] == [
        *bare["volumes"],
        SCRATCH | {"name": "user-scratch"},
        claim | {"name": "user-cache"},
        files | {"name": "user-tmp"},
    ]
    assert spec["initContainers"][0]["volumeMounts"] == [*own_mounts, mount | {"name": "user-tmp"}]


def test_pod_has_the_class_of_its_priority_and_prefers_several_nodes() -> None:
    spec = pod()
    assert spec["priorityClassName"] == "pomona-normal"
    (spread,) = spec["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"] == {"matchLabels": {"inference.pomona.dev/service": "chat"}}
    assert "topologySpreadConstraints" not in pod(topologySpreadConstraints=[])
    (zones,) = pod(topologySpreadConstraints=[{"topologyKey": "zone", "maxSkew": 2}])["topologySpreadConstraints"]
    assert (zones["topologyKey"], zones["maxSkew"]) == ("zone", 2)


def test_scaling_restarts_no_pod() -> None:
    templates = [
        list_applied(decide_chat(chat_service(replicas=each), (MODELS, model())), DEPLOYMENTS)[0]["spec"]["template"]
        for each in (1, 2)
    ]
    assert templates[0] == templates[1]


def test_sizes_are_stated_as_kubernetes_reads_them() -> None:
    volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": "1 GiB"}}]
    resources = {"memory": "4GiB", "memoryLimit": "8 GB", "cpu": "500m"}
    chat = as_service(service(resources=resources, pod={"volumes": volumes}))
    choice = EngineChoice("llama.cpp", "cpu", VENDORS["cpu"], "4GiB")
    spec = build_pod(chat, choice, MountedWeights("tiny-cache", "0123abcd/tiny.gguf"))
    (engine,) = spec["initContainers"]
    resources = engine["resources"]
    assert (resources["requests"], resources["limits"]) == ({"memory": "4Gi", "cpu": "500m"}, {"memory": "8G"})
    assert {"name": "user-scratch", "emptyDir": {"sizeLimit": "1Gi"}} in spec["volumes"]


def test_memory_limit_is_stated_beside_the_devices() -> None:
    choice = EngineChoice("llama.cpp", "nvidia", VENDORS["nvidia"], "1Gi")
    chat = as_service(service(resources={"memoryLimit": "2Gi"}))
    (engine,) = build_pod(chat, choice, MountedWeights("tiny-cache", "a/tiny.gguf"))["initContainers"]
    assert engine["resources"]["limits"] == {"memory": "2Gi", "nvidia.com/gpu": "1"}
    assert engine["resources"]["requests"] == {"memory": "1Gi", "nvidia.com/gpu": "1"}


def test_hardware_holds_in_each_term_of_the_users_affinity() -> None:
    terms = [{"matchExpressions": [ZONE]}, {"matchFields": [DISK]}, {}]
    stated = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}, "podAntiAffinity": {REQUIRED: [anti()]}}
    affinity = pod("nvidia", hardware={"products": ["NVIDIA-L4"]}, affinity=stated)["affinity"]
    assert affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {"matchExpressions": [ZONE, L4]},
        {"matchFields": [DISK], "matchExpressions": [L4]},
        {},  # matches no node, and goes on to match none
    ]
    assert affinity["podAntiAffinity"] == {REQUIRED: [anti()]}


def test_node_of_a_copy_holds_in_each_term_of_the_users_affinity() -> None:
    terms = [{"matchExpressions": [ZONE]}, {"matchFields": [DISK]}, {}, {"matchExpressions": []}]
    preferred = [{"weight": 5, "preference": {"matchExpressions": [ZONE]}}]
    nodes = {REQUIRED: {"nodeSelectorTerms": terms}, PREFERRED: preferred}
    stated = {"affinity": {"nodeAffinity": nodes, "podAntiAffinity": {REQUIRED: [anti()]}}, "containers": []}
    name = {"key": "metadata.name", "operator": "In", "values": ["node-1"]}
    pinned = pin_to_node(stated, "node-1")
    assert pinned["affinity"]["nodeAffinity"] == {
        REQUIRED: {
            "nodeSelectorTerms": [
                {"matchExpressions": [ZONE], "matchFields": [name]},
                {"matchFields": [DISK, name]},
                {},  # matches no node, and goes on to match none
                {"matchExpressions": []},
            ]
        },
        PREFERRED: preferred,
    }
    assert pinned["affinity"]["podAntiAffinity"] == {REQUIRED: [anti()]}
    alone = pin_to_node({"containers": []}, "node-1")["affinity"]
    assert alone == {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [name]}]}}}


def test_affinity_concerns_no_pods_of_other_namespaces() -> None:
    foreign = {"namespaces": ["other"], "namespaceSelector": {}}
    stated = {
        "podAntiAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, **foreign}]}
    }
    assert not foreign.keys() & pod(affinity=stated)["affinity"]["podAntiAffinity"][REQUIRED][0].keys()


def test_preferences_of_hardware_and_user_add_up() -> None:
    wish = {"weight": 5, "preference": {"matchExpressions": [ZONE]}}
    hardware = {"preferredProducts": ["NVIDIA-L4"], "products": ["NVIDIA-L4"]}
    affinity = pod("nvidia", hardware=hardware, affinity={"nodeAffinity": {PREFERRED: [wish]}})["affinity"]
    assert affinity["nodeAffinity"][PREFERRED][1] == wish
    assert affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [{"matchExpressions": [L4]}]
    assert "affinity" not in pod()


def anti() -> Obj:
    return {"topologyKey": "zone", "labelSelector": {}}


@pytest.mark.parametrize(
    "path",
    [
        "/models",
        "/models/a",
        "/",
        "/tmp/",
        "/dev/shm",
        "/proc",
        "/parts/1",
        "/run",
        "/var/run",
        "/run/secrets/pomona",
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "/opt/../models",
        "//models",
        "/opt/./..//tmp",
    ],
)
def test_mount_over_pomonas_own_is_refused(path: str) -> None:
    message = refusal({"volumes": [SCRATCH], "volumeMounts": [{"name": "scratch", "mountPath": path}]})
    assert message.startswith(f"pod.volumeMounts {path} overlaps /")


@pytest.mark.parametrize("path", ["/opt/models", "/modelsb", "/runs", "/tmpfiles", "/home/me/.cache"])
def test_mount_elsewhere_is_accepted(path: str) -> None:
    assert refusal({"volumes": [SCRATCH], "volumeMounts": [{"name": "scratch", "mountPath": path}]}) == ""


def test_volume_that_does_not_exist_is_refused() -> None:
    for name in ("other", "token"):
        assert f"has volume {name}, which pod.volumes does not have" in refusal(
            {"volumes": [SCRATCH], "volumeMounts": [{"name": name, "mountPath": "/opt/a"}]}
        )


@pytest.mark.parametrize("claim", ["tiny-cache", "later-cache", "tiny-cache-0123abcd"])
def test_claim_with_verified_weights_cannot_be_written(claim: str) -> None:
    """Also one that does not exist yet: its Model may be made after this service."""
    assert f"pod.volumes a is claim {claim}, and" in refusal({"volumes": [mounted(claim)]})


@pytest.mark.parametrize("claim", ["mine", "cache", "cache-of-kernels", "tiny-cache-2"])
def test_claim_of_a_user_is_accepted(claim: str) -> None:
    assert refusal({"volumes": [mounted(claim)]}) == ""


def mounted(claim: str) -> dict[str, Any]:
    return {"name": "a", "persistentVolumeClaim": {"claimName": claim}}


def test_variable_that_pomona_sets_is_refused() -> None:
    gaudi = VENDORS["intel-gaudi"]
    (name, *_) = gaudi.environment
    choice = EngineChoice("llama.cpp", "intel-gaudi", gaudi, 1)
    own = build_pod(as_service(service()), choice, MountedWeights("tiny-cache", "a"))
    options = as_service(service(pod={"env": [{"name": name, "value": "x"}]})).spec.pod
    assert find_option_problem(options, own) == (
        f"pod.env {name} is set by Pomona: remove it, and use the field of the service instead"
    )
    assert refusal({"env": [{"name": name}]}) == "", "Pomona does not set it on a CPU"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("NVIDIA_VISIBLE_DEVICES", "all", "by which a node would give the container devices of other pods"),
        ("HABANA_VISIBLE_DEVICES", "all", "by which a node would give the container devices of other pods"),
        ("HABANA_VISIBLE_MODULES", "0,1", "which overrides the device plugin's choice of devices"),
        ("CUDA_VISIBLE_DEVICES", "", "which overrides the device plugin's choice of devices"),
        ("HIP_VISIBLE_DEVICES", "all", "which overrides the device plugin's choice of devices"),
        ("ROCR_VISIBLE_DEVICES", "0", "which overrides the device plugin's choice of devices"),
        ("ONEAPI_DEVICE_SELECTOR", "level_zero:0", "which overrides the device plugin's choice of devices"),
        ("ZE_AFFINITY_MASK", "0", "which overrides the device plugin's choice of devices"),
        # NVIDIA's runtime takes an image with this variable for one of the time before NVIDIA_VISIBLE_DEVICES.
        ("CUDA_VERSION", "12.4", "by which a node would give the container devices of other pods"),
        # AMD's hook takes any variable with this prefix for AMD_VISIBLE_DEVICES; so may NVIDIA's, by its configuration.
        ("DOCKER_RESOURCE_GPU", "all", "by which a node would give the container devices of other pods"),
        # Habana's runtime compares only the beginning of the name.
        ("HABANA_VISIBLE_DEVICES_2", "all", "by which a node would give the container devices of other pods"),
    ],
)
def test_variable_that_chooses_devices_is_refused(name: str, value: str, reason: str) -> None:
    assert refusal({"env": [{"name": "A"}, {"name": name, "value": value}]}) == (
        f"pod.env sets {name} to {value!r}, {reason}: remove it, and state hardware.count"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_MOFED", "NVIDIA_GDS", "NVIDIA_GDRCOPY", "NVIDIA_NVSWITCH"),
        *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA", "NVIDIA_LATER"),
    ],
)
def test_variable_that_nvidias_runtime_may_read_is_refused(name: str) -> None:
    assert refusal({"env": [{"name": name, "value": "enabled"}]}) == (
        f"pod.env sets {name} to 'enabled', by which NVIDIA's container runtime would give the container more of its "
        "node: remove it; an administrator may set it for an accelerator by `pomona controller --vendors`"
    )


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_DISABLE_REQUIRE", "NVIDIA_TF32_OVERRIDE", "NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "CUDA_VERSION_X"),
        *("HABANA_PROFILE", "HABANA_LOGS", "AMD_LOG_LEVEL", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
    ],
)
def test_variable_that_only_the_engine_reads_is_accepted(name: str) -> None:
    assert refusal({"env": [{"name": name, "value": "1"}]}) == ""


def generic_pod(**options: Any) -> Obj:
    """Return the pod of a container that the service states, with its weights at /weights."""
    container = ContainerOptions(model_mount_path="/weights")
    choice = EngineChoice("generic", "cpu", VENDORS["cpu"], 1, container=container)
    chat = as_service(service(pod=options, image="registry.example/engine:1"))
    return build_pod(chat, choice, MountedWeights("tiny-cache", "a/tiny.gguf"))


def test_engine_behind_a_proxy_has_the_options_and_the_proxy_has_none() -> None:
    mount = {"name": "scratch", "mountPath": "/opt/a"}
    spec = generic_pod(env=[{"name": "A", "value": "b"}], volumes=[SCRATCH], volumeMounts=[mount])
    (engine,), (proxy,) = spec["initContainers"], spec["containers"]
    assert {"name": "A", "value": "b"} in engine["env"]
    assert mount | {"name": "user-scratch"} in engine["volumeMounts"]
    assert "user-scratch" not in str(proxy)


def test_mount_over_the_weights_of_an_engine_behind_a_proxy_is_refused() -> None:
    options = {"volumes": [SCRATCH], "volumeMounts": [{"name": "scratch", "mountPath": "/weights/a"}]}
    message = find_option_problem(as_service(service(pod=options)).spec.pod, generic_pod())
    assert message is not None
    assert message.startswith("pod.volumeMounts /weights/a overlaps /weights")


def test_options_of_pods_are_refused_for_hosts() -> None:
    message = refusal({"env": [{"name": "A"}]}, **METAL)
    assert message.startswith("accelerator metal runs outside the cluster, where pod cannot hold: remove pod")
