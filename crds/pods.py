"""Fields of an InferenceService that concern its pods alone: hardware, resources, and the container of any image."""

from typing import Annotated, Final

from msgspec import Meta

from crds.meta import Accelerator, ApiStruct, Quantity, described, keyed_by

_PATH: Final = r"^/[^\x00-\x20\x7f]*$"
_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
_RESOURCE: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$"
_LABEL_VALUE: Final = r"^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$"

_Product = Annotated[
    str,
    Meta(max_length=63, extra_json_schema={"pattern": _LABEL_VALUE}),
    described("Product, exactly as the node label of the vendor has it, for example NVIDIA-L4."),
]


class ServiceHardware(ApiStruct, frozen=True):
    """Hardware of one replica."""

    accelerator: Annotated[
        Accelerator | None,
        described(
            "Where replicas run: cpu, nvidia, amd, intel-gaudi and intel in pods, metal on an off-cluster host with a "
            "metal agent. The controller may know further ones; it lists them in the condition Ready of a service that "
            "names one that does not exist. Default: the accelerator of the Model."
        ),
    ] = None
    count: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        described("Devices that one replica in a pod gets, all of one node. Default: 1.", format="int32"),
    ] = None
    memory: Annotated[
        Quantity | None,
        described(
            "Least memory of one device, for example 24Gi. A pod runs only on a node whose label says that its devices "
            "have it. A device that reports up to 3 % less than its nominal memory is accepted."
        ),
    ] = None
    products: Annotated[
        list[_Product],
        Meta(max_length=16),
        described("Products of which the devices must be one.", **{"x-kubernetes-list-type": "set"}),
    ] = []
    preferred_products: Annotated[
        list[_Product],
        Meta(max_length=16),
        described(
            "Products that the scheduler prefers, the best first. Nodes with another product are used if none of these "
            "is free.",
            **{"x-kubernetes-list-type": "atomic"},
        ),
    ] = []
    resource: Annotated[
        Annotated[str, Meta(max_length=253, extra_json_schema={"pattern": _RESOURCE})] | None,
        described(
            "Extended resource that counts the devices, for example nvidia.com/mig-1g.10gb for a partition. Default: "
            "the resource of the accelerator's device plugin, such as nvidia.com/gpu."
        ),
    ] = None


class Resources(ApiStruct, frozen=True):
    """Resources that one replica requests of its node if it runs as a pod."""

    gpu: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        described("Another name of hardware.count; if both are stated, they must be equal.", format="int32"),
    ] = None
    cpu: Annotated[Quantity | None, described("CPU that one replica requests, for example 2 or 500m.")] = None
    memory: Annotated[
        Quantity | None,
        described(
            "Memory of the node that one replica requests. Default: the memory that the Model and its context take."
        ),
    ] = None


class Variable(ApiStruct, frozen=True):
    """An environment variable."""

    name: Annotated[
        str, Meta(max_length=128, extra_json_schema={"pattern": _VARIABLE}), described("Name of the variable.")
    ]
    value: Annotated[str, Meta(max_length=4096), described("Value of the variable; it must not be a secret.")] = ""


class ContainerOptions(ApiStruct, frozen=True):
    """The container of an image that Pomona does not know, for runtime generic."""

    command: Annotated[
        list[Annotated[str, Meta(max_length=4096)]],
        Meta(max_length=64),
        described("Entry point. Default: that of the image.", **{"x-kubernetes-list-type": "atomic"}),
    ] = []
    args: Annotated[
        list[Annotated[str, Meta(max_length=4096)]],
        Meta(max_length=64),
        described(
            "Arguments. $(MODEL_PATH) is the path of the weights in the container, $(SERVICE_NAME) the name of the "
            "service, $(PORT) the port.",
            **{"x-kubernetes-list-type": "atomic"},
        ),
    ] = []
    env: Annotated[list[Variable], Meta(max_length=64), described("Environment variables.", **keyed_by("name"))] = []
    port: Annotated[
        int,
        Meta(ge=1024, le=65535),
        described(
            "Port at which the container serves the OpenAI-compatible API on 127.0.0.1. Pomona's proxy listens at the "
            "port of the Service and checks the token.",
            format="int32",
        ),
    ] = 8000
    health_path: Annotated[
        str,
        Meta(max_length=256, extra_json_schema={"pattern": _PATH}),
        described("Path that answers 200 without a token once the model is loaded."),
    ] = "/health"
    model_mount_path: Annotated[
        str,
        Meta(max_length=256, extra_json_schema={"pattern": _PATH}),
        described("Folder at which the volume with the weights is mounted."),
    ] = "/models"
