"""Ollama: models in the daemon that the owner of this machine runs.

Calls that change anything use Ollama's own client library. The library is imported on first use, because it takes
16 MiB, which an agent without Ollama saves. Two operations do not use the library: the lists, one of which is requested
every few seconds, and the upload of a GGUF to Ollama's store, for which the library reports no progress and does not
detect that the file is there already.

Settings are part of a model (`parameters` at its creation), not of the request that loads it: requests in OpenAI's form
have no fields for them, and Ollama reloads a model when they differ.
"""

import asyncio
import contextlib
import hashlib
import importlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from artifacts.formats.gguf_split import list_part_names
from artifacts.repositories.address_policy import IN_PRIVATE_NETWORK, Networks, is_allowed, resolve_addresses
from artifacts.source import scheme_of
from crds.serving import RuntimeName, ServingOptions
from devices.sockets import LOOPBACK
from kube.backoff import backoff_seconds
from runtimes.daemon import NOT_RUNNING, SILENT, UNKNOWN_MODEL, DaemonError, OnProgress
from runtimes.ollama import NO_SPLIT, OWNER, PORT, is_installed, render_name
from runtimes.pod import PodModel
from runtimes.serving import Serving

if TYPE_CHECKING:
    import ollama

_START_HINT: Final = "start it with `ollama serve`, or open the Ollama app"
_QUERY_TIMEOUT: Final = aiohttp.ClientTimeout(total=10, sock_connect=2)
_NO_LIMIT: Final = aiohttp.ClientTimeout(total=None, sock_connect=2)
_BLOCK_BYTES: Final = 1 << 20
_LIBRARY: Final = "ollama://"
_REGISTRY: Final = "registry.ollama.ai"
_PARTS_WITH_REGISTRY: Final = 3
"""Parts of a model's name that begins with a registry: HOST/NAMESPACE/MODEL."""
_OUR_PREFIXES: Final = ("pomona-", f"{OWNER}/")
"""Beginnings of the names of every agent's models, and of those that are made in pods."""
_REFUSAL: Final = re.compile(r"(?<!\S)(?P<status>[45]\d\d): .*", re.ASCII | re.DOTALL)
"""A status and a body, as Ollama repeats them; an address with a port, before another error, is no status."""
_KEEP_FOR_EVER: Final = -1
_UNLOAD_NOW: Final = 0
_FILE: Final = re.compile(r"^(?:FROM|ADAPTER) .*?(sha256-[0-9a-f]{64})", re.ASCII | re.MULTILINE)
_SETTING: Final = re.compile(
    r"^PARAMETER (?:num_ctx|num_batch|num_gpu|main_gpu|use_mmap|num_thread) .+$", re.ASCII | re.MULTILINE
)
"""Parameters for whose sake Ollama loads a model again."""


class _Listed(msgspec.Struct):
    name: str
    size: int | None = None
    """Bytes of memory in /api/ps, bytes of files in /api/tags."""
    digest: str = ""
    """Digest of the manifest; it differs between two names of the same weights and settings."""


class _List(msgspec.Struct):
    models: list[_Listed] = []


class _Shown(msgspec.Struct):
    modelfile: str = ""


class _Content(NamedTuple):
    """The files of a model, and the parameters with which they are loaded."""

    weights: tuple[str, ...]
    settings: tuple[str, ...] = ()


class _KnownContent(NamedTuple):
    """The content of a model, as it was found out."""

    manifest_digest: str
    """Empty if it is unknown."""
    content: _Content


class Ollama:
    """The Ollama of this machine: a `Daemon`."""

    runtime: RuntimeName = "ollama"
    serve_command: tuple[str, ...] = ("ollama", "serve")
    copies = True
    api_key: str | None = None

    def __init__(self, environment: Mapping[str, str] = os.environ, allowed_networks: Networks = ()) -> None:
        self._environment = environment
        self._networks = allowed_networks
        """Private networks from which models may be pulled."""
        self._contents: dict[str, _KnownContent] = {}
        """Content of the models in memory and of ours, by name.

        It has to be remembered: Ollama still lists a model that was deleted while it was in memory, but no longer shows
        its content.
        """
        self._knows_earlier_models = False
        """True once the content of our models that were added before this process started is known."""
        # Always on loopback: an Ollama on another machine does not use the memory of this machine.
        self.url = f"http://{LOOPBACK}:{_read_port(environment.get('OLLAMA_HOST', ''))}"
        self.serve_address = {"OLLAMA_HOST": self.url.removeprefix("http://")}
        # Opened by the first call that needs one, and closed by `close`.
        self._session: aiohttp.ClientSession | None = None
        self._client: ollama.AsyncClient | None = None
        # Errors of Ollama's client library; known once `_get_client` has imported it.
        self._errors: tuple[type[Exception], ...] = ()

    def installed(self) -> bool:
        """Return whether Ollama is installed here, or OLLAMA_HOST is set."""
        return is_installed(self._environment)

    def build_name(self, owner: str, model: str, content: str) -> str:
        """Return the name of a model of ours, which begins with the agent's mark."""
        return render_name(owner, model, content)

    async def list_loaded(self) -> list[tuple[str, int | None]]:
        """List the models in memory, by /api/ps."""
        models = await self._list_models("/api/ps")
        await self._learn_contents(models)
        return [(model.name, model.size) for model in models]

    def identify_content(self, name: str) -> str:
        """Return one text of the digests of the model's files and its parameters; if they are unknown, its name.

        Ollama keeps one copy of the same files and parameters in memory, even if several models use it, and lists it by
        the name that was requested first. So names are compared by this text.
        """
        # _contents: content of the models in memory and of ours, by name.
        if name not in self._contents:
            return name
        content = self._contents[name].content
        return " ".join([*content.weights, *content.settings])

    async def add_model(self, name: str, serving: Serving, on_progress: OnProgress) -> None:
        """Copy or pull the weights into Ollama's store, and create the model with its context length.

        A library model that is pulled only for us is deleted afterwards; our model keeps the weights.
        """
        client = await self._get_client()
        parameters = {"num_ctx": serving.options.context_tokens}
        parameters |= {"num_thread": serving.threads} if serving.threads is not None else {}
        base = serving.model.removeprefix(_LIBRARY) if scheme_of(serving.model) == "ollama" else None
        with self._translate_errors(f"create {name}"):
            # Names as Ollama stores them, by the full name, by which it compares them.
            stored_names = {full_name(model.name): model.name for model in await self._list_models("/api/tags")}
            if full_name(name) in stored_names:
                return

            # From a file: upload it.
            if base is None:
                if list_part_names(Path(serving.model).name)[1:]:
                    raise DaemonError("SplitUnsupported", NO_SPLIT)
                files = {"model.gguf": await self._upload_weights(Path(serving.model), on_progress)}
                await _read_to_end(await client.create(name, files=files, parameters=parameters, stream=True))
                return

            # From the library: pull the model, and delete it afterwards, unless the owner has it already.
            is_owners = full_name(base) in stored_names
            if is_owners:
                base = stored_names[full_name(base)]  # a model to create from has to be named as it is stored
            else:
                await self._refuse_private_registry(base)
                await self._pull_model(base, on_progress)
            await _read_to_end(await client.create(name, from_=base, parameters=parameters, stream=True))
            if not is_owners:
                await client.delete(base)

    async def load(self, name: str) -> None:
        """Load the model without expiry, by an empty request. Raises DaemonError, also if that would evict another one.

        Its content is remembered first, so that `identify_content` knows the model.
        """
        content = await self._read_content(name)
        self._contents[name] = _KnownContent(manifest_digest="", content=content)
        await self._refuse_to_evict(name, content)

        client = await self._get_client()
        with self._translate_errors(f"load {name}"):
            await client.generate(name, keep_alive=_KEEP_FOR_EVER)

            own_content = self.identify_content(name)  # `list_loaded` may read it again
            loaded_contents = {self.identify_content(loaded) for loaded, _ in await self.list_loaded()}
            if own_content not in loaded_contents:
                # Ollama lists the same weights by the name of a deleted model, whose content cannot be read any more.
                # After an unload, it lists them by our name.
                await client.generate(name, keep_alive=_UNLOAD_NOW)
                await client.generate(name, keep_alive=_KEEP_FOR_EVER)

    async def unload(self, name: str) -> None:
        """Ask Ollama to unload the model, which happens once no request is left."""
        client = await self._get_client()
        with self._translate_errors(f"unload {name}", absent_is_fine=True):
            await client.generate(name, keep_alive=_UNLOAD_NOW)

    async def list_marked(self, owner: str) -> set[str]:
        """Return the names of the models in the namespace `owner`."""
        return {model.name for model in await self._list_models("/api/tags") if model.name.startswith(f"{owner}/")}

    async def remove(self, name: str) -> None:
        """Unload and delete the model; Ollama frees the weights with the last model that uses them."""
        if name in {model.name for model in await self._list_models("/api/ps")}:
            await self.unload(name)  # under another name, the weights are loaded for that one
        client = await self._get_client()
        with self._translate_errors(f"delete {name}", absent_is_fine=True):
            await client.delete(name)
        self._contents.pop(name, None)

    async def close(self) -> None:
        """Close connections."""
        if self._session:
            await self._session.close()
        if self._client:
            await self._client.close()  # type: ignore[no-untyped-call]  # so it is in the library
        self._session = self._client = None

    async def _refuse_private_registry(self, base: str) -> None:
        """Raise DaemonError if the name of a model leads Ollama into a private network.

        Ollama resolves the name of the registry again, and follows its redirects by itself.
        """
        # Only a name of three parts begins with a registry: HOST/NAMESPACE/MODEL.
        parts = base.split("/")
        registry = parts[0] if len(parts) == _PARTS_WITH_REGISTRY else _REGISTRY
        addresses = [] if registry == _REGISTRY else await resolve_addresses(registry)
        if not all(is_allowed(address, self._networks) for address in addresses):
            raise DaemonError("SourceForbidden", f"{_LIBRARY}{base}: {registry} is {IN_PRIVATE_NETWORK}")

    async def _pull_model(self, base: str, on_progress: OnProgress) -> None:
        """Ask Ollama to fetch a model of its library, and report the progress of its largest file, the weights."""
        client = await self._get_client()
        largest_bytes = 0
        async for step in await client.pull(base, stream=True):
            if step.total and step.total >= largest_bytes:
                largest_bytes = step.total
                on_progress(step.completed or 0, step.total)

    async def _refuse_to_evict(self, name: str, content: _Content) -> None:
        """Refuse to load `name` if that would evict another model. Raises DaemonError.

        Ollama keeps one copy of the same weights in memory, whoever loaded it, and reloads it for other settings. So
        `name` is refused while the owner has loaded these weights, or we have with other settings.
        """
        for other, _ in await self.list_loaded():
            known = self._contents.get(other)  # None: a concurrent call has forgotten it
            has_same_weights = known is not None and known.content.weights == content.weights
            # Only another model with the same weights matters.
            if other == name or known is None or not has_same_weights:
                continue

            # Models of other names than ours are the owner's.
            if not other.startswith(_OUR_PREFIXES):
                raise DaemonError(
                    "OwnersModelLoaded",
                    f"the owner of this host has loaded {other}, and Ollama keeps the same weights in memory only "
                    f"once: unload it, for example by `ollama stop {other}`",
                )

            # Ours, with the same settings, need no reload.
            if known.content != content:
                raise DaemonError(
                    "SameWeightsLoaded",
                    f"Ollama has the same weights loaded as {other} with another context length, and keeps only one of "
                    "the two: give both services the same contextLength, or set runtime of one to llama.cpp",
                )

    async def _learn_contents(self, models: list[_Listed]) -> None:
        """Read the content of these models in memory; at the first model of ours, of all our stored models as well.

        An earlier agent process may have added these. Other models that are no longer in memory are forgotten.
        """
        names = {model.name for model in models}
        for name in [name for name in self._contents if name not in names and not name.startswith(_OUR_PREFIXES)]:
            del self._contents[name]

        if not self._knows_earlier_models and any(name.startswith(_OUR_PREFIXES) for name in names):
            stored = await self._list_models("/api/tags")
            models = [*models, *(model for model in stored if model.name.startswith(_OUR_PREFIXES))]
            self._knows_earlier_models = True

        # An equal digest of the manifest means equal content.
        for model in models:
            known = self._contents.get(model.name)
            if known is None or known.manifest_digest != model.digest:
                content = await self._read_content(model.name)
                self._contents[model.name] = _KnownContent(manifest_digest=model.digest, content=content)

    async def _read_content(self, name: str) -> _Content:
        """Return the files and settings of a stored model, by its modelfile.

        If Ollama does not show the model or its files, its name takes the place of their digests.
        """
        with self._translate_errors(f"show {name}"):
            request = self._get_session().post(f"{self.url}/api/show", json={"model": name}, timeout=_QUERY_TIMEOUT)
            async with request as response:
                answer = await response.read()
                if response.status != HTTPStatus.OK:
                    return _Content((name,))

        try:
            modelfile = msgspec.json.decode(answer, type=_Shown).modelfile
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DaemonError("DaemonRefused", f"{self.url}/api/show is not Ollama's: {error}") from error
        # _FILE finds the digests of the weights and adapters, _SETTING the parameters that take a reload to change.
        files = tuple(_FILE.findall(modelfile))
        return _Content(weights=files or (name,), settings=tuple(sorted(_SETTING.findall(modelfile))))

    async def _list_models(self, path: str) -> list[_Listed]:
        """Return the models of /api/ps or /api/tags."""
        with self._translate_errors("list its models"):
            async with self._get_session().get(f"{self.url}{path}", timeout=_QUERY_TIMEOUT) as response:
                answer = await response.read()
                if response.status != HTTPStatus.OK:
                    raise DaemonError("DaemonRefused", f"{self.url}{path} answered {response.status}: is it Ollama?")
        try:
            return msgspec.json.decode(answer, type=_List).models
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DaemonError("DaemonRefused", f"{self.url}{path} is not Ollama's: {error}") from error

    async def _upload_weights(self, path: Path, on_progress: OnProgress) -> str:
        """Upload the file to Ollama's store and return its digest. Raises OSError and ClientError."""
        with path.open("rb") as file:
            digest = f"sha256:{(await asyncio.to_thread(hashlib.file_digest, file, 'sha256')).hexdigest()}"
        blob = f"{self.url}/api/blobs/{digest}"
        async with self._get_session().head(blob, timeout=_QUERY_TIMEOUT) as there:
            if there.status == HTTPStatus.OK:
                return digest
        async with self._get_session().post(blob, data=_read_blocks(path, on_progress), timeout=_NO_LIMIT) as response:
            if response.status not in {HTTPStatus.OK, HTTPStatus.CREATED}:
                raise DaemonError("DaemonRefused", f"Ollama does not take {path}: {(await response.text())[:300]}")
        return digest

    def _get_session(self) -> aiohttp.ClientSession:
        """Return the session for requests without the library."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    async def _get_client(self) -> "ollama.AsyncClient":
        """Return the client; the first call imports the library in a thread, because the import is slow."""
        if self._client is None:
            library = await asyncio.to_thread(importlib.import_module, "ollama")
            httpx = importlib.import_module("httpx")
            self._errors = (library.ResponseError, httpx.HTTPError)
            # The environment is ignored: its proxy is meant for the Internet, OLLAMA_API_KEY for Ollama's own service.
            timeout = httpx.Timeout(None, connect=2.0)
            # With a header of its own, the library does not send OLLAMA_API_KEY.
            client: ollama.AsyncClient = library.AsyncClient(
                host=self.url, trust_env=False, timeout=timeout, headers={"authorization": "none"}
            )
            self._client = client
        return self._client

    @contextlib.contextmanager
    def _translate_errors(self, what: str, *, absent_is_fine: bool = False) -> Iterator[None]:
        """Raise every error of the block as a DaemonError; `what` ends its message: "Ollama did not ...".

        If `absent_is_fine`, a model that Ollama does not have is no error.
        """
        try:
            yield
        except DaemonError:
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise DaemonError(NOT_RUNNING, f"no Ollama answers at {self.url}: {_START_HINT}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DaemonError(SILENT, f"Ollama at {self.url} did not {what}: {_describe_error(error)}") from error
        except ConnectionError as error:
            raise DaemonError(NOT_RUNNING, f"no Ollama answers at {self.url}: {_START_HINT}") from error
        except OSError as error:
            raise DaemonError("WeightsMissing", f"cannot read the weights for Ollama: {error}") from error
        except self._errors as error:  # of Ollama's client library
            status = getattr(error, "status_code", None)
            if status == HTTPStatus.NOT_FOUND and absent_is_fine:
                return
            message = f"Ollama at {self.url} did not {what}: {_describe_error(error)}"
            raise DaemonError(_find_reason(status), message) from error


def full_name(name: str) -> str:
    """Return a model's name as Ollama compares names: with namespace and tag, without its own registry, in lower case.

    `llama3`, `library/llama3:latest` and `registry.ollama.ai/library/llama3` are one model.
    """
    parts = name.lower().split("/")
    if len(parts) == _PARTS_WITH_REGISTRY and parts[0] == _REGISTRY:
        del parts[0]
    path = "/".join(parts if len(parts) > 1 else ["library", *parts])
    return path if ":" in parts[-1] else f"{path}:latest"


async def _read_to_end(steps: AsyncIterator[object]) -> None:
    """Read a stream of steps to its end; a step that is an error raises."""
    async for _ in steps:
        pass


def _read_port(host: str) -> int:
    """Read the port from OLLAMA_HOST, in any of the forms that Ollama accepts: [scheme://][host][:port]."""
    parts = urlsplit(host if "//" in host else f"//{host}")
    try:
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme, PORT)
    except ValueError:
        return PORT


def _describe_error(error: Exception) -> str:
    """Return the text of an error without the body of a registry's refusal, which a redirect may take from anywhere."""
    text = getattr(error, "error", None) or str(error)  # that of the library adds a status, which may be -1
    return _REFUSAL.sub(r"HTTP \g<status>", text) or type(error).__name__


def _find_reason(status: int | None) -> str:
    """Return the reason for a status; None is a failure of the connection, not an answer."""
    if status is None:
        return SILENT
    if status == HTTPStatus.NOT_FOUND:
        return UNKNOWN_MODEL
    return "DaemonBusy" if status == HTTPStatus.SERVICE_UNAVAILABLE else "DaemonRefused"


async def _read_blocks(path: Path, on_progress: OnProgress) -> AsyncIterator[bytes]:
    """Yield the blocks of a file, and report how much was sent."""
    with path.open("rb") as file:
        size_bytes, sent_bytes = os.fstat(file.fileno()).st_size, 0
        while block := await asyncio.to_thread(file.read, _BLOCK_BYTES):
            yield block
            sent_bytes += len(block)
            on_progress(sent_bytes, size_bytes)


_START_SECONDS: Final = 1.0
_ATTEMPTS: Final = 5
"""Failures after which the preparation ends, so that the pod shows the last one; the kubelet then starts it again."""
_FIRST_PAUSE_SECONDS: Final = 2.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_PERMANENT_REASONS: Final = frozenset({"SourceForbidden", "SplitUnsupported", "WeightsMissing"})
_PERMANENT_TEXTS: Final = ("file does not exist", "no space left on device", "invalid model name")
"""Errors of Ollama that another attempt does not cure; all have one status, so only their texts differ."""


async def prepare_model(model: PodModel, on_progress: OnProgress, on_failure: Callable[[DaemonError], None]) -> None:
    """Pull or create the model, and load it for ever; try again after failures that may pass.

    Args:
        model: the model.
        on_progress: called with the bytes that the daemon has, and the total.
        on_failure: called with each failure after which it is tried again.

    Raises:
        DaemonError: another try does not help, or several have failed.
    """
    name = model.name
    options = ServingOptions(context_length=model.context_length)
    serving = Serving(service=name, model=model.source, options=options, threads=model.threads)
    # The daemon of this pod.
    daemon = Ollama({"OLLAMA_HOST": f"{LOOPBACK}:{model.port}"}, model.allowed_networks)

    failures = 0
    try:
        while True:
            try:
                await daemon.add_model(name, serving, on_progress)
                await daemon.load(name)
            except DaemonError as error:
                if error.reason == NOT_RUNNING:  # starting, or started again by the kubelet
                    await asyncio.sleep(_START_SECONDS)
                    continue
                failures += 1
                if is_permanent(error) or failures >= _ATTEMPTS:
                    raise
                on_failure(error)
                await asyncio.sleep(backoff_seconds(failures, first=_FIRST_PAUSE_SECONDS, most=_LONGEST_PAUSE_SECONDS))
            else:
                return
    finally:
        await daemon.close()


def is_permanent(error: DaemonError) -> bool:
    """Decide whether another try cannot help."""
    return error.reason in _PERMANENT_REASONS or any(text in str(error) for text in _PERMANENT_TEXTS)
