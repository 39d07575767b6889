"""The serving options that were chosen for a service whose spec leaves them out."""

from typing import Annotated

from msgspec import Meta

from crds.meta import Amount, ApiStruct, ShortText


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
