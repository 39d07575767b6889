"""How a model is served: the settings that a service states and a process carries unchanged."""

from typing import Annotated

from msgspec import Meta

from crds.meta import described, rule

_OWNED = (
    # What Pomona renders from the spec.
    ("-m", "--model", "-a", "--alias", "-c", "--ctx-size", "-np", "--parallel"),
    # Who may reach the engine, and with which key.
    ("--host", "--port", "--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file", "--api-prefix"),
    # What it may read, write, run or fetch on its machine beside the weights.
    ("--path", "--media-path", "--slot-save-path", "--log-file", "--tools", "--models-dir", "--models-preset", "--rpc"),
    ("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-dr", "--docker-repo", "--mmproj-url"),
)
ENGINE_OWNED_ARGUMENTS = f"^({'|'.join(argument for group in _OWNED for argument in group)})(=.*)?$"
"""Arguments that Pomona renders itself, or that would open the engine to the network or the machine's files."""

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
            "extraArgs may not set the engine's model, alias, context, parallel slots, address, keys, folders, tools "
            "or downloads: use spec.contextLength and spec.parallel; the rest belongs to Pomona",
        ),
        **{"x-kubernetes-list-type": "atomic"},
    ),
]
