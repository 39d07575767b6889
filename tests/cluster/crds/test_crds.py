"""The CRDs on a real API server and with kubectl: refusals, defaults, selectors, columns, names."""

import json
import re
from copy import deepcopy
from typing import Any

import pytest

from crds.definitions import DEFINITIONS
from crds.meta import API_VERSION
from kube.client import Client, Obj
from kube.errors import Invalid
from kube.resources import INFERENCE_SERVICES, METAL_HOSTS, METAL_PROCESSES, MODELS, Resource
from tests.controlplane.plane import ControlPlane
from tests.support.refused_manifests import (
    BAD_ARGUMENTS,
    DEFAULTS,
    GOOD_ARGUMENTS,
    MODEL,
    NULLS,
    REFUSED_MANIFESTS,
    SPECS,
    RefusedManifest,
    make_manifest,
)

NAMESPACED = (MODELS, INFERENCE_SERVICES, METAL_PROCESSES)
FIXED = "a MetalProcess is fixed once written: edit its InferenceService, which replaces it"


@pytest.mark.parametrize("bad", REFUSED_MANIFESTS.values(), ids=REFUSED_MANIFESTS.keys())
async def test_bad_manifest_is_refused_with_the_way_out(client: Client, namespace: str, bad: RefusedManifest) -> None:
    with pytest.raises(Invalid, match=bad.says):
        await client.create(bad.resource, bad.manifest(namespace))


class TestExtraArgumentsOfProcess:
    @pytest.mark.parametrize("item", BAD_ARGUMENTS, ids=repr)
    async def test_control_character_is_refused(self, client: Client, namespace: str, item: str) -> None:
        with pytest.raises(Invalid, match=r"spec\.extraArgs\[1\].*should match"):
            await client.create(METAL_PROCESSES, make_manifest(METAL_PROCESSES, namespace, extraArgs=["--temp", item]))


@pytest.mark.parametrize("resource", [INFERENCE_SERVICES, METAL_PROCESSES], ids=lambda resource: resource.kind)
async def test_tuning_arguments_are_accepted(client: Client, namespace: str, resource: Resource) -> None:
    taken = await client.create(resource, make_manifest(resource, namespace, extraArgs=GOOD_ARGUMENTS))
    assert taken["spec"]["extraArgs"] == GOOD_ARGUMENTS


@pytest.mark.parametrize("source", ["oci://ghcr.io/acme/tiny:v1", "s3://models/tiny.gguf"])
async def test_tag_and_object_may_be_looked_at_again(client: Client, namespace: str, source: str) -> None:
    taken = await client.create(MODELS, make_manifest(MODELS, namespace, source=source, refreshPolicy="OnChange"))
    assert taken["spec"]["refreshPolicy"] == "OnChange"


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
async def test_spec_of_a_process_cannot_be_changed(client: Client, namespace: str, change: dict[str, Any]) -> None:
    await client.create(METAL_PROCESSES, make_manifest(METAL_PROCESSES, namespace))
    with pytest.raises(Invalid, match=FIXED):
        await client.apply(METAL_PROCESSES, make_manifest(METAL_PROCESSES, namespace, **change), field_manager="test")


async def test_what_starts_no_engine_anew_can_be_changed(client: Client, namespace: str) -> None:
    await client.create(METAL_PROCESSES, make_manifest(METAL_PROCESSES, namespace))
    edit = {"priority": "high", "protected": True, "drainSeconds": 900}
    operations = [{"op": "add", "path": f"/spec/{name}", "value": value} for name, value in edit.items()]
    written = await client.patch_json(METAL_PROCESSES, "one", namespace, operations)
    assert written["spec"] | edit == written["spec"]


async def test_a_process_is_bound_once(client: Client, namespace: str) -> None:
    written = await client.create(METAL_PROCESSES, make_manifest(METAL_PROCESSES, namespace))
    assert "hostName" not in written["spec"]

    async def bind(operation: dict[str, Any]) -> Obj:
        return await client.patch_json(METAL_PROCESSES, "one", namespace, [{"path": "/spec/hostName", **operation}])

    await bind({"op": "add", "value": "mac-1"})
    for operation in ({"op": "replace", "value": "mac-2"}, {"op": "remove"}):
        with pytest.raises(Invalid, match=r"spec\.hostName is fixed once bound: a move is a new MetalProcess"):
            await bind(operation)


async def test_a_host_selects_its_own_processes(client: Client, namespace: str) -> None:
    for name, host in (("a", {"hostName": "mac-1"}), ("b", {"hostName": "mac-2"}), ("c", {})):
        await client.create(METAL_PROCESSES, make_manifest(METAL_PROCESSES, namespace, name, **host))
    listed = await client.list(METAL_PROCESSES, namespace, field_selector="spec.hostName=mac-1")
    assert [item["metadata"]["name"] for item in listed.items] == ["a"]


async def find_names(plane: ControlPlane, namespace: str, kind: str, selector: str) -> list[str]:
    """Return the names that kubectl finds by a field selector."""
    options = ("--namespace", namespace, f"--field-selector={selector}", "--output=name")
    return [line.partition("/")[2] for line in (await plane.kubectl("get", kind, *options)).split()]


class TestFieldSelectors:
    @pytest.mark.parametrize(
        ("selector", "found"),
        [
            ("status.phase=Ready", ["a"]),
            ("status.phase!=Ready", ["b", "c", "d"]),
            ("status.phase=Ready,status.accelerator=amd", []),
            ("status.accelerator=amd", ["b"]),
            ("status.phase=,status.accelerator=", ["d"]),
        ],
    )
    async def test_services_are_found_by_status(
        self, plane: ControlPlane, client: Client, namespace: str, selector: str, found: list[str]
    ) -> None:
        """The controller writes no accelerator before it knows one, and a new service has no status at all."""
        statuses = {
            "a": {"phase": "Ready", "accelerator": "cpu"},
            "b": {"phase": "Failed", "accelerator": "amd"},
            "c": {"phase": "Pending"},
            "d": None,
        }
        for name, status in statuses.items():
            await client.create(INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace, name))
            if status is not None:
                path = f"{INFERENCE_SERVICES.path(namespace, name)}/status"
                await plane.request("PATCH", path, {"status": status})
        assert await find_names(plane, namespace, "isvc", selector) == found

    @pytest.mark.parametrize(
        ("selector", "found"),
        [
            ("status.phase=Ready", ["a"]),
            ("spec.hardware.accelerator=metal", ["b"]),
            ("spec.hardware.accelerator=cpu", ["a", "c"]),
            ("status.phase=", ["b", "c"]),
        ],
    )
    async def test_models_are_found_by_phase_and_accelerator(
        self, plane: ControlPlane, client: Client, namespace: str, selector: str, found: list[str]
    ) -> None:
        """A Model that states no hardware has the default accelerator."""
        hardware = {"a": {"accelerator": "cpu"}, "b": {"accelerator": "metal"}, "c": None}
        for name, stated in hardware.items():
            await client.create(MODELS, make_manifest(MODELS, namespace, name, hardware=stated))
        await plane.request("PATCH", f"{MODELS.path(namespace, 'a')}/status", {"status": {"phase": "Ready"}})
        assert await find_names(plane, namespace, "mdl", selector) == found


@pytest.mark.parametrize("nulls", NULLS, ids=lambda nulls: next(iter(nulls)))
async def test_null_counts_as_absent(client: Client, namespace: str, nulls: dict[str, Any]) -> None:
    manifest = make_manifest(INFERENCE_SERVICES, namespace)
    manifest["spec"] |= nulls
    written = await client.create(INFERENCE_SERVICES, manifest)
    assert written["spec"]["replicas"] == 1
    assert "null" not in json.dumps(written["spec"])


@pytest.mark.parametrize("resource", DEFAULTS, ids=lambda resource: resource.kind)
async def test_defaults_are_filled_in(client: Client, namespace: str, resource: Resource) -> None:
    written = await client.create(resource, make_manifest(resource, namespace))
    assert written["spec"] == SPECS[resource] | DEFAULTS[resource]


async def test_access_mode_of_the_volume_cannot_be_changed(client: Client, namespace: str) -> None:
    model = make_manifest(MODELS, namespace)
    await client.create(MODELS, model)
    changed = deepcopy(model)
    changed["spec"]["cache"] = {"accessMode": "ReadWriteMany"}
    with pytest.raises(Invalid, match=r"cache\.accessMode cannot change: make a new Model"):
        await client.apply(MODELS, changed, field_manager="test")


async def test_kubectl_scales_a_service(plane: ControlPlane, client: Client, namespace: str) -> None:
    await client.create(INFERENCE_SERVICES, make_manifest(INFERENCE_SERVICES, namespace))
    status = {"status": {"replicas": 1, "selector": "inference.pomona.dev/service=one"}}
    await plane.request("PATCH", f"{INFERENCE_SERVICES.path(namespace, 'one')}/status", status)
    await plane.kubectl("scale", "--namespace", namespace, "isvc/one", "--replicas=3")
    scale = await plane.request("GET", f"{INFERENCE_SERVICES.path(namespace, 'one')}/scale")
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == status["status"]
    assert (await client.get(INFERENCE_SERVICES, "one", namespace))["spec"]["replicas"] == 3


async def test_status_is_not_written_with_the_spec(client: Client, namespace: str) -> None:
    written = await client.create(MODELS, make_manifest(MODELS, namespace) | {"status": {"phase": "Ready"}})
    assert "status" not in written


async def test_get_pomona_shows_every_kind(plane: ControlPlane, client: Client, namespace: str) -> None:
    for resource in NAMESPACED:
        await client.create(resource, make_manifest(resource, namespace))
    listed = (await plane.kubectl("get", "pomona", "--namespace", namespace, "--output=name")).split()
    assert {name.partition(".")[0] for name in listed} >= {"model", "inferenceservice", "metalprocess"}
    kinds = (await plane.request("GET", f"/apis/{API_VERSION}"))["resources"]
    assert {kind["name"]: kind["categories"] for kind in kinds if "/" not in kind["name"]} == {
        definition.plural: ["pomona"] for definition in DEFINITIONS
    }


@pytest.mark.parametrize(
    ("short", "columns", "more"),
    [
        ("mdl", "PHASE SIZE ACCELERATOR CACHED REASON AGE", "ARCH CACHE MESSAGE MESSAGE PARAMETERS QUANTIZATION"),
        (
            "isvc",
            "PHASE MODEL ACCELERATOR ENGINE AVAILABLE UPDATED REPLICAS REASON ENDPOINT AGE",
            "QUEUE CONTEXT MEMORY DEVICE MEMORY SPEED TOKENS/S REQUESTS/MIN LATENCY MS MESSAGE",
        ),
        ("mp", "PHASE SERVICE HOST RESTARTS REASON AGE", "MESSAGE"),
    ],
)
async def test_columns_of_each_kind(plane: ControlPlane, namespace: str, short: str, columns: str, more: str) -> None:
    for resource in NAMESPACED:
        await plane.request("POST", resource.path(namespace), make_manifest(resource, namespace))
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
