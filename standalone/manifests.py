"""Read Models and InferenceServices from files, and report every problem with its file and line.

The files are those for `kubectl apply`, and are checked by the same rules, so that a user can move on to a cluster with
them; nothing in them is ignored silently. One rule is stricter: a Model that a cluster would wait for has to be in the
files, since nothing else can create it here.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from artifacts.source import Source, SourceError, parse
from controller.models.served import list_companions
from crds import validation
from crds.inferenceservice import InferenceService, is_on_demand, wanted_replicas
from crds.meta import GROUP
from crds.model import Model
from crds.text import make_name
from crds.yaml_reader import StrictLoader, find_line
from kube.resources import ObjectKey

NAMESPACE: Final = "default"
T = TypeVar("T")

_KINDS: Final[Mapping[str, type[Model | InferenceService]]] = {"Model": Model, "InferenceService": InferenceService}
_OWN_KINDS: Final = ("MetalProcess", "MetalHost")
"""Kinds that only Pomona itself writes."""
_CLUSTER_KINDS: Final = [kind for kind in validation.kinds() if kind not in (*_KINDS, *_OWN_KINDS)]
"""Kinds of users that only a cluster can use, such as GatewayKey."""
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_TOGETHER: Final = 2
"""Models on demand for which there is room at a time, such as one for chats and one for embeddings."""
_MOST_BYTES: Final = 1 << 20
"""Size of one file, enough for thousands of services. Weights that are given by mistake may be larger than memory."""
_MOST_NODES: Final = 100_000
_MOST_LEVELS: Final = 64
"""Values and levels of one document, counted with each repetition by an alias: far more than any manifest has."""


class ManifestError(Exception):
    """The files cannot be served; `problems` has a line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def list_model_keys(service: InferenceService) -> list[ObjectKey]:
    """Return the keys of the Models that a service names."""
    names = [service.spec.model_ref, *(companion.name for companion in list_companions(service.spec))]
    return [ObjectKey(service.metadata.namespace, name) for name in names]


@dataclass(frozen=True, slots=True)
class Manifests:
    """Models and InferenceServices to be served."""

    models: dict[ObjectKey, Model] = field(default_factory=dict)
    services: dict[ObjectKey, InferenceService] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """A line for each object in the files that only a cluster can use."""

    def list_parts(self, key: ObjectKey) -> tuple[InferenceService | Model | None, ...]:
        """Return a service and the Models that it names; None for one that is missing."""
        return self.services[key], *map(self.models.get, list_model_keys(self.services[key]))

    def divide(self, memory_bytes: int, *, further: int = 0, further_on_demand: int = 0) -> int:
        """Return the equal part of the memory that each replica gets, if there are further ones beside these.

        Models on demand are not all loaded together: two of them get room beside each other.
        """
        on_demand = sum(is_on_demand(service) for service in self.services.values()) + further_on_demand
        return memory_bytes // max(1, further + self.count_always() + min(on_demand, _TOGETHER))

    def count_always(self) -> int:
        """Return the number of replicas that are always loaded."""
        return sum(wanted_replicas(service) for service in self.services.values() if not is_on_demand(service))


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document, with the lines of its fields."""

    path: Path
    node: yaml.Node
    manifest: dict[str, Any]
    number: int = 0
    """Number of the document in its file; 0: the file has no other."""

    @property
    def key(self) -> ObjectKey:
        """Namespace and name; requires a valid document."""
        metadata = self.manifest["metadata"]
        return ObjectKey(metadata.get("namespace") or NAMESPACE, metadata["name"])

    @property
    def title(self) -> str:
        """Kind and name, if the document has them."""
        metadata = self.manifest.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return " ".join(str(part) for part in (self.manifest.get("kind"), name) if part) or "a manifest"

    def describe(self, problem: str, field_path: validation.Path = ()) -> str:
        """Return the problem with the file, the line of its field, and the number of a document among several."""
        line = find_line(self.node, field_path)
        number = f"document {self.number}, " if self.number else ""
        return f"{self.path}:{line}: {number}{self.title}: {problem}"


def load_manifests(paths: Iterable[Path]) -> Manifests:
    """Return the Models and InferenceServices of files, and of folders of files.

    Raises:
        ManifestError: a document is invalid, or there is nothing to serve.
    """
    # 1. Read them, and check them against each other.
    ours, others = load_documents(paths)  # others: objects that only a cluster can use
    ignored = "ignored: `pomona up` serves Models and InferenceServices only"
    manifests = Manifests(skipped=[other.describe(ignored) for other in others])
    problems = [*find_duplicates(ours, is_one_machine=True), *_find_missing_models(ours)]
    if not any(our.manifest["kind"] == "InferenceService" for our in ours):
        given = ", ".join(map(str, paths))
        problems.append(f"{given}: no InferenceService found: add one, or serve a Model alone with --model NAME")
    if problems:
        raise ManifestError(problems)

    # 2. Fill in the defaults, as the API server does.
    for document in ours:
        if document.manifest["kind"] == "Model":
            manifests.models[document.key] = accept_manifest(document.manifest, Model)
        else:
            manifests.services[document.key] = accept_manifest(document.manifest, InferenceService)
    return manifests


def load_documents(paths: Iterable[Path]) -> tuple[list[Document], list[Document]]:
    """Read files, and folders of files; return the valid Models and InferenceServices, and all other documents.

    Raises:
        ManifestError: a file cannot be read, or one of our documents is invalid.
    """
    documents, broken = _read_documents(paths)
    ours = [document for document in documents if _is_ours(document)]
    if problems := [*broken, *(problem for our in ours for problem in _find_problems(our))]:
        raise ManifestError(problems)
    return ours, [document for document in documents if document not in ours]


def accept_manifest(manifest: dict[str, Any], struct: type[T]) -> T:
    """Return a valid manifest with the API server's defaults, as `struct`."""
    filled = validation.with_defaults(manifest)
    # Null counts as absent, as on the API server: tools write `creationTimestamp: null`.
    stated = {name: value for name, value in filled["metadata"].items() if value is not None}
    metadata = {**stated, "namespace": stated.get("namespace") or NAMESPACE, "generation": 1}
    return msgspec.convert({**filled, "metadata": metadata, "status": {}}, struct)


def derive_name(source: Source) -> str:
    """Return the name of the service for a source: `qwen3-8b-q4-k-m` for `Qwen3-8B-Q4_K_M.gguf`."""
    folder = (source.path.strip("/") or source.repo).rpartition("/")[2]
    stem = folder if source.is_folder else re.sub(r"\.gguf$", "", source.file, flags=re.IGNORECASE)
    return make_name(stem)


def _read_documents(paths: Iterable[Path]) -> tuple[list[Document], list[str]]:
    """Return all documents, and a problem for each file that cannot be read."""
    documents: list[Document] = []
    problems: list[str] = []
    # One broken file keeps no other from being read: the user sees all problems at once.
    for path in _list_files(paths, problems):
        try:
            documents += _parse_documents(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        except UnicodeDecodeError as error:
            problems.append(f"{path}: not a text file ({error.reason}): to serve weights, use --model {path}")
        except ManifestError as error:
            problems += error.problems
        except RecursionError:
            problems.append(f"{path}: not a manifest: nested too deeply")
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            problems.append(f"{path}{line}: invalid YAML: {error.problem}")
        except yaml.YAMLError as error:
            problems.append(f"{path}: invalid YAML: {error}")
    return documents, problems


def _list_files(paths: Iterable[Path], problems: list[str]) -> Iterator[Path]:
    """Yield each path that is a file, and of each folder its YAML and JSON files, in the order of their names.

    Pipes and devices in a folder are left out: to read one may never end. Folders that cannot be read are problems.
    """
    for path in paths:
        try:
            is_folder = path.is_dir()
            found = [entry for entry in path.iterdir() if entry.suffix in _SUFFIXES] if is_folder else [path]
            yield from sorted(entry for entry in found if not is_folder or entry.is_file() or not entry.exists())
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")


def _parse_documents(path: Path) -> list[Document]:
    """Return the documents of a YAML file, which begin at `---`; empty ones do not count.

    Each has its number in the file from 1 on, or 0 if it is the only one. The objects of a List have the number of it.

    Raises:
        OSError, UnicodeDecodeError, RecursionError: the file cannot be read.
        ManifestError: it is too large for a manifest.
        yaml.YAMLError: it is not valid YAML.
    """
    # 1. Read the file, but no more than a manifest may have.
    documents, count = list[Document](), 0
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        limit = f"{_MOST_BYTES >> 20} MiB, the most for a manifest"
        raise ManifestError([f"{path}: larger than {limit}: to serve weights, use --model {path}"])

    # 2. Read one document after the other; count: those that are not empty so far
    loader = StrictLoader(content.decode())
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node returned True"  # noqa: S101 - for the type checker
            _check_size(node, {})
            value = loader.construct_document(node)
            if value is None:
                continue
            documents += [replace(document, number=count + 1) for document in _split_list(path, node, value)]
            count += 1
    except yaml.MarkedYAMLError as error:
        if count:
            error.problem = f"document {count + 1}: {error.problem}"
        raise
    finally:
        loader.dispose()

    return documents if count > 1 else [replace(document, number=0) for document in documents]  # 0: it is the only one


def _split_list(path: Path, node: yaml.Node, value: object) -> Iterator[Document]:
    """Yield each object of a `kind: List`, as kubectl prints several objects in one document; else the document itself.

    Args:
        path: the file.
        node: the document as YAML nodes, which know their lines.
        value: the same document as plain values.
    """
    if not isinstance(value, dict):
        raise yaml.MarkedYAMLError(problem="a manifest has to be a mapping of fields", problem_mark=node.start_mark)
    items_node = next((child for key, child in node.value if key.value == "items"), None)
    if value.get("kind") != "List" or not isinstance(items_node, yaml.SequenceNode):
        yield Document(path, node, value)
        return
    for item_node, manifest in zip(items_node.value, value["items"], strict=True):
        yield from _split_list(path, item_node, manifest)


def _check_size(node: yaml.Node, sizes: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of nodes and of levels that `node` has when its aliases are written out.

    A short file may repeat an anchor by aliases so often that its values fill the memory ("billion laughs").

    Args:
        node: the node to count.
        sizes: the results so far, by the `id` of the node, so that a repeated one is counted once; None marks a node
            that is being counted now: to meet it again means that an anchor contains itself.

    Raises:
        yaml.MarkedYAMLError: there are too many nodes or levels, or an anchor contains itself.
    """
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise yaml.MarkedYAMLError(problem="an anchor contains itself", problem_mark=node.start_mark)
        return size

    # Count the children first: keys and values of a mapping, or items of a sequence.
    sizes[id(node)] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    # child_sizes: nodes and levels of each child
    child_sizes = [_check_size(child, sizes) for child in children]
    nodes = 1 + sum(child_nodes for child_nodes, _ in child_sizes)
    levels = 1 + max((child_levels for _, child_levels in child_sizes), default=0)

    if nodes > _MOST_NODES or levels > _MOST_LEVELS:
        problem = f"more than {_MOST_NODES} values, or {_MOST_LEVELS} levels, with what its aliases repeat"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    sizes[id(node)] = nodes, levels
    return nodes, levels


def _is_ours(document: Document) -> bool:
    """Decide whether a document is one to serve, or a mistake for one: not if only a cluster can use its kind.

    A document without apiVersion is taken for one of Pomona's API group, so it is checked.
    """
    is_of_group = str(document.manifest.get("apiVersion", GROUP)).partition("/")[0] == GROUP
    return is_of_group and document.manifest.get("kind") not in _CLUSTER_KINDS


def _find_problems(document: Document) -> Iterator[str]:
    """Yield the problems of one document of Pomona's API group, each with its file and line."""
    kind = document.manifest.get("kind")
    if kind in _OWN_KINDS:
        yield document.describe("created by Pomona itself: write an InferenceService instead", ("kind",))
    elif kind not in validation.kinds():
        yield document.describe(f"kind {kind!r} does not exist: use Model or InferenceService", ("kind",))
    else:
        # 1. What the schema of the CRD refuses.
        violations = validation.problems(document.manifest)
        for problem in violations:
            yield document.describe(str(problem), problem.path)

        # 2. What the schema does not describe: the form of a source, and the types of metadata.
        yield from _find_source_errors(document)
        if not violations:
            try:
                accept_manifest(document.manifest, _KINDS[document.manifest["kind"]])
            except msgspec.ValidationError as error:
                yield document.describe(f"metadata: {error}", ("metadata",))


def _find_source_errors(document: Document) -> Iterator[str]:
    """Yield the problem of an invalid source, which a cluster reports in the status of the Model."""
    spec = document.manifest.get("spec")
    source = spec.get("source") if isinstance(spec, dict) else None
    if document.manifest["kind"] == "Model" and isinstance(source, str):
        try:
            parse(source)
        except SourceError as error:
            yield document.describe(error.message, ("spec", "source"))


def find_duplicates(documents: Iterable[Document], *, is_one_machine: bool) -> Iterator[str]:
    """Yield a problem for each object with the same kind and name as an earlier one.

    Requests name a service as their model, so on one machine its name is unique, whatever its namespace.
    """
    same_name: defaultdict[tuple[str, ...], list[Document]] = defaultdict(list)
    for document in documents:
        kind, (namespace, name) = document.manifest["kind"], document.key
        ignores_namespace = is_one_machine and kind == "InferenceService"
        same_name[(kind, name) if ignores_namespace else (kind, namespace, name)].append(document)
    for first, *duplicates in same_name.values():
        for duplicate in duplicates:
            where = f"{first.path}:{find_line(first.node, ())}"
            yield duplicate.describe(f"defined in {where} already: rename one of them", ("metadata", "name"))


def _find_missing_models(documents: Sequence[Document]) -> Iterator[str]:
    """Yield a problem for each Model that a service names, as its own or as a companion, and that the files lack.

    The documents must be valid.
    """
    models = {document.key for document in documents if document.manifest["kind"] == "Model"}
    for document in documents:
        if document.manifest["kind"] != "InferenceService":
            continue
        spec = accept_manifest(document.manifest, InferenceService).spec
        present = ", ".join(sorted(name for namespace, name in models if namespace == document.key.namespace)) or "none"
        companions = [(companion.field, companion.name) for companion in list_companions(spec)]
        for field_name, name in [("modelRef", spec.model_ref), *companions]:
            if ObjectKey(document.key.namespace, name) not in models:
                problem = f"spec.{field_name}: Model {name} is not in these files: add it (they have {present})"
                yield document.describe(problem, ("spec", *field_name.split(".")))
