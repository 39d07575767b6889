"""The facts of a served model for clients of Ollama's API, which show them to their users and choose by them."""

import hashlib
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from artifacts.formats.chat_template import THINKS
from crds.inferenceservice import is_on_demand
from crds.metalprocess import MetalProcessSpec
from crds.model import Model
from crds.weights_header import GGUF
from gateway.proxy.config import ServedModelFacts
from kube.resources import ObjectKey

if TYPE_CHECKING:
    from standalone.machine import Machine

_NO_HEADER: Final = GGUF()
_HAS_NO_TOOLS: Final = "plain"
"""The form of a chat template that shows the model no tools."""


def describe_served_model(spec: MetalProcessSpec, model: Model | None) -> ServedModelFacts:
    """Return the facts of a process's model; `model` has the result of its inspection, None: it is not known."""
    status = model.status if model else None
    header = (status.gguf if status else None) or _NO_HEADER
    layout = status.layout if status else None
    artifact = spec.artifact
    named = f"{artifact.source}@{artifact.revision}"
    return ServedModelFacts(
        size_bytes=(status.size_bytes if status else None) or artifact.size_bytes or 0,
        memory_bytes=spec.memory_bytes,
        device_bytes=spec.memory_bytes if sys.platform == "darwin" else 0,  # memory is shared with the GPU there
        digest=artifact.sha256 or (status.sha256 if status else "") or hashlib.sha256(named.encode()).hexdigest(),
        source=artifact.source,
        format=(status.format if status else None) or "",
        architecture=header.architecture,
        quantization=header.quantization,
        license=header.license,
        parameter_count=(status.total_parameters if status else None) or 0,
        context_length=spec.context_length or header.context_length or 0,
        embedding_size=header.embedding_size or (layout.embedding_size if layout else 0),
        layer_count=header.layer_count or 0,
        head_count=header.head_count or 0,
        head_count_kv=header.head_count_kv or 0,
        capabilities=_list_capabilities(spec, model, header),
    )


def find_facts(machine: "Machine") -> dict[ObjectKey, ServedModelFacts]:
    """Return the facts of the model of each service that can be served, loaded or not."""
    models, services = machine.models, machine.manifests.services
    found = dict[ObjectKey, ServedModelFacts]()
    for key, decision in machine.decisions.items():
        if decision.assignments:
            spec = decision.assignments[0].spec
            facts = describe_served_model(spec, models.get(ObjectKey(key.namespace, spec.model_name)))
            service = services.get(key)
            if service and service.spec.scaling and is_on_demand(service):
                facts = msgspec.structs.replace(facts, idle_limit_seconds=service.spec.scaling.idle_seconds)
            found[key] = facts
    return found


def _list_capabilities(spec: MetalProcessSpec, model: Model | None, header: GGUF) -> tuple[str, ...]:
    """Return what clients may ask of a model, in Ollama's words: of tools it is assumed unless the template has none.

    llama.cpp gives each chat template a form for tools.
    """
    if spec.mode == "embeddings":
        return ("embedding",)
    if spec.mode != "chat":
        return ()
    stated = set(model.spec.capabilities) if model else set[str]()
    form = header.chat_format
    facts = {
        "completion": True,
        "tools": "tools" in stated or form.removesuffix(THINKS) != _HAS_NO_TOOLS,
        "vision": "vision" in stated or any(further.role == "projector" for further in spec.further_artifacts),
        "thinking": form.endswith(THINKS) or bool(model and model.spec.thinking),
    }
    return tuple(name for name, is_given in facts.items() if is_given)
