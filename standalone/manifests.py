"""Reads what is to be served from files, and refuses all that a cluster would refuse, at once and by line.

What is good here is good for `kubectl apply`, which is the way on: so the files are the same, and nothing in them is
ignored silently. Only what a cluster would wait for (a Model that is not there yet) is an error here, since nobody else
would bring it.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from artifacts.source import Source, SourceError, parse
from controller.parts import parts_of
from controller.plan import Key
from crds import validation
from crds.inferenceservice import InferenceService
from crds.meta import API_VERSION, GROUP
from crds.model import Model

NAMESPACE: Final = "default"
TOKEN_SECRET: Final = "hf-token"  # noqa: S105 - the name of a Secret
"""Secret that a Model of `--model` refers to where a download token is in the environment."""
T = TypeVar("T")

_KINDS: Final[Mapping[str, type[Model | InferenceService]]] = {"Model": Model, "InferenceService": InferenceService}
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_LONGEST_NAME: Final = 40
_MOST_BYTES: Final = 1 << 20
"""Of one file, which then has thousands of services. Weights, given by mistake, may be larger than memory."""
_MOST_NODES: Final = 100_000
_MOST_LEVELS: Final = 64
"""Of one document, with all that its aliases repeat: far more than any manifest has."""


class ManifestError(Exception):
    """The files cannot be served; `problems` are lines for a person."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be served."""

    models: dict[Key, Model] = field(default_factory=dict)
    services: dict[Key, InferenceService] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """What else was in the files, for a person."""


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document, with the lines of its fields."""

    path: Path
    node: yaml.Node
    manifest: dict[str, Any]

    @property
    def key(self) -> Key:
        """Namespace and name; only of a document that was found to be valid."""
        metadata = self.manifest["metadata"]
        return Key(metadata.get("namespace") or NAMESPACE, metadata["name"])

    @property
    def title(self) -> str:
        """Kind and name, as far as they are known."""
        metadata = self.manifest.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return " ".join(str(each) for each in (self.manifest.get("kind"), name) if each) or "a manifest"

    def say(self, problem: str, field_path: validation.Path = ()) -> str:
        """Tell a problem with the file and line of its field."""
        line = _line(self.node, field_path)
        return f"{self.path}:{line}: {self.title}: {problem}"


def load(paths: Iterable[Path]) -> Wanted:
    """Read files, and folders of files.

    Raises:
        ManifestError: something in them cannot be served.
    """
    documents, broken = _read(paths)
    ours = [each for each in documents if _is_ours(each)]
    wanted = Wanted(skipped=[each.say("is for a cluster, and not used here") for each in documents if each not in ours])
    problems = [*broken, *(problem for each in ours for problem in _problems(each))]
    if problems:
        raise ManifestError(problems)
    problems = [*_duplicates(ours), *_dangling(ours)]
    if not any(each.manifest["kind"] == "InferenceService" for each in ours):
        given = ", ".join(map(str, paths))
        problems.append(f"{given}: no InferenceService in it: add one, or serve a Model alone with --model SOURCE")
    if problems:
        raise ManifestError(problems)
    for document in ours:
        if document.manifest["kind"] == "Model":
            wanted.models[document.key] = accepted(document.manifest, Model)
        else:
            wanted.services[document.key] = accepted(document.manifest, InferenceService)
    return wanted


def accepted(manifest: dict[str, Any], struct: type[T]) -> T:
    """Return a valid manifest as the API server would have it, as `struct`."""
    filled = validation.with_defaults(manifest)
    # Null is absent, as to the API server: tools write `creationTimestamp: null`.
    stated = {name: value for name, value in filled["metadata"].items() if value is not None}
    metadata = {**stated, "namespace": stated.get("namespace") or NAMESPACE, "generation": 1}
    return msgspec.convert({**filled, "metadata": metadata, "status": {}}, struct)


def of_source(source: str, *, token: bool) -> tuple[Model, InferenceService]:
    """Return what serves `source` alone, as a user would write it; `token`: a download token is at hand.

    Raises:
        SourceError: it is no source.
    """
    name = name_of(parse(source))
    spec: dict[str, Any] = {"source": source}
    if token and source.startswith("hf://"):
        spec["sourceSecretRef"] = {"name": TOKEN_SECRET}
    metadata = {"name": name}
    model = {"apiVersion": API_VERSION, "kind": "Model", "metadata": metadata, "spec": spec}
    service = {**model, "kind": "InferenceService", "spec": {"modelRef": name}}
    return accepted(model, Model), accepted(service, InferenceService)


def name_of(source: Source) -> str:
    """Return a service's name for what it serves: `Qwen3-8B-Q4_K_M.gguf` is `qwen3-8b-q4-k-m`."""
    folder = (source.path.strip("/") or source.repo).rpartition("/")[2]
    stem = folder if source.is_folder else source.file.removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"model-{name}".rstrip("-")
    return name[:_LONGEST_NAME].rstrip("-")


def _read(paths: Iterable[Path]) -> tuple[list[Document], list[str]]:
    """Return all documents, and what cannot be read."""
    documents: list[Document] = []
    problems: list[str] = []
    for path in _files(paths):
        try:
            documents += _documents(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        except UnicodeDecodeError as error:
            problems.append(f"{path}: is no text ({error.reason}): weights are served with --model {path}")
        except _TooLargeError:
            size = f"more than {_MOST_BYTES >> 20} MiB"
            problems.append(f"{path}: has {size}, which no manifest has: weights are served with --model {path}")
        except RecursionError:
            problems.append(f"{path}: is no manifest: it is nested too deeply")
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            problems.append(f"{path}{line}: is no YAML: {error.problem}")
        except yaml.YAMLError as error:
            problems.append(f"{path}: is no YAML: {error}")
    return documents, problems


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
        else:
            yield path


def _documents(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise _TooLargeError
    loader = _Loader(content.decode())
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node said so"  # noqa: S101 - for the type checker
            _measure(node, {})
            value = loader.construct_document(node)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise yaml.MarkedYAMLError(problem="not a manifest: it has no fields", problem_mark=node.start_mark)
            yield Document(path, node, value)
    finally:
        loader.dispose()


class _TooLargeError(Exception):
    """The file is larger than any manifest."""


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Count the nodes below `node`, each as often as aliases repeat it, and the levels; refuses too many of either.

    Args:
        node: where to begin.
        known: what was counted before, by the id of a node; None for what is being counted.
    """
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
        return found
    known[id(node)] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    counted = [_measure(each, known) for each in inner]
    nodes, levels = 1 + sum(count for count, _ in counted), 1 + max((deep for _, deep in counted), default=0)
    if nodes > _MOST_NODES or levels > _MOST_LEVELS:
        problem = f"more than {_MOST_NODES} values, or {_MOST_LEVELS} levels, with what its aliases repeat"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    known[id(node)] = nodes, levels
    return nodes, levels


class _Loader(yaml.SafeLoader):
    """YAML as kubectl reads it: a date is a string, and a field that is stated twice is a mistake."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()  # half of a character is one to YAML alone
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            problem = f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        stated = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="the name of a field is no text", problem_mark=key.start_mark)
            if key.value in stated:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is stated twice", problem_mark=key.start_mark)
            stated.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _is_ours(document: Document) -> bool:
    """Whether it is of our group; what does not say of which it is, is held to be."""
    return str(document.manifest.get("apiVersion", GROUP)).partition("/")[0] == GROUP


def _problems(document: Document) -> Iterator[str]:
    kind = document.manifest.get("kind")
    if kind in ("MetalProcess", "MetalHost"):
        yield document.say("is made by Pomona: state an InferenceService instead", ("kind",))
    elif kind not in validation.kinds():
        yield document.say(f"kind {kind!r} does not exist: use Model or InferenceService", ("kind",))
    else:
        found = validation.problems(document.manifest)
        for problem in found:
            yield document.say(str(problem), problem.path)
        yield from _bad_source(document)
        if not found:
            yield from _bad_metadata(document)


def _bad_metadata(document: Document) -> Iterator[str]:
    """Tell what is of a wrong type where no schema of ours says so."""
    try:
        accepted(document.manifest, _KINDS[document.manifest["kind"]])
    except msgspec.ValidationError as error:
        yield document.say(f"metadata: {error}", ("metadata",))


def _bad_source(document: Document) -> Iterator[str]:
    """Tell at once what a cluster tells in the Model's status."""
    spec = document.manifest.get("spec")
    source = spec.get("source") if isinstance(spec, dict) else None
    if document.manifest["kind"] == "Model" and isinstance(source, str):
        try:
            parse(source)
        except SourceError as error:
            yield document.say(error.message, ("spec", "source"))


def _duplicates(documents: Iterable[Document]) -> Iterator[str]:
    """Find what is stated twice; a service's name is the model's name in requests, so it is unique on a machine."""
    stated: defaultdict[tuple[str, ...], list[Document]] = defaultdict(list)
    for each in documents:
        kind = each.manifest["kind"]
        stated[(kind, each.key.name) if kind == "InferenceService" else (kind, *each.key)].append(each)
    for first, *others in stated.values():
        for other in others:
            where = f"{first.path}:{_line(first.node, ())}"
            yield other.say(f"is stated in {where} already: give one of them another name", ("metadata", "name"))


def _dangling(documents: Sequence[Document]) -> Iterator[str]:
    models = {each.key for each in documents if each.manifest["kind"] == "Model"}
    for each in documents:
        if each.manifest["kind"] != "InferenceService":
            continue
        spec = accepted(each.manifest, InferenceService).spec
        there = ", ".join(sorted(name for namespace, name in models if namespace == each.key.namespace)) or "none"
        for field_name, name in [("modelRef", spec.model_ref), *((part.field, part.name) for part in parts_of(spec))]:
            if Key(each.key.namespace, name) not in models:
                problem = f"spec.{field_name}: Model {name} is not in these files, which have {there}"
                yield each.say(problem, ("spec", *field_name.split(".")))


def _line(node: yaml.Node, path: validation.Path) -> int:
    """Return the line of the field, or of what is nearest above it."""
    mark = node.start_mark
    for step in path:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == step), None)
            if found is None:
                break
            mark, node = found[0].start_mark, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            mark = node.start_mark
    return int(mark.line) + 1
