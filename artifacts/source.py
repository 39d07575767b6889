"""The source of weights as a user writes it, parsed to one file, one folder, or one model of Ollama's library."""

import dataclasses
import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, get_args
from urllib.parse import SplitResult, quote, unquote, urlsplit

from artifacts.errors import ArtifactError, Reason
from artifacts.formats.gguf_split import is_gguf_name, list_part_names

Scheme = Literal["hf", "http", "https", "s3", "oci", "pvc", "file", "ollama"]
_SCHEMES: Final[Mapping[str, Scheme]] = MappingProxyType({scheme: scheme for scheme in get_args(Scheme)})

DEFAULT_ENDPOINT = "https://huggingface.co"
"""Hub of `hf://` sources unless HF_ENDPOINT names a mirror."""

HUB_TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - a name
"""Environment variable with the token for the hub, which no other server gets."""
TOKEN_VARIABLE = "POMONA_SOURCE_TOKEN"  # noqa: S105 - a name
"""Environment variable with the token for an http(s):// source, or the login for an oci:// source."""

_HF_FORM = "hf://ORG/REPO[@REVISION]/FILE.gguf, or hf://ORG/REPO[@REVISION] for a folder of weights"
_HF = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/@\s?#]+))?(?:/(?P<path>[^@\s?#]*))?", re.ASCII)
_ESCAPES = "in its path, a blank is written %20, @ %40, # %23, ? %3F and % %25"
_S3_FORM = "s3://BUCKET/KEY.gguf, or s3://BUCKET/PREFIX/ for a folder"
_S3 = re.compile(r"s3://(?P<bucket_or_claim>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<path>[^\s?#]*)", re.ASCII)
_PVC_FORM = "pvc://CLAIM/PATH/FILE.gguf, or pvc://CLAIM/PATH/ for a folder"
_PVC = re.compile(r"pvc://(?P<bucket_or_claim>[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)/(?P<path>[^\s?#]*)", re.ASCII)
# The tag is required: without a tag, Ollama takes the model that is `latest` at that time.
_LIBRARY = re.compile(r"ollama://(?P<path>(?:\w[\w.-]*/){0,2}(?P<name>[\w][\w.-]*:[\w][\w.-]*))", re.ASCII)
_REGISTRY_FORM = "oci://REGISTRY/REPOSITORY:TAG or oci://REGISTRY/REPOSITORY@sha256:DIGEST"
# A name without a dot and a port could be a repository of a registry that the user left out.
_REGISTRY = re.compile(
    r"oci://(?P<repo>(?:localhost|(?=[^/]*[.:])[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?"
    r"(?P<path>(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)+))"
    r"(?::(?P<tag>\w[\w.-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))",
    re.ASCII,
)
_MAX_REPOSITORY = 255
MAX_NAME_BYTES = 236
"""The longest name beside it, `.NAME.verified.json.new`, must fit in the 255 bytes of file systems too."""
MOST_PATTERNS = 64
MOST_PATTERN_CHARACTERS = 256
_GLOB = re.compile(r"[*?\[]")
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_KEY_DIGITS = 16


class SourceError(ArtifactError):
    """The text is not a valid source: reason SourceInvalid, never retryable."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__("SourceInvalid", f"source {without_secrets(text)!r}: {problem}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One file, one folder of files, or one model of Ollama's library.

    Attributes:
        scheme: scheme of its URL.
        text: canonical text; equal texts mean the same file.
        file: its name, safe to use as a name in a folder; empty for a folder.
        repo: ORG/REPO of an hf:// source, REGISTRY/REPOSITORY of an oci:// source, bucket of an s3:// source, claim of
            a pvc:// source, else empty.
        revision: branch, tag or commit of an hf:// source (default main), tag or sha256:DIGEST of an oci:// source,
            else empty.
        path: path in the repository (empty: all of it), key or prefix in the bucket, path on the claim's volume,
            absolute path of a file://, name of an ollama:// model, or the whole URL.
        files: patterns that choose files of a folder; empty: those that an engine needs.

    """

    scheme: Scheme
    text: str
    file: str = ""
    repo: str = ""
    revision: str = ""
    path: str = ""
    files: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        """True for a repository or folder, of which the files that an engine needs are taken."""
        return not self.file

    @property
    def is_split(self) -> bool:
        """True for the first of several files that make one GGUF model."""
        return len(list_part_names(self.file)) > 1

    @property
    def has_listing(self) -> bool:
        """True if the files have to be listed and chosen, false for one file."""
        return self.is_folder or self.is_split

    @property
    def is_gguf(self) -> bool:
        """True if the engine gets a GGUF file: a source of one file, or a folder with patterns for such files."""
        if not self.is_folder:
            return self.scheme != "ollama"
        return bool(self.files) and all(map(is_gguf_name, self.files))

    @property
    def is_pinned(self) -> bool:
        """True if the source itself names bytes that never change: a commit of a hub, or the digest of an artifact."""
        if self.scheme == "oci":
            return self.revision.startswith("sha256:")
        return self.scheme == "hf" and is_commit(self.revision)

    @property
    def display(self) -> str:
        """Text for messages: a query may be a signature, so it is left out."""
        return without_secrets(self.text)

    def error(
        self, reason: Reason, problem: str, *, retryable: bool = False, retry_after_seconds: float = 0.0
    ) -> ArtifactError:
        """Return the error with this message, which begins with the source."""
        message = f"{self.display}: {problem}"
        return ArtifactError(reason, message, retryable=retryable, retry_after_seconds=retry_after_seconds)

    def url(self, endpoint: str, revision: str | None = None) -> str:
        """Return the URL to request: the URL of an http(s):// source, or that of an hf:// source at the hub `endpoint`.

        `revision` replaces the revision of an hf:// source.
        """
        if self.scheme != "hf":
            return self.path
        at = quote(revision or self.revision, safe="")
        return f"{endpoint.rstrip('/')}/{self.repo}/resolve/{at}/{quote(self.path)}"


def refuse_ollama_source(source: Source) -> None:
    """Raise ArtifactError for a source that only Ollama can fetch."""
    if source.scheme == "ollama":
        way_out = "serve it with runtime ollama, on a host where Ollama runs"
        raise source.error("SourceInvalid", f"only Ollama can fetch from its library: {way_out}")


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 in the form that names stored weights: 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def is_commit(text: str) -> bool:
    """Return whether `text` is a commit of the hub: 40 lower-case hexadecimal digits."""
    return _COMMIT.fullmatch(text) is not None


def is_of_hub(source: Source, endpoint: str) -> bool:
    """Return whether the hub at `endpoint` serves the source: only then may it get the hub's token."""
    if source.scheme not in ("http", "https"):
        return source.scheme == "hf"
    return _origin(source.path) == _origin(endpoint)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of a URL; the port of the scheme if the URL has none."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def cache_key(text: str, revision: str, files: Sequence[str] = ()) -> str:
    """Return the name of the cache folder for the files of this source at a resolved revision.

    Raises:
        SourceError: `text` is not a valid source.

    """
    identity = "\0".join((f"{parse(text).text}@{revision}", *files))
    return hashlib.sha256(identity.encode()).hexdigest()[:_KEY_DIGITS]


def weights_identity(text: str, revision: str, files: Sequence[str], sha256: str) -> str:
    """Return the identity of exact weights, by which a host reports that it has stored them; empty if they have none.

    It is the SHA-256 if that is known, else a digest of source and revision. Empty: neither is known, so that the bytes
    may change; the weights are the owner's own files or in Ollama, so that no host stores them; or `text` is no source.
    """
    if scheme_of(text) in (None, "file", "ollama"):
        return ""
    if sha256:
        return sha256
    try:
        # Without a revision, the bytes may change.
        return name_identity(cache_key(text, revision, files)) if revision else ""
    except SourceError:
        return ""


def name_identity(key: str) -> str:
    """Return the identity of the weights of a source at a revision, by their `cache_key`: as long as a SHA-256."""
    return hashlib.sha256(key.encode()).hexdigest()


def without_secrets(text: str) -> str:
    """Return `text` without a query, a fragment and the user info before an @ in the host."""
    bare = re.split(r"[?#]", text, maxsplit=1)[0]
    # The @ of an hf:// source precedes a revision.
    return bare if scheme_of(bare) == "hf" else re.sub(r"//[^/]*@", "//", bare)


def parse(text: str, files: Sequence[str] = ()) -> Source:
    """Return the source that `text` names, with the patterns that choose files of it.

    Raises:
        SourceError: `text` is not a valid source, leaves its folder, or contains a password; or `files` are not valid.

    """
    source = _parse_text(text)
    if not files:
        return source
    _check_patterns(source, files)
    return dataclasses.replace(source, files=tuple(files))


def _check_patterns(source: Source, files: Sequence[str]) -> None:
    """Raise SourceError unless the source takes patterns, and all of `files` are valid ones."""
    if not source.is_folder:
        raise SourceError(source.text, "names one file, so it takes no files: remove them, or name the folder")
    # All of a local folder is served, unless patterns choose GGUF files in it.
    if source.scheme in ("file", "pvc") and not all(map(is_gguf_name, files)):
        raise SourceError(source.text, "is a folder that is served as it is: remove files, or name a .gguf file in it")
    if len(files) > MOST_PATTERNS:
        raise SourceError(source.text, f"has {len(files)} files: give at most {MOST_PATTERNS} patterns")
    for file in files:
        if not _is_pattern(file):
            raise SourceError(
                source.text,
                f"files has {file[:100]!r}: give the path of files in the repository, in which * stands for any "
                f"letters, such as *Q4_K_M*.gguf; at most {MOST_PATTERN_CHARACTERS} printable characters",
            )


def _is_pattern(text: str) -> bool:
    """Return whether `text` is a pattern for files: as in a shell, but `*` also stands for slashes."""
    is_path = text.isprintable() and all(segment not in ("", "..") for segment in text.split("/"))
    return is_path and len(text) <= MOST_PATTERN_CHARACTERS


def quote_pattern(path: str) -> str:
    """Return the pattern that matches the path alone."""
    return _GLOB.sub(r"[\g<0>]", path)


def advise_files(patterns: Iterable[str]) -> str:
    """Return the field `files` in YAML with the first valid pattern of `patterns`; empty if no pattern is valid."""
    first = next((pattern for pattern in patterns if _is_pattern(pattern)), None)
    return "" if first is None else "files: ['{}']".format(first.replace("'", "''"))


def scheme_of(text: str) -> Scheme | None:
    """Return the scheme of a source without parsing the rest of it, or None if Pomona does not know the scheme.

    Use it for decisions that are made at every event, about a source that was checked before.
    """
    scheme, separator, _ = text.partition("://")
    return _SCHEMES.get(scheme) if separator else None


def _parse_text(text: str) -> Source:
    """Return the source that `text` names, by the form of its scheme. Raises SourceError."""
    scheme = scheme_of(text)
    if scheme == "hf":
        return _parse_hub(text)
    if scheme == "ollama":
        return _parse_library(text)
    if scheme == "oci":
        return _parse_artifact(text)
    if scheme == "s3":
        return _parse_bucket_or_claim(text, "s3", _S3, _S3_FORM)
    if scheme == "pvc":
        return _parse_bucket_or_claim(text, "pvc", _PVC, _PVC_FORM)

    # The others are URLs. Reading the port raises ValueError if it is no number of a port.
    try:
        parts = urlsplit(text)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise SourceError(text, f"is no URL ({error})") from error
    if scheme in ("http", "https"):
        return _parse_web(text, parts, host)
    if scheme == "file":
        return _parse_local(text, parts, host)
    schemes = "hf://, https://, http://, s3://, oci://, pvc://, file:// or ollama://"
    raise SourceError(text, f"must start with {schemes}, for example {_HF_FORM}")


def _parse_hub(text: str) -> Source:
    """Return a repository of the hub, or the file in it that the text names. Raises SourceError."""
    match = _HF.fullmatch(text)
    if not match:
        raise SourceError(text, f"an hf:// source has the form {_HF_FORM}; {_ESCAPES}")
    # Without a revision, the branch main is meant.
    repo, path, revision = match["repo"], unquote(match["path"] or ""), match["revision"] or "main"
    _check_segments(text, f"{repo}/{revision}/{path}" if path else f"{repo}/{revision}")
    if not path.isprintable():
        raise SourceError(text, "has an escape of a letter that cannot be printed")
    if not path:
        if repo.endswith(".gguf"):
            raise SourceError(text, f"names a file but not its repository: write {_HF_FORM}")
        return Source(scheme="hf", text=f"hf://{repo}@{revision}", repo=repo, revision=revision)
    return hub_file(repo, revision, path, _file_name(text, path))


def hub_file(repo: str, revision: str, path: str, file: str) -> Source:
    """Return the hf:// source of the file at `path`, whose name is `file`."""
    text = f"hf://{repo}@{revision}/{quote(path)}"
    return Source(scheme="hf", text=text, file=file, repo=repo, revision=revision, path=path)


def _parse_bucket_or_claim(text: str, scheme: Scheme, form: re.Pattern[str], example: str) -> Source:
    """Return a file or folder in a bucket or on a claim's volume; like a URL, its path may have escapes such as %20."""
    match = form.fullmatch(text)
    path = unquote(match["path"]) if match else ""
    if not match or not path.isprintable():
        raise SourceError(text, f"a {scheme}:// source has the form {example}; {_ESCAPES}")
    if path:
        _check_segments(text, path.removesuffix("/"))
    # Empty for a folder, whose path is empty or ends with a slash.
    name = "" if not path or path.endswith("/") else _file_name(text, path)
    bucket_or_claim = match["bucket_or_claim"]
    return Source(
        scheme=scheme, text=f"{scheme}://{bucket_or_claim}/{quote(path)}", file=name, repo=bucket_or_claim, path=path
    )


def _parse_library(text: str) -> Source:
    """Return a model of Ollama's library. Raises SourceError."""
    match = _LIBRARY.fullmatch(text)
    if not match:
        problem = (
            "an ollama:// source is a name that `ollama pull` takes, with its tag: ollama://[[HOST/]NAMESPACE/]NAME:TAG"
        )
        raise SourceError(text, problem)
    return Source(scheme="ollama", text=text, file=match["name"], path=match["path"])


def _parse_artifact(text: str) -> Source:
    """Return an artifact of a registry, at its tag or digest. Raises SourceError."""
    match = _REGISTRY.fullmatch(text)
    if not match or len(match["path"]) > _MAX_REPOSITORY or not _is_host(match["repo"].partition("/")[0]):
        raise SourceError(
            text,
            f"an oci:// source has the form {_REGISTRY_FORM}, with the registry's host (docker.io too), lower-case "
            "names, and a tag or a digest but not both",
        )
    return Source(scheme="oci", text=text, repo=match["repo"], revision=match["tag"] or match["digest"])


def _is_host(registry: str) -> bool:
    """Decide whether a registry is a host, with a port if it has one."""
    try:
        parts = urlsplit(f"//{registry}")
        _ = parts.port  # raises ValueError if it is no number of a port
        # Brackets must contain an IPv6 address.
        if registry.startswith("["):
            ipaddress.IPv6Address(parts.hostname or "")
    except ValueError:
        return False
    return True


def _parse_web(text: str, parts: SplitResult, host: str | None) -> Source:
    """Return a file of a web server; its query is kept, because it may be a signature. Raises SourceError."""
    if not host or re.search(r"\s", text):
        raise SourceError(text, "must have a host and no blanks: https://HOST/FILE.gguf")
    if "@" in parts.netloc:
        way_out = f"use a token instead (spec.sourceSecretRef, {TOKEN_VARIABLE})"
        raise SourceError(text, f"must not carry a password: {way_out}")
    url = text.partition("#")[0]
    scheme: Scheme = "https" if parts.scheme == "https" else "http"
    return Source(scheme=scheme, text=url, file=_file_name(text, unquote(parts.path)), path=url)


def _parse_local(text: str, parts: SplitResult, host: str | None) -> Source:
    """Return a file or folder of this machine. Raises SourceError."""
    path = unquote(parts.path)
    if host not in (None, "localhost") or not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
        raise SourceError(
            text,
            "a file:// source has three slashes and an absolute path: file:///PATH/FILE.gguf, or file:///PATH/ for a "
            "folder of weights",
        )
    _check_segments(text, path[1:].removesuffix("/"))
    name = "" if path.endswith("/") else _file_name(text, path)
    return Source(scheme="file", text=f"file://{quote(path)}", file=name, path=path)


def _check_segments(text: str, path: str) -> None:
    """Raise SourceError if the path has an empty segment, or one that leads elsewhere."""
    if any(segment in ("", ".", "..") for segment in path.split("/")):
        raise SourceError(text, "has an empty, `.` or `..` segment: write the path without it")


def _file_name(text: str, path: str) -> str:
    """Return the last segment of a path. Raises SourceError if it is no name of a file, or of a later part."""
    name = path.rpartition("/")[2]
    if not name or name.startswith(".") or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        problem = f"must end in the name of a file (printable, no leading dot, at most {MAX_NAME_BYTES} bytes)"
        raise SourceError(text, problem)
    try:
        parts = list_part_names(name)
    except ValueError as error:
        raise SourceError(text, str(error)) from error
    if parts and name != parts[0]:
        raise SourceError(text, f"names a later part of a split model: name the first part, {parts[0]}")
    return name
