"""The models that are asked about: the Models of the cluster, and those of the catalog."""

import functools
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from msgspec import structs

from controller.models.served import METAL, format_of, is_split
from crds.model import Model
from crds.serving import Mode, ServingOptions
from crds.weights_header import GGUF
from devices.vendors import Vendors
from fitness.catalog_entries import CatalogEntry, load_catalog
from fitness.fit import BITS_PER_WEIGHT
from fitness.memory import Workload
from fitness.performance import hash_model
from fitness.serving_defaults import AllowedMachine, choose_options
from fitness.serving_devices import ServingDevices
from fitness.speed import find_active_share
from runtimes.registry import RUNTIMES, find_runtime
from runtimes.runtime import RuntimeDemand
from runtimes.runtime_choice import choose_runtime, refuse_demand

UseCase = Literal["general", "coding", "reasoning", "chat", "multimodal", "embedding"]
USE_CASES: Final[tuple[UseCase, ...]] = ("general", "coding", "reasoning", "chat", "multimodal", "embedding")
"""Those of llmfit."""
_CODING: Final = frozenset({"code", "coding"})
_MULTIMODAL: Final = frozenset({"vision", "audio", "image", "images", "multimodal"})
_EMBEDDING: Final = frozenset({"embedding", "embeddings"})
QUANTIZATIONS: Final = tuple(BITS_PER_WEIGHT)
"""Those that a what-if may state."""
_BITS_PER_BYTE: Final = 8


class KnownModel(NamedTuple):
    """A model, and what each accelerator's engine loads of it."""

    name: str
    namespace: str
    """Namespace of the Model; empty: it is of the catalog."""
    version: str
    """Changes whenever its fit may change."""
    title: str
    source: str
    workloads: Mapping[str, Workload]
    """By accelerator, as far as an engine takes its format there."""
    quantization: str = ""
    parameters: int | None = None
    trained_context: int | None = None
    """The longest context that it was trained for, in tokens; None: unknown."""
    active_share: float | None = None
    use_cases: frozenset[UseCase] = frozenset()
    mode: Mode = "chat"
    """The mode of its services, by which its memory is estimated."""
    hashes: Mapping[str, str] = {}
    """Identities of its measurements, by engine."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity of the model in this version."""
        return self.namespace, self.name, self.version

    @property
    def full_name(self) -> str:
        """The name in the catalog, or NAMESPACE/NAME of a Model."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    def matches(self, text: str) -> bool:
        """Return whether a folded text is a part of its name, title or source, or "*", which is all."""
        return text in {"*", ""} or any(
            text in label.casefold() for label in (self.full_name, self.title, self.source) if label
        )


def choose_for_machine(model: KnownModel, replicas: Iterable[ServingDevices]) -> ServingOptions | None:
    """Return the serving options that a service would get if it stated none and had this machine alone.

    `replicas` are the devices that one replica may have there, for each number of them. None: the context of the model
    is unknown, or no engine takes it.
    """
    if model.trained_context is None:
        return None
    machines = [
        AllowedMachine(
            workload,
            devices.memory_bytes,
            0 if devices.vendor in {"cpu", METAL} else devices.device_count,
            node_bytes=devices.memory_bytes if devices.vendor == "cpu" else 0,
        )
        for devices in replicas
        if (workload := model.workloads.get(devices.vendor)) is not None and devices.memory_bytes
    ]
    stated = ServingOptions(mode=model.mode)
    return choose_options(stated, model.trained_context, machines)[0] if machines else None


def build_known_model(model: Model, vendors: Vendors, options: ServingOptions) -> KnownModel:
    """Return a Model of the cluster in the form that it shares with the models of the catalog.

    Facts that its spec states come before those that its inspection found, which are in the status.

    Args:
        model: the Model.
        vendors: the accelerators, for each of which an engine is chosen.
        options: the options of its services, a part of the identity by which measurements are found.
    """
    # runtimes: the engine that each accelerator takes, by the name of the accelerator
    runtimes = _choose_runtimes(model, vendors)
    stated = model.spec.stated_bytes  # the memory that a user states

    # The header of a GGUF file, as the inspection found it; an empty one stands for other formats.
    status = model.status
    header = status.gguf or GGUF()
    quantization, abilities = header.quantization, frozenset(model.spec.capabilities)

    # A header that lists modes without chat is of an embedding model; one without modes says nothing.
    is_embedding = bool(abilities & _EMBEDDING) or (bool(header.modes) and "chat" not in header.modes)
    return KnownModel(
        name=model.metadata.name,
        namespace=model.metadata.namespace,
        version=f"{model.metadata.uid}:{model.metadata.resource_version}",
        title=status.gguf.model_name if status.gguf else "",
        source=model.spec.source,
        workloads={
            accelerator: Workload(status.layout, runtime, stated_bytes=stated, quantization=quantization)
            for accelerator, runtime in runtimes.items()
        },
        quantization=quantization,
        parameters=model.spec.total_parameters or status.total_parameters,
        trained_context=header.context_length,
        active_share=find_active_share(model),
        use_cases=_find_use_cases(abilities, frozenset(model.spec.domains), thinks=bool(model.spec.thinking)),
        mode="embeddings" if is_embedding else "chat",
        hashes={runtime: hash_model(model, runtime, options) for runtime in set(runtimes.values())},
    )


def _choose_runtimes(model: Model, vendors: Vendors) -> dict[str, str]:
    """Return the engine for each accelerator, without those where no engine serves the format."""
    runtimes = {}
    for accelerator in vendors:
        # On Metal alone the engine is not in a pod, but a process on a Mac.
        in_pods = accelerator != METAL
        demand = RuntimeDemand(format_of(model), accelerator, in_pods, vendors=vendors, is_split=is_split(model))

        # An engine is chosen in any case; it is refused if it does not serve the format on this accelerator.
        runtime = choose_runtime(demand)
        if refuse_demand(RUNTIMES[runtime], demand) is None:
            runtimes[accelerator] = runtime
    return runtimes


def _find_use_cases(abilities: frozenset[str], domains: frozenset[str], *, thinks: bool) -> frozenset[UseCase]:
    """Return what a model is for, by what it is able to and was trained for."""
    # The constants are sets of words that Models and the catalog use for an ability or a domain.
    if abilities & _EMBEDDING:
        return frozenset({"embedding"})
    use_cases: set[UseCase] = {"general", "chat"}
    if domains & _CODING:
        use_cases.add("coding")
    if thinks:
        use_cases.add("reasoning")
    if abilities & _MULTIMODAL:
        use_cases.add("multimodal")
    return frozenset(use_cases)


@functools.cache
def list_catalog_models(accelerators: tuple[str, ...]) -> tuple[KnownModel, ...]:
    """Return the models of the catalog whose layout is known."""
    return tuple(
        _build_catalog_model(name, entry, accelerators)
        for name, entry in load_catalog().items()
        if entry.layout is not None
    )


def _build_catalog_model(name: str, entry: CatalogEntry, accelerators: tuple[str, ...]) -> KnownModel:
    """Return an entry of the catalog as a model, with what the engine of each accelerator loads if one takes it.

    It is in no namespace; its version is empty, since the catalog never changes while this process runs.
    """
    source = entry.sources[0]
    # The layout and the engine by accelerator; None, and left out below: no engine takes the model there.
    workloads = {accelerator: entry.find_workload(accelerator) for accelerator in accelerators}
    return KnownModel(
        name=name,
        namespace="",
        version="",
        title=entry.title,
        source=source.source,
        workloads={accelerator: workload for accelerator, workload in workloads.items() if workload},
        quantization=source.weights_quantization,
        parameters=entry.parameter_count,
        active_share=entry.active_share,
        mode=entry.mode,
        use_cases=_find_use_cases(frozenset(entry.capabilities), frozenset(entry.domains), thinks=entry.thinking),
    )


def change_quantization(model: KnownModel, quantization: str) -> KnownModel | None:
    """Return a model as if its weights were in another quantization.

    The size of the weights follows from the number of parameters; the size that a user states, and the measurements,
    are of the real quantization and do not apply. None: the number is unknown, or no engine loads the model as GGUF,
    the only format with these quantizations.

    Args:
        model: the model.
        quantization: one of `QUANTIZATIONS`, whose bits per weight are known.
    """
    bits, parameters = BITS_PER_WEIGHT[quantization], model.parameters
    if parameters is None:
        return None

    # A workload is what the engine of an accelerator loads: give it the size of the weights in this quantization.
    workloads = {
        accelerator: workload._replace(
            layout=structs.replace(workload.layout, tensor_bytes=round(parameters * bits / _BITS_PER_BYTE)),
            stated_bytes=None,
        )
        for accelerator, workload in model.workloads.items()
        if workload.layout is not None and "gguf" in find_runtime(workload.runtime).formats
    }
    if not workloads:
        return None

    # Fits are cached by the version, so it names the quantization. `hashes` are identities of measurements.
    return model._replace(
        workloads=workloads, quantization=quantization, version=f"{model.version}:{quantization}", hashes={}
    )
