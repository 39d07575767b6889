"""Serving options: how a model is served, as stated by an InferenceService and copied to its MetalProcesses.

`ServingOptions` is the one definition of them. Both kinds inherit it, and the whole struct is passed to the engine and
to the memory estimate, so that a new option is a field here, an argument of the engines and, if it takes memory, a term
of the estimate. Speculative decoding is separate: it names a Model in one kind and a file in the other.
"""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from crds.meta import Amount, ApiStruct, Name, Quantity, ShortText, of_same_namespace
from crds.quantity import quantity_bytes

Mode = Literal["chat", "embeddings", "rerank"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
Role = Literal["draft", "projector", "adapter"]

# The schema has the pattern, the struct has not: the controller names an engine that does not exist in a condition.
RuntimeName = Annotated[
    str, Meta(min_length=1, max_length=40, extra_json_schema={"pattern": r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"})
]
"""Name of an engine, as `runtimes/registry.py` lists them."""

EXTRA_ARGUMENT: Final = r"^[^\x00-\x1f\x7f]+$"
"""One item of extraArgs: an argument or a value, without control characters. Each engine lists those that it takes."""

ExtraArguments = Annotated[
    list[
        Annotated[
            str,
            Meta(
                description="One argument or one value.",
                min_length=1,
                max_length=512,
                extra_json_schema={"pattern": EXTRA_ARGUMENT},
            ),
        ]
    ],
    Meta(max_length=32),
    "Further arguments for the engine. Pomona appends them to its own arguments. Each argument and each "
    "value is a separate item. Each engine takes those that tune it; the page of the engine in docs/engines/ lists "
    "them. A service with another argument is refused, and its condition Ready lists those that the engine takes.",
]


_CACHE_TYPE = "Data type of the {} in the KV cache. Types smaller than f16 save memory and reduce quality somewhat."
DraftTokens = Annotated[
    Annotated[int, Meta(ge=1, le=64)] | None,
    "Maximum number of tokens that the draft model proposes at once. Default: the engine decides.",
]
LEAST_CONTEXT: Final = 4096
"""Least context length that is chosen where none is stated, in tokens."""
DRAIN_SECONDS: Final = 600
"""Default of `drainSeconds`, and the most of a replica that the queue may evict: nobody waits longer for its room."""
DrainSeconds = Annotated[
    int,
    Meta(ge=0, le=3600),
    "Time that a replica which is stopped has for the answers that it has begun, in seconds: when it is replaced, "
    "moved, scaled down, suspended, deleted or evicted by the queue. It gets no new request meanwhile, and ends as "
    "soon as its last answer has ended. What is not finished then is broken off. Memory pressure leaves an answer "
    "seconds, and the shutdown or loss of a machine less. More than 600 needs evictionProtection, so that nobody "
    f"waits longer for the room of an evicted replica. Default: {DRAIN_SECONDS}. An edit restarts no replica: "
    "pods have it after their next replacement, and hosts follow it at once.",
]
AdapterScale = Annotated[
    str,
    Meta(max_length=16, pattern=r"^[0-9]+(\.[0-9]+)?$"),
    "Strength of the adapter: a decimal number. 1 is the strength with which the adapter was trained.",
]


class ServingOptions(ApiStruct, frozen=True, kw_only=True):
    """Options of serving a model, which are the same in a pod and on a host."""

    context_length: Annotated[
        Annotated[int, Meta(ge=128, le=2_097_152)] | None,
        "Context length that each request may use, in tokens. Default: that of the model, at most 32768, or 65536 if a "
        "device or host of 48 GiB or more may be used; less where no allowed one holds it. status.serving shows it.",
    ] = None
    parallel: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        "Requests that one replica serves at the same time. With llama.cpp, mlx-lm, oMLX and Ollama each of them has "
        "the memory of a whole context. With vLLM, SGLang and TGI it is a limit, since requests share the cache. "
        "Default: as many as the engine and its memory can, so that no request ends another; status.serving shows it.",
    ] = None
    prompt_cache: Annotated[
        Quantity | None,
        "Memory in which llama.cpp and mlx-lm remember earlier conversations, so that their next turn computes only "
        "what is new. Default: by the memory of the allowed hosts and nodes; status.serving shows it.",
    ] = None
    mode: Annotated[
        Mode,
        "API that the service answers. chat: /v1/chat/completions and /v1/completions. embeddings: "
        "/v1/embeddings. rerank: /v1/rerank.",
    ] = "chat"
    cache_type_k: Annotated[CacheType, _CACHE_TYPE.format("keys")] = "f16"
    cache_type_v: Annotated[CacheType, _CACHE_TYPE.format("values")] = "f16"
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=30_000)] | None,
        "Jinja template that converts messages to a prompt. Default: the template of the model.",
    ] = None
    extra_args: ExtraArguments = []

    @property
    def context_tokens(self) -> int:
        """The context length, or the least that is ever chosen if none is stated or chosen yet."""
        return self.context_length or LEAST_CONTEXT

    @property
    def prompt_cache_bytes(self) -> int:
        """Memory for remembered conversations; 0 if none is stated or chosen yet."""
        return quantity_bytes(self.prompt_cache) if self.prompt_cache else 0


class ServingChoice(ApiStruct, frozen=True):
    """The options with which a service is served: those of its spec, and what was chosen for the others."""

    context_length: Annotated[Amount, "Context length that each request may use, in tokens."] = 0
    parallel: Annotated[
        Amount | None, "Requests that one replica serves at the same time. Absent: the engine decides, by its memory."
    ] = None
    prompt_cache: Annotated[
        ShortText,
        "Memory in which earlier conversations are remembered, for example 2048Mi. Empty: as its engine does.",
    ] = ""
    cpu: Annotated[ShortText, "CPU that the engine requests in a pod if resources.cpu is not stated."] = ""
    message: Annotated[
        str, Meta(max_length=1024), "Why these were chosen, and how many whole contexts the cache of the engine holds."
    ] = ""
    inputs: Annotated[
        ShortText,
        "Digest of the fields of the spec, and of the weights, for which they were chosen: once for each, whatever "
        "hosts and nodes come and go. Absent while no known host or node holds them: then they are chosen anew.",
    ] = ""


def stated_options(spec: ServingOptions) -> dict[str, Any]:
    """Return the serving options of a service or process by field name, to make a struct with the same options."""
    return {name: getattr(spec, name) for name in ServingOptions.__struct_fields__}


class Speculative(ApiStruct, frozen=True):
    """Speculative decoding: a small model guesses, the model itself checks several guesses at once."""

    draft_model_ref: Annotated[
        Name,
        "Name of the draft model: a small Model in the same namespace with the same vocabulary.",
        of_same_namespace("Model"),
    ]
    max_tokens: DraftTokens = None


class Adapter(ApiStruct, frozen=True):
    """A LoRA adapter on top of the model."""

    model_ref: Annotated[
        Name, "Name of a Model in the same namespace whose artifact is the adapter.", of_same_namespace("Model")
    ]
    scale: AdapterScale = "1"
    on_request: Annotated[
        bool,
        "If true, the adapter is applied only to requests with SERVICE:NAME as their model, where SERVICE is the name "
        "of the service and NAME is modelRef. llama.cpp in mode chat can do so, without promptCache; requests with "
        "one adapter use no computed prompt of another, and /v1/messages has no adapters on request. Default: false, "
        "the adapter is applied to each request.",
    ] = False
