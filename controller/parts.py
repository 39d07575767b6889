"""All Models of a service: the one that it serves, and those of its draft, projector and adapters.

Each of them is inspected, verified and cached as any Model is, so that a service only names them.
"""

from collections.abc import Callable
from typing import NamedTuple

from artifacts.source import SourceError, parse
from controller.plan import Key
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.model import Model
from crds.serving import Role, RuntimeName
from kube.client import Obj
from runtimes.serving import Format, default_runtime


class Part(NamedTuple):
    """One Model that is served together with another."""

    role: Role
    field: str
    """Where the service names it, below spec."""
    name: str
    scale: str = "1"
    model: Model | None = None
    """None: there is none of this name."""


class Served(NamedTuple):
    """What a replica serves, all of it usable."""

    model: Model
    parts: tuple[Part, ...] = ()


def parts_of(spec: InferenceServiceSpec) -> tuple[Part, ...]:
    """Return the parts that a service names, without their Models, in the order in which hosts get them."""
    found = []
    if spec.speculative is not None:
        found.append(Part("draft", "speculative.draftModelRef", spec.speculative.draft_model_ref))
    if spec.projector_model_ref is not None:
        found.append(Part("projector", "projectorModelRef", spec.projector_model_ref))
    found += [Part("adapter", "adapters", each.model_ref, each.scale) for each in spec.adapters]
    return tuple(found)


def read_parts(find: Callable[[Key], Model | None], service: InferenceService) -> tuple[Part, ...]:
    """Return a service's parts with their Models, as far as `find` has these."""
    namespace = service.metadata.namespace
    return tuple(part._replace(model=find(Key(namespace, part.name))) for part in parts_of(service.spec))


def part_names(service: Obj) -> set[str]:
    """Name the Models of the parts of a service as the API server sent it."""
    spec = service["spec"]
    names = {each["modelRef"] for each in spec.get("adapters") or []}
    names |= {spec.get("projectorModelRef"), (spec.get("speculative") or {}).get("draftModelRef")}
    return {name for name in names if name}


def model_names(service: Obj) -> set[str]:
    """Name all Models of a service as the API server sent it."""
    return {service["spec"]["modelRef"], *part_names(service)}


def format_of(model: Model) -> Format:
    """Return what the weights of a Model are; a source that nobody can read is told of elsewhere."""
    try:
        source = parse(model.spec.source)
    except SourceError:
        return "gguf"
    return "ollama" if source.is_library else "mlx" if source.is_folder else "gguf"


def runtime_of(service: InferenceService, model: Model) -> RuntimeName:
    """Return the runtime that serves: the service's own word, else that of the Model's format."""
    return service.spec.runtime or default_runtime(format_of(model))
