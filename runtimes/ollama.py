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
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from artifacts.formats.gguf_split import name_parts
from artifacts.repositories.address_policy import IN_PRIVATE_NETWORK, Networks, is_allowed, resolve_addresses
from artifacts.source import scheme_of
from crds.serving import RuntimeName
from devices.sockets import LOOPBACK
from devices.tools import find_program
from runtimes.daemon import NOT_RUNNING, SILENT, UNKNOWN_MODEL, DaemonError, ModelIdentity, OnProgress
from runtimes.ollama_pod import POD, PORT, render_name
from runtimes.runtime import Runtime, RuntimeDemand
from runtimes.serving import Serving

if TYPE_CHECKING:
    import ollama

_START: Final = "start it with `ollama serve`, or open the Ollama app"
_LOOK: Final = aiohttp.ClientTimeout(total=10, sock_connect=2)
_WORK: Final = aiohttp.ClientTimeout(total=None, sock_connect=2)
_BLOCK_BYTES: Final = 1 << 20
_APP: Final = Path("/Applications/Ollama.app")
_LIBRARY: Final = "ollama://"
_REGISTRY: Final = "registry.ollama.ai"
_MARK: Final = "pomona-"
"""Beginning of the namespace of every agent's models."""
_REFUSAL: Final = re.compile(r"\b([45]\d\d): .*", re.ASCII | re.DOTALL)
"""A status and a body, as Ollama repeats them."""
_NO_SPLIT: Final = (
    "runtime ollama cannot serve a GGUF model in several files: set runtime to llama.cpp, or give the Model one file, "
    "which `llama-gguf-split --merge` makes of them"
)
_STAY: Final = -1
_LEAVE: Final = 0


class _Details(msgspec.Struct):
    parent_model: str = ""
    """The model that it was created from."""


class _Listed(msgspec.Struct):
    name: str
    size: int | None = None
    """Bytes of memory in /api/ps, bytes of files in /api/tags."""
    details: _Details | None = None

    @property
    def full_names(self) -> set[str]:
        """Full names of the model and of the one that it was created from."""
        return {full_name(each) for each in (self.name, self.details.parent_model if self.details else "") if each}


class _List(msgspec.Struct):
    models: list[_Listed] = []


class Ollama:
    """The Ollama of this machine: a `Daemon`."""

    runtime: RuntimeName = "ollama"
    copies = True
    api_key: str | None = None

    def __init__(self, environment: Mapping[str, str] = os.environ, allowed_networks: Networks = ()) -> None:
        self._environment = environment
        self._networks = allowed_networks
        """Private networks from which models may be pulled."""
        self._of_library: dict[str, str] = {}
        """The library model that each of our models was created from, by the name of ours."""
        # Always on loopback: an Ollama on another machine does not use the memory of this machine.
        self.url = f"http://{LOOPBACK}:{_port(environment.get('OLLAMA_HOST', ''))}"
        self._session: aiohttp.ClientSession | None = None
        self._client: ollama.AsyncClient | None = None
        self._errors: tuple[type[Exception], ...] = ()

    def installed(self) -> bool:
        """Return whether Ollama is installed here, or OLLAMA_HOST is set."""
        return _installed(self._environment)

    def name(self, identity: ModelIdentity) -> str:
        """Return the name of a model of ours, which begins with the agent's mark."""
        return render_name(identity)

    async def loaded(self) -> list[tuple[str, int | None]]:
        """List the models in memory, by /api/ps."""
        return [(model.name, model.size) for model in await self._listed("/api/ps")]

    async def bring(self, name: str, serving: Serving, on_progress: OnProgress) -> None:
        """Copy or pull the weights into Ollama's store, and create the model with its context length.

        A library model that is pulled only for us is deleted afterwards; our model keeps the weights.
        """
        client = await self._library()
        parameters = {"num_ctx": serving.options.context_length}
        base = serving.model.removeprefix(_LIBRARY) if scheme_of(serving.model) == "ollama" else None
        with self._translate_errors(f"create {name}"):
            known = {full_name(model.name) for model in await self._listed("/api/tags")}
            if base is not None:
                self._of_library[name] = base
            if full_name(name) in known:
                return
            if base is None:
                if name_parts(Path(serving.model).name)[1:]:
                    raise DaemonError("SplitUnsupported", _NO_SPLIT)
                files = {"model.gguf": await self._store(Path(serving.model), on_progress)}
                await _finish(await client.create(name, files=files, parameters=parameters, stream=True))
                return
            is_owners = full_name(base) in known
            if not is_owners:
                await self._refuse_private_registry(base)
                await self._pull(base, on_progress)
            await _finish(await client.create(name, from_=base, parameters=parameters, stream=True))
            if not is_owners:
                await client.delete(base)

    async def load(self, name: str) -> None:
        """Load the model without expiry, by a request without a prompt."""
        await self._refuse_to_evict(name)
        client = await self._library()
        with self._translate_errors(f"load {name}"):
            await client.generate(name, keep_alive=_STAY)

    async def unload(self, name: str) -> None:
        """Ask Ollama to unload the model, which happens once no request is left."""
        client = await self._library()
        with self._translate_errors(f"unload {name}", absent_is_fine=True):
            await client.generate(name, keep_alive=_LEAVE)

    async def marked(self, owner: str) -> set[str]:
        """Return the names of the models in the namespace `owner`."""
        return {model.name for model in await self._listed("/api/tags") if model.name.startswith(f"{owner}/")}

    async def remove(self, name: str) -> None:
        """Unload and delete the model; Ollama frees the weights with the last model that uses them."""
        await self.unload(name)
        client = await self._library()
        with self._translate_errors(f"delete {name}", absent_is_fine=True):
            await client.delete(name)

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
        registry = _registry(base)
        addresses = [] if registry == _REGISTRY else await resolve_addresses(registry)
        if not all(is_allowed(each, self._networks) for each in addresses):
            raise DaemonError("SourceForbidden", f"{_LIBRARY}{base}: {registry} is {IN_PRIVATE_NETWORK}")

    async def _pull(self, base: str, on_progress: OnProgress) -> None:
        """Ask Ollama to fetch a model of its library, and report the progress of its largest file, the weights."""
        client = await self._library()
        largest_bytes = 0
        async for step in await client.pull(base, stream=True):
            if step.total and step.total >= largest_bytes:
                largest_bytes = step.total
                on_progress(step.completed or 0, step.total)

    async def _refuse_to_evict(self, name: str) -> None:
        """Refuse to load `name` if that would evict another model. Raises DaemonError.

        Ollama keeps one copy of a file in memory, and reloads it for other settings.
        """
        bases = await self._base_names(name)
        for model in await self._listed("/api/ps"):
            other = model.name
            if not other.startswith(_MARK) and model.full_names & bases:
                raise DaemonError(
                    "OwnersModelLoaded",
                    f"the owner of this host has loaded {other}, and Ollama keeps the same weights in memory only "
                    f"once: unload it, for example by `ollama stop {other}`",
                )
            if other != name and other.startswith(_MARK) and _weights(other) == _weights(name):
                raise DaemonError(
                    "SameWeightsLoaded",
                    f"Ollama has the same weights loaded as {other} with another context length, and keeps only one of "
                    "the two: give both services the same contextLength, or set runtime of one to llama.cpp",
                )

    async def _base_names(self, name: str) -> set[str]:
        """Return the full name of the library model that ours was created from, or nothing if there is none.

        An agent that has restarted did not create the model; then Ollama states it.
        """
        if name in self._of_library:
            return {full_name(self._of_library[name])}
        own = full_name(name)
        found = [model.full_names for model in await self._listed("/api/tags") if full_name(model.name) == own]
        return set().union(*found) - {own}

    async def _listed(self, path: str) -> list[_Listed]:
        with self._translate_errors("list its models"):
            async with self._http().get(f"{self.url}{path}", timeout=_LOOK) as response:
                answer = await response.read()
                if response.status != HTTPStatus.OK:
                    raise DaemonError("DaemonRefused", f"{self.url}{path} answered {response.status}: is it Ollama?")
        try:
            return msgspec.json.decode(answer, type=_List).models
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DaemonError("DaemonRefused", f"{self.url}{path} is not Ollama's: {error}") from error

    async def _store(self, path: Path, on_progress: OnProgress) -> str:
        """Upload the file to Ollama's store and return its digest. Raises OSError and ClientError."""
        with path.open("rb") as file:
            digest = f"sha256:{(await asyncio.to_thread(hashlib.file_digest, file, 'sha256')).hexdigest()}"
        blob = f"{self.url}/api/blobs/{digest}"
        async with self._http().head(blob, timeout=_LOOK) as there:
            if there.status == HTTPStatus.OK:
                return digest
        async with self._http().post(blob, data=_blocks(path, on_progress), timeout=_WORK) as response:
            if response.status not in {HTTPStatus.OK, HTTPStatus.CREATED}:
                raise DaemonError("DaemonRefused", f"Ollama does not take {path}: {(await response.text())[:300]}")
        return digest

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    async def _library(self) -> "ollama.AsyncClient":
        """Return the client; the first call imports the library in a thread, because the import is slow."""
        if self._client is None:
            library = await asyncio.to_thread(importlib.import_module, "ollama")
            httpx = importlib.import_module("httpx")
            self._errors = (library.ResponseError, httpx.HTTPError)
            # The environment is ignored: its proxy is meant for the Internet, OLLAMA_API_KEY for Ollama's own service.
            timeout = httpx.Timeout(None, connect=2.0)
            client: ollama.AsyncClient = library.AsyncClient(
                host=self.url, trust_env=False, timeout=timeout, headers={"authorization": "none"}
            )
            self._client = client
        return self._client

    @contextlib.contextmanager
    def _translate_errors(self, what: str, *, absent_is_fine: bool = False) -> Iterator[None]:
        """Raise every error of the block as a DaemonError."""
        try:
            yield
        except DaemonError:
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise DaemonError(NOT_RUNNING, f"no Ollama answers at {self.url}: {_START}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DaemonError(SILENT, f"Ollama at {self.url} did not {what}: {_text(error)}") from error
        except ConnectionError as error:
            raise DaemonError(NOT_RUNNING, f"no Ollama answers at {self.url}: {_START}") from error
        except OSError as error:
            raise DaemonError("WeightsMissing", f"cannot read the weights for Ollama: {error}") from error
        except self._errors as error:
            status = getattr(error, "status_code", None)
            if status == HTTPStatus.NOT_FOUND and absent_is_fine:
                return
            raise DaemonError(_reason(status), f"Ollama at {self.url} did not {what}: {_text(error)}") from error


def full_name(name: str) -> str:
    """Return a model's name as Ollama compares names: with namespace and tag, without its own registry, in lower case.

    `llama3`, `library/llama3:latest` and `registry.ollama.ai/library/llama3` are one model.
    """
    parts = name.lower().split("/")
    if len(parts) == len(("host", "namespace", "model")) and parts[0] == _REGISTRY:
        del parts[0]
    path = "/".join(parts if len(parts) > 1 else ["library", *parts])
    return path if ":" in parts[-1] else f"{path}:latest"


def _registry(name: str) -> str:
    """Return the host from which Ollama pulls a model."""
    parts = name.split("/")
    return parts[0] if len(parts) == len(("host", "namespace", "model")) else _REGISTRY


async def _finish(steps: AsyncIterator[object]) -> None:
    """Read a stream of steps to its end; a step that is an error raises."""
    async for _ in steps:
        pass


def _port(host: str) -> int:
    """Read the port from OLLAMA_HOST, in any of the forms that Ollama accepts: [scheme://][host][:port]."""
    parts = urlsplit(host if "//" in host else f"//{host}")
    try:
        return parts.port or {"http": 80, "https": 443}.get(parts.scheme, PORT)
    except ValueError:
        return PORT


def _weights(name: str) -> str:
    return name.rpartition(":")[2].partition("-")[0]


def _text(error: Exception) -> str:
    """Return the text of an error without the body of a registry's refusal, which a redirect may take from anywhere."""
    return _REFUSAL.sub(r"HTTP \1", str(error)) or type(error).__name__


def _reason(status: int | None) -> str:
    """Return the reason for a status; None is a failure of the connection, not an answer."""
    if status is None:
        return SILENT
    if status == HTTPStatus.NOT_FOUND:
        return UNKNOWN_MODEL
    return "DaemonBusy" if status == HTTPStatus.SERVICE_UNAVAILABLE else "DaemonRefused"


async def _blocks(path: Path, on_progress: OnProgress) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        size_bytes, sent_bytes = os.fstat(file.fileno()).st_size, 0
        while block := await asyncio.to_thread(file.read, _BLOCK_BYTES):
            yield block
            sent_bytes += len(block)
            on_progress(sent_bytes, size_bytes)


def _installed(environment: Mapping[str, str] = os.environ) -> bool:
    return "OLLAMA_HOST" in environment or find_program("ollama", environment) is not None or _APP.exists()


def _refuse_demand(demand: RuntimeDemand) -> str | None:
    """Refuse split models, and what only the owner of a host can set, by OLLAMA_NUM_PARALLEL."""
    if demand.is_split:
        return _NO_SPLIT
    if demand.in_pods or demand.options.parallel == 1:
        return None
    return "runtime ollama cannot do parallel on a host, where its owner sets it: remove it, or serve it in pods"


RUNTIME: Final = Runtime(
    name="ollama",
    formats=frozenset({"gguf", "ollama"}),
    modes=frozenset({"chat"}),
    settings=frozenset({"parallel"}),
    installed=_installed,
    install_hint="install Ollama from ollama.com and start it",
    pod=POD,
    refusal=_refuse_demand,
)
