"""Ollama in a pod: its image, its environment, and the name of the one model that it serves.

It cannot check a key, so Pomona's proxy runs in front of it, and brings the model (`runtimes/ollama_prepare.py`). All
its settings are variables; an Ollama that its owner runs on a host has other ones, and is never started by Pomona.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from crds.meta import Accelerator
from runtimes.daemon import ModelIdentity, identify_model
from runtimes.pod import EnginePod, PodServing
from runtimes.serving import Serving

OWNER: Final = "pomona"
"""Namespace of the models that Pomona makes in the Ollama of a pod."""
PORT: Final = 11434
_STORE: Final = "/ollama"
_VERSION: Final = "0.31.0"
_IMAGE: Final = f"ollama/ollama:{_VERSION}"
IMAGES: Final[Mapping[Accelerator, str]] = MappingProxyType(
    {"cpu": _IMAGE, "nvidia": _IMAGE, "amd": f"{_IMAGE}-rocm", "intel": _IMAGE}
)
_ONLY_BY_VULKAN: Final = "gpu.intel.com/"
"""Beginning of the resource of devices that Ollama uses by Vulkan, which has to be turned on."""


def render_name(identity: ModelIdentity) -> str:
    """Return a name with the owner's mark as namespace, the Model as model, and weights and settings as tag."""
    return f"{identity.owner}/{identity.model}:{identity.weights}-{identity.settings}"


def build_model_name(serving: Serving) -> str:
    """Return the model's name inside the Ollama of a pod: other weights or another context are another model."""
    weights, settings = [serving.model], [serving.options.context_length]
    return render_name(identify_model(OWNER, serving.service, weights, settings))


def build_environment(pod: PodServing) -> dict[str, str]:
    """Return the environment of `ollama serve`."""
    options, device = pod.serving.options, (pod.vendor.resource or "") if pod.devices else ""
    vulkan = {"OLLAMA_VULKAN": "1"} if device.startswith(_ONLY_BY_VULKAN) else {}
    return vulkan | {
        "HOME": _STORE,
        "OLLAMA_HOST": f"{pod.listen.host}:{pod.listen.port}",
        "OLLAMA_MODELS": f"{_STORE}/models",
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_CONTEXT_LENGTH": str(options.context_length),
        "OLLAMA_NUM_PARALLEL": str(options.parallel),
        "OLLAMA_MAX_LOADED_MODELS": "1",
        # The proxy queues. A small number here would refuse a request that follows some that were cancelled.
        "OLLAMA_MAX_QUEUE": "512",
        "OLLAMA_LOAD_TIMEOUT": "60m",
        # Weights that were uploaded just before the container ended are no model yet, and would be deleted.
        "OLLAMA_NOPRUNE": "1",
        "OLLAMA_NO_CLOUD": "1",
    }


POD: Final = EnginePod(
    container="ollama",
    images=IMAGES,
    arguments=lambda _pod: ["serve"],
    environment=build_environment,
    # It has no /health; this path answers before a model is loaded, which the proxy waits for by itself.
    health_path="/api/version",
    port=PORT,
    served_name=build_model_name,
    store=_STORE,
    has_slots=True,
)
