"""The name of a model as people type it, sorted by its form; a pure function, which asks no server.

A name of the catalog, a repository of the hub with or without a quantization, a model of Ollama's store, a source, or a
path: `standalone/model_lookup.py` finds the weights of each.
"""

import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

FORMS: Final = (
    "a name of `pomona catalog`, ORG/REPO or ORG/REPO:Q4_K_M of the hub, hf://ORG/REPO/FILE.gguf, "
    "https://HOST/FILE.gguf, NAME:TAG that Ollama has, or the path of a file or folder"
)
"""The forms of a name, for messages."""
CLIENT_FORMS: Final = (
    "a client can add a name of `pomona catalog`, ORG/REPO or ORG/REPO:Q4_K_M of the hub, and NAME:TAG that Ollama has "
    "on this machine; other sources, and models of Ollama's library, are added by `pomona run` and by files"
)
"""The forms of a name that a client of the endpoint may use, for messages."""
_HUB: Final = re.compile(
    r"(?P<site>hf://|(?:https://)?(?:hf\.co|huggingface\.co)/)?(?P<repo>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[^/@:\s?#]+))?"
    r"(?::(?P<quantization>\w[\w.-]*))?/?",
    re.ASCII,
)
_LIBRARY: Final = re.compile(r"(?:ollama://)?(?P<name>(?:\w[\w.-]*/){0,2}\w[\w.-]*(?::\w[\w.-]*)?)", re.ASCII)
_PATH_BEGINNINGS: Final = ("/", "./", "../", "~")


class ModelNameError(Exception):
    """Nothing has this name; the message has the name and the forms that are possible."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"{text}: {problem}")


class CatalogName(NamedTuple):
    """A model of the catalog."""

    name: str


class HubName(NamedTuple):
    """A repository of the hub."""

    repo: str
    revision: str
    quantization: str
    """In capitals; empty: not stated."""

    @property
    def source(self) -> str:
        """The repository as a source."""
        return f"hf://{self.repo}@{self.revision}"


class OllamaName(NamedTuple):
    """A model of Ollama's store."""

    name: str


class SourceName(NamedTuple):
    """A source, in the form of a Model's spec.source."""

    source: str


ModelName = CatalogName | HubName | OllamaName | SourceName


def parse_model_name(
    text: str, *, catalog: Collection[str], ollama: Collection[str], is_path: Callable[[str], bool]
) -> ModelName:
    """Return what `text` names, by the first of these forms that it has.

    1. `SCHEME://...`, but for a repository of the hub and a name of Ollama's library.
    2. A name of the catalog, in any case of letters.
    3. A path that exists, or that can be nothing else.
    4. A model that Ollama has.
    5. ORG/REPO of the hub, with or without a quantization.

    So a folder that is named as a model of the catalog is served by `./NAME`.

    Args:
        text: as it was typed.
        catalog: the names of the catalog.
        ollama: the models of Ollama's store, with their tags.
        is_path: returns whether a path exists.

    Raises:
        ModelNameError: it has none of these forms, or nothing has such a name.
    """
    hub, library = _HUB.fullmatch(text), _LIBRARY.fullmatch(text)
    site = hub["site"] if hub else None

    # 1. Sources.
    if "://" in text and not site:
        return OllamaName(library["name"]) if library else SourceName(text)

    # 2. to 4. What this machine knows.
    if text.lower() in catalog:
        return CatalogName(text.lower())
    if not site and (text.startswith(_PATH_BEGINNINGS) or is_path(text)):
        return SourceName(_locate(text, is_path))
    if library and (text in ollama or f"{text}:latest" in ollama):
        return OllamaName(library["name"])

    # 5. The hub.
    if hub and not text.lower().endswith(".gguf"):
        return HubName(hub["repo"], hub["revision"] or "main", (hub["quantization"] or "").upper())
    raise ModelNameError(text, _explain_unknown(text, [*catalog, *ollama], is_library_name=bool(library)))


def _locate(text: str, is_path: Callable[[str], bool]) -> str:
    """Return the source of a path. Raises ModelNameError if it does not exist."""
    if not is_path(text):
        raise ModelNameError(text, f"no such file: give {FORMS}")
    path = Path(text).expanduser()
    # A link keeps its name: its target may be a blob that is named by its digest, without the other parts beside it.
    located = path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name
    return f"file://{quote(str(located))}{'/' if path.is_dir() else ''}"


def _explain_unknown(text: str, known: Collection[str], *, is_library_name: bool) -> str:
    """Return why nothing has the name: what it may be meant for, and the forms that are possible."""
    near = get_close_matches(text.lower(), known, n=1)
    hint = f"did you mean {near[0]}? Otherwise give" if near else "give"
    if "/" in text:
        hub_hint = f"hf://{text} if it is a file of the hub; or " if text.count("/") > 1 else ""
        return f"no such file: give {hub_hint}{FORMS}"
    if is_library_name and ":" in text:
        return f"Ollama has no such model here: get it by `ollama pull {text}`; or {hint} {FORMS}"
    return f"no model and no file has this name: {hint} {FORMS}"
