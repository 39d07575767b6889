"""What the kinds promise, as the real API server and kubectl keep it: refusals, defaults, selectors, columns, names."""

import re
from copy import deepcopy
from typing import Any, NamedTuple

import pytest

from crds.meta import API_VERSION
from kube.client import Client, Obj
from kube.errors import Invalid
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.controlplane.plane import ControlPlane

MODEL = {"source": "https://models.example/tiny.gguf"}
SERVICE = {"modelRef": "tiny"}
PROCESS = {
    "serviceName": "chat",
    "modelName": "tiny",
    "runtime": "llama.cpp",
    "artifact": {"source": MODEL["source"]},
    "memoryBytes": 1 << 30,
    "tokenSecret": "chat-token",
}
SPECS: dict[Resource, dict[str, Any]] = {
    MODELS: MODEL,
    INFERENCE_SERVICES: SERVICE,
    METAL_PROCESSES: PROCESS,
    METAL_HOSTS: {},
}
NAMESPACED = (MODELS, INFERENCE_SERVICES, METAL_PROCESSES)
FIXED = "a MetalProcess is fixed once written: edit its InferenceService, which replaces it"


def made(resource: Resource, namespace: str, name: str = "one", **spec: Any) -> Obj:
    return {
        "apiVersion": API_VERSION,
        "kind": resource.kind,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {**SPECS[resource], **spec},
    }


class Bad(NamedTuple):
    """A manifest that is refused, and what the user reads."""

    resource: Resource
    spec: dict[str, Any]
    says: str
    name: str = "one"


BAD = {
    "file:// without memoryBytes": Bad(
        MODELS, {"source": "file:///m.gguf"}, "spec: Invalid value: .*a file:// source needs spec.memoryBytes"
    ),
    "file:// with a Secret": Bad(
        MODELS,
        {"source": "file:///m.gguf", "memoryBytes": 1, "sourceSecretRef": {"name": "hub"}},
        "a file:// source takes no spec.sourceSecretRef: remove it",
    ),
    "scheme that nobody fetches": Bad(MODELS, {"source": "ftp://a/m.gguf"}, "spec.source: .*ftp://a/m.gguf"),
    "sha256 in upper case": Bad(MODELS, {"sha256": "A" * 64}, "spec.sha256: .*0-9a-f"),
    "short sha256": Bad(MODELS, {"sha256": "a" * 63}, "spec.sha256: .*0-9a-f"),
    "no memory": Bad(MODELS, {"memoryBytes": 0}, "spec.memoryBytes: .*greater than or equal to 1"),
    "unknown accelerator": Bad(
        MODELS, {"hardware": {"accelerator": "tpu"}}, 'spec.hardware.accelerator: .*"tpu".*"metal"'
    ),
    "long Model name": Bad(MODELS, {}, "use a name of at most 46 characters", "m" * 47),
    "long service name": Bad(INFERENCE_SERVICES, {}, "use at most 40 lower-case letters", "s" * 41),
    "service name with a leading digit": Bad(INFERENCE_SERVICES, {}, "starting with a letter", "1st"),
    "no Model": Bad(INFERENCE_SERVICES, {"modelRef": ""}, "spec.modelRef: .*at least 1 char"),
    "negative replicas": Bad(INFERENCE_SERVICES, {"replicas": -1}, "spec.replicas: .*greater than or equal to 0"),
    "too many slots": Bad(INFERENCE_SERVICES, {"parallel": 65}, "spec.parallel: .*less than or equal to 64"),
    "tiny context": Bad(INFERENCE_SERVICES, {"contextLength": 1}, "spec.contextLength: .*equal to 128"),
    "Secret that no host's key could name": Bad(
        MODELS, {"sourceSecretRef": {"name": "s" * 181}}, "spec.sourceSecretRef.name: .*may not be more than 180"
    ),
    "host name that nothing can be bound to": Bad(METAL_HOSTS, {}, "use a name of at most 63 characters", "h" * 64),
    "process without memory": Bad(METAL_PROCESSES, {"memoryBytes": 0}, "spec.memoryBytes: .*equal to 1"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_bad_manifest_is_refused_with_the_way_out(client: Client, namespace: str, bad: Bad) -> None:
    with pytest.raises(Invalid, match=bad.says):
        await client.create(bad.resource, made(bad.resource, namespace, bad.name, **bad.spec))


@pytest.mark.parametrize("resource", [INFERENCE_SERVICES, METAL_PROCESSES], ids=lambda each: each.kind)
class TestExtraArguments:
    @pytest.mark.parametrize(
        "item",
        ["--log_file=x", "--log-file", "--host", "--lora", "-cram", "--temp=0.5", "-", "a\0b", "a\nb", "on\n", "\x7f"],
        ids=repr,
    )
    async def test_what_is_not_the_users_is_refused(
        self, client: Client, namespace: str, resource: Resource, item: str
    ) -> None:
        with pytest.raises(Invalid, match=r"spec\.extraArgs\[1\].*neither an argument that extraArgs takes"):
            await client.create(resource, made(resource, namespace, extraArgs=["--temp", item]))

    async def test_tuning_is_taken(self, client: Client, namespace: str, resource: Resource) -> None:
        arguments = ["--temp", "0.5", "-fa", "on", "--n_threads", "2", "{{ größer - 1 }}"]
        process = await client.create(resource, made(resource, namespace, extraArgs=arguments))
        assert process["spec"]["extraArgs"] == arguments


@pytest.mark.parametrize(
    "change",
    [
        {"serviceName": "other"},
        {"memoryBytes": 1},
        {"artifact": {"source": MODEL["source"], "sha256": "a" * 64}},
        {"extraArgs": ["-t", "1"]},
        {"contextLength": 8192},
        {"sourceSecret": "hub"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_process_is_fixed_once_written(client: Client, namespace: str, change: dict[str, Any]) -> None:
    await client.create(METAL_PROCESSES, made(METAL_PROCESSES, namespace))
    with pytest.raises(Invalid, match=FIXED):
        await client.apply(METAL_PROCESSES, made(METAL_PROCESSES, namespace, **change), field_manager="test")


async def test_a_process_is_bound_once(client: Client, namespace: str) -> None:
    written = await client.create(METAL_PROCESSES, made(METAL_PROCESSES, namespace))
    assert "hostName" not in written["spec"]

    async def bind(operation: dict[str, Any]) -> Obj:
        return await client.patch_json(METAL_PROCESSES, "one", namespace, [{"path": "/spec/hostName", **operation}])

    await bind({"op": "add", "value": "mac-1"})
    for operation in ({"op": "replace", "value": "mac-2"}, {"op": "remove"}):
        with pytest.raises(Invalid, match=r"spec\.hostName is fixed once bound: a move is a new MetalProcess"):
            await bind(operation)


async def test_a_host_selects_its_own_processes(client: Client, namespace: str) -> None:
    for name, host in (("a", {"hostName": "mac-1"}), ("b", {"hostName": "mac-2"}), ("c", {})):
        await client.create(METAL_PROCESSES, made(METAL_PROCESSES, namespace, name, **host))
    found = await client.list(METAL_PROCESSES, namespace, field_selector="spec.hostName=mac-1")
    assert [each["metadata"]["name"] for each in found.items] == ["a"]


@pytest.mark.parametrize(
    ("resource", "filled_in"),
    [
        (MODELS, {"cache": {"accessMode": "ReadWriteOnce"}, "hardware": {"accelerator": "cpu"}}),
        (
            INFERENCE_SERVICES,
            {"replicas": 1, "suspend": False, "contextLength": 4096, "parallel": 1, "priority": "normal"},
        ),
        (METAL_PROCESSES, {"contextLength": 4096, "parallel": 1, "priority": "normal"}),
    ],
    ids=["Model", "InferenceService", "MetalProcess"],
)
async def test_defaults_are_filled_in(
    client: Client, namespace: str, resource: Resource, filled_in: dict[str, Any]
) -> None:
    written = await client.create(resource, made(resource, namespace))
    assert written["spec"] == SPECS[resource] | filled_in


async def test_the_volumes_access_mode_stays(client: Client, namespace: str) -> None:
    model = made(MODELS, namespace)
    await client.create(MODELS, model)
    changed = deepcopy(model)
    changed["spec"]["cache"] = {"accessMode": "ReadWriteMany"}
    with pytest.raises(Invalid, match=r"cache\.accessMode cannot change while the volume exists: make a new Model"):
        await client.apply(MODELS, changed, field_manager="test")


async def test_kubectl_scales_a_service(plane: ControlPlane, client: Client, namespace: str) -> None:
    await client.create(INFERENCE_SERVICES, made(INFERENCE_SERVICES, namespace))
    status = {"status": {"replicas": 1, "selector": "inference.pomona.dev/service=one"}}
    await plane.request("PATCH", f"{INFERENCE_SERVICES.path(namespace, 'one')}/status", status)
    await plane.kubectl("scale", "--namespace", namespace, "isvc/one", "--replicas=3")
    scale = await plane.request("GET", f"{INFERENCE_SERVICES.path(namespace, 'one')}/scale")
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == status["status"]
    assert (await client.get(INFERENCE_SERVICES, "one", namespace))["spec"]["replicas"] == 3


async def test_status_is_not_written_with_the_spec(client: Client, namespace: str) -> None:
    written = await client.create(MODELS, made(MODELS, namespace) | {"status": {"phase": "Ready"}})
    assert "status" not in written


async def test_get_pomona_shows_every_kind(plane: ControlPlane, client: Client, namespace: str) -> None:
    for resource in NAMESPACED:
        await client.create(resource, made(resource, namespace))
    listed = (await plane.kubectl("get", "pomona", "--namespace", namespace, "--output=name")).split()
    assert {name.partition(".")[0] for name in listed} >= {"model", "inferenceservice", "metalprocess"}
    kinds = (await plane.request("GET", f"/apis/{API_VERSION}"))["resources"]
    assert {kind["name"]: kind["categories"] for kind in kinds if "/" not in kind["name"]} == {
        resource.plural: ["pomona"] for resource in SPECS
    }


@pytest.mark.parametrize(
    ("short", "columns", "more"),
    [
        ("mdl", "PHASE SIZE ACCELERATOR CACHED REASON AGE", "ARCH MESSAGE"),
        ("isvc", "PHASE MODEL ACCELERATOR READY REPLICAS REASON ENDPOINT AGE", "MESSAGE"),
        ("mp", "PHASE SERVICE HOST RESTARTS REASON AGE", "MESSAGE"),
    ],
)
async def test_columns(plane: ControlPlane, namespace: str, short: str, columns: str, more: str) -> None:
    for resource in NAMESPACED:
        await plane.request("POST", resource.path(namespace), made(resource, namespace))
    narrow, wide = [
        (await plane.kubectl("get", short, "--namespace", namespace, *options)).splitlines()[0].split()
        for options in ((), ("--output=wide",))
    ]
    assert narrow == ["NAME", *columns.split()]
    assert sorted(wide) == sorted([*narrow, *more.split()])


async def test_columns_of_a_host(plane: ControlPlane) -> None:
    name = "column-1"
    host = {"apiVersion": API_VERSION, "kind": "MetalHost", "metadata": {"name": name}}
    status = {"chip": "Apple M4 Max", "available": "20.5 GiB", "address": "10.77.0.9", "agentVersion": "1.2.3"}
    await plane.request("POST", METAL_HOSTS.path(None), host)
    try:
        await plane.request("PATCH", f"{METAL_HOSTS.path(None, name)}/status", {"status": status})
        narrow, row = (await plane.kubectl("get", "mh", name)).splitlines()
        assert narrow.split() == ["NAME", "READY", "CHIP", "FREE", "ADDRESS", "REASON", "AGE"]
        assert re.search(r"Apple M4 Max +20\.5 GiB +10\.77\.0\.9", row)
    finally:
        await plane.request("DELETE", METAL_HOSTS.path(None, name))
