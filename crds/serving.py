"""How a model is served: the settings that a service states and a process carries unchanged."""

from typing import Annotated

from msgspec import Meta

from crds.meta import described, rule

TUNING_ARGUMENTS = (
    *("-t", "--threads", "-tb", "--threads-batch", "--threads-http", "-b", "--batch-size"),
    *("-ngl", "--gpu-layers", "--n-gpu-layers", "-sm", "--split-mode", "-mg", "--main-gpu", "-fit", "--fit"),
    *("-fa", "--flash-attn", "-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "--swa-full"),
    *("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "--context-shift", "--no-context-shift"),
    *("--cache-prompt", "--no-cache-prompt", "--cache-reuse", "--no-slots", "--warmup", "--no-warmup"),
    *("--jinja", "--no-jinja", "--chat-template", "-n", "--predict", "--n-predict", "-s", "--seed"),
    *("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty"),
)
"""The engine's arguments that are the user's to set, in llama-server's own words.

Everything else is refused, also what is not known yet: it would set what Pomona renders, open the engine to the
network, name files of its machine, log prompts, or take memory that nobody has reserved.
"""
EXTRA_ARGUMENT = rf"^({'|'.join(TUNING_ARGUMENTS)}|[^-\x00-\x1f\x7f][^\x00-\x1f\x7f]*)$"
"""One item of extraArgs: such an argument, or a value, which has no leading '-' and no control character."""

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
    list[
        Annotated[
            str,
            Meta(min_length=1, max_length=512),
            described(
                "One argument or one value.",
                rule(
                    f"self.matches(r'{EXTRA_ARGUMENT}')",
                    "neither an argument that extraArgs takes (`kubectl explain isvc.spec.extraArgs` lists them) nor a "
                    "value: use spec.contextLength and spec.parallel for what they set; the rest belongs to Pomona",
                ),
                rule("self != 'f32'", "a cache of type f32 takes more memory than is reserved: use f16 or smaller"),
            ),
        ]
    ],
    Meta(max_length=32),
    described(
        "Further arguments for the engine, after those that Pomona renders; each argument and each value is an item. "
        f"Taken are {' '.join(TUNING_ARGUMENTS)}.",
        **{"x-kubernetes-list-type": "atomic"},
    ),
]
