"""How a model is served: the settings that a service states and a process carries unchanged."""

from typing import Annotated

from msgspec import Meta

from crds.meta import described, rule

ENGINE_OWNED_ARGUMENTS = (
    r"^(-m|--model|--host|--port|--api-key|--api-key-file|--ssl-key-file|--ssl-cert-file|-a|--alias|-c|--ctx-size"
    r"|-np|--parallel|--models-dir|--path|--slot-save-path|--log-file)(=.*)?$"
)
"""Arguments that Pomona renders itself, or that would open the engine to the network or the host's files."""

ContextLength = Annotated[
    int,
    Meta(ge=128, le=2_097_152),
    described("Context that each request may use, in tokens.", format="int32"),
]
Parallel = Annotated[
    int,
    Meta(ge=1, le=64),
    described("Requests that one replica serves at the same time, each with the whole context length.", format="int32"),
]
ExtraArguments = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=512)]],
    Meta(max_length=32),
    described(
        "Further arguments for the engine, after those that Pomona renders.",
        rule(
            f"self.all(a, !a.matches('{ENGINE_OWNED_ARGUMENTS}'))",
            "extraArgs may not set the model, address, alias, context, parallel slots, keys or file paths of the "
            "engine: use spec.contextLength and spec.parallel; the rest belongs to Pomona",
        ),
        **{"x-kubernetes-list-type": "atomic"},
    ),
]
