"""The server side of the control socket of `pomona up`, `up.sock` in its state folder.

Every call is bounded: a status waits for the proxy for seconds, loads and unloads are begun and not awaited, and a pull
ends with its client. The names in calls are those of services, which are unique on one machine.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import parse_qs

import msgspec

from artifacts.errors import ArtifactError
from artifacts.source import SourceError
from gateway.http.awaited_exchange import AwaitedExchange
from gateway.http.control_calls import ControlError, read_body, respond
from gateway.http.control_listener import serve_calls
from gateway.http.named_socket import SocketError
from gateway.proxy.model_control import AddedModel, AddProgress, AddRequest
from kube.resources import ObjectKey
from kube.time import rfc3339
from metal_agent.control.agent_status import StopAccepted
from metal_agent.options import StartError
from standalone.added_models import AddedModels
from standalone.control.service_status import describe_up, read_progress
from standalone.control.stored_weights import WeightsInUseError, delete_weights, list_weights
from standalone.control.up_status import (
    UP_SOCKET,
    LoadAnswer,
    PullRequest,
    PullUpdate,
    WeightsFacts,
    WeightsList,
    describe_missing_service,
)
from standalone.machine import Machine
from standalone.manifests import ManifestError
from standalone.model_names import ModelNameError

T = TypeVar("T")

MOST_PULLS: Final = 4
"""Pulls at a time: more would only share the network."""
_BODY_BYTES: Final = 64 << 10
_NDJSON_FIELDS: Final = b"Content-Type: application/x-ndjson\r\n"
_UNLISTED_SECONDS: Final = 2.0
_UPDATE_SECONDS: Final = 0.25
"""Interval between two lines of progress of a pull."""
_HEARTBEAT_SECONDS: Final = 5.0
"""The pause after which a pull sends an empty line, so that its client notices the end of this process."""


@contextlib.contextmanager
def serve_control(machine: Machine, added: AddedModels, folder: Path) -> Iterator[None]:
    """Answer calls about `machine` on the unix socket `up.sock` in `folder` while the context lasts.

    Models are added to the machine by `added`, also for clients of Ollama's API, whose calls the proxy passes on.

    Raises StartError if the socket cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serve_calls(folder / UP_SOCKET, UpControl(machine, added, folder).answer))
        except SocketError as error:
            raise StartError(str(error)) from error
        machine.exposure.control_socket = str(folder / UP_SOCKET)
        yield


class UpControl:
    """The calls about `machine`, whose state is in `folder`."""

    def __init__(self, machine: Machine, added: AddedModels, folder: Path) -> None:
        """Note the time at which the process has started."""
        self._machine, self._added, self._folder = machine, added, folder
        self._started_at = rfc3339(datetime.now(UTC))
        self._pulls = self._lookups = 0

    async def answer(self, call: AwaitedExchange) -> None:
        """Carry out the call that method and path name. Raises ControlError."""
        head, machine = call.exchange.head, self._machine
        match (head.method, *head.path.split("/")[1:]):
            case ("GET", "status"):
                respond(call, await describe_up(machine, started_at=self._started_at, folder=self._folder))
            case ("POST", "services", name, "load"):
                respond(call, self._load(name))
            case ("POST", "services", name, "unload"):
                respond(call, self._unload(name))
            case ("POST", "stop"):
                if parse_qs(head.query).get("now") == ["true"]:
                    machine.signals.abort.set()
                machine.signals.stop.set()
                respond(call, StopAccepted(os.getpid()))
            case ("POST", "models"):
                respond(call, await self._add(call))
            case ("GET", "models", name, "progress"):
                await self._send_progress(call, self._find_service(name))
            case ("DELETE", "models", name):
                respond(call, await self._remove(name))
            case ("POST", "pull"):
                await self._pull(call)
            case ("GET", "weights"):
                respond(call, WeightsList(await self._list_weights()))
            case ("DELETE", "weights", digest):
                respond(call, await self._delete_weights(digest))
            case _:
                raise ControlError(HTTPStatus.NOT_FOUND, f"{head.method} {head.path} is no call of this `pomona up`")

    def _find_service(self, name: str) -> ObjectKey:
        """Return the key of the service with a name. Raises ControlError."""
        names = {key.name: key for key in self._machine.decisions}
        if name not in names:
            raise ControlError(HTTPStatus.NOT_FOUND, describe_missing_service(name, list(names)))
        return names[name]

    def _load(self, name: str) -> LoadAnswer:
        """Begin to load a model. Raises ControlError if it cannot be loaded."""
        machine, key = self._machine, self._find_service(name)
        problem = machine.decisions[key].problem
        if problem and problem.phase in {"Failed", "Suspended"}:
            raise ControlError(HTTPStatus.CONFLICT, f"{name}: {problem.message}")
        if not machine.on_demand.has(key):
            return LoadAnswer(f"{name} is always loaded: its service has no spec.scaling.minReplicas: 0")
        if reason := machine.on_demand.too_large.get(str(key)):
            raise ControlError(HTTPStatus.CONFLICT, f"{name}: {reason}")
        if any(runner.state.phase == "Ready" for runner in machine.list_replicas(key)):
            return LoadAnswer(f"{name} is loaded already")
        machine.on_demand.request_load(key)
        return LoadAnswer()

    def _unload(self, name: str) -> LoadAnswer:
        """Begin to unload a model. Raises ControlError if it is always loaded."""
        machine, key = self._machine, self._find_service(name)
        if not machine.on_demand.has(key):
            way_out = "write spec.scaling.minReplicas: 0 into its service, or stop everything by `pomona down`"
            raise ControlError(HTTPStatus.CONFLICT, f"{name} is always loaded: {way_out}")
        if machine.on_demand.is_unwanted(key) and not machine.list_replicas(key):
            return LoadAnswer(f"{name} is not loaded")
        machine.on_demand.unload(key)
        return LoadAnswer()

    async def _add(self, call: AwaitedExchange) -> AddedModel:
        """Serve one more model on demand. Raises ControlError."""
        request = await _read_request(call, AddRequest)
        if self._lookups >= MOST_PULLS:
            problem = f"{MOST_PULLS} models are looked up already: try again in a few seconds"
            raise ControlError(HTTPStatus.TOO_MANY_REQUESTS, problem)
        self._lookups += 1
        try:
            choice, is_new = await self._added.add(request.model, is_client=request.is_client)
        except (ModelNameError, SourceError, ManifestError) as error:
            raise ControlError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except ArtifactError as error:
            raise ControlError(HTTPStatus.BAD_GATEWAY, error.message) from error
        except OSError as error:
            raise ControlError(HTTPStatus.INTERNAL_SERVER_ERROR, f"it cannot be recorded: {error}") from error
        finally:
            self._lookups -= 1
        return AddedModel(choice.name, is_new, choice.note)

    async def _remove(self, name: str) -> AddedModel:
        """Serve an added model no more, and return once no list has it.

        Raises ControlError: it is served by a file, or by --model.
        """
        machine, key = self._machine, self._find_service(name)
        try:
            if not self._added.remove(key.name):
                problem = f"{name} was not added by a command: remove it from the file or the --model that it is of"
                raise ControlError(HTTPStatus.CONFLICT, problem)
        except OSError as error:
            raise ControlError(HTTPStatus.INTERNAL_SERVER_ERROR, f"it cannot be recorded: {error}") from error
        seen_changes = machine.changes.count
        with contextlib.suppress(TimeoutError):  # without the proxy, nobody lists it
            async with asyncio.timeout(_UNLISTED_SECONDS):
                while key in machine.exposure.forwarded_services:
                    seen_changes = await machine.changes.wait_past(seen_changes)
        return AddedModel(name, is_new=False)

    async def _send_progress(self, call: AwaitedExchange, key: ObjectKey) -> None:
        """Send the progress of a model as lines of JSON, until its weights are there or it cannot be served."""
        call.exchange.start(HTTPStatus.OK, _NDJSON_FIELDS)
        last, sent_at = AddProgress(), time.monotonic()
        while True:
            seen_changes = self._machine.changes.count
            progress, now = read_progress(self._machine, key), time.monotonic()
            is_last = progress.is_stored or bool(progress.problem)
            if progress != last or now - sent_at >= _HEARTBEAT_SECONDS:
                last, sent_at = progress, now
                call.exchange.write(msgspec.json.encode(progress) + b"\n")
                await call.drain()
            if is_last:
                call.exchange.finish()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_UPDATE_SECONDS):
                    await self._machine.changes.wait_past(seen_changes)

    async def _pull(self, call: AwaitedExchange) -> None:
        """Fetch the source in the body, and send its progress as lines of JSON. Raises ControlError."""
        request = await _read_request(call, PullRequest)
        if self._pulls >= MOST_PULLS:
            problem = f"{MOST_PULLS} pulls run already: wait until one has ended"
            raise ControlError(HTTPStatus.TOO_MANY_REQUESTS, problem)

        self._pulls += 1
        unsent: list[PullUpdate] = []

        def note(fetched_bytes: int, total_bytes: int | None) -> None:
            """Note the progress: the first report, which has the bytes of an earlier pull, and then the last one."""
            if len(unsent) > 1:
                unsent.pop()
            unsent.append(PullUpdate(fetched_bytes, total_bytes))

        call.exchange.start(HTTPStatus.OK, _NDJSON_FIELDS)
        pulling = asyncio.create_task(self._machine.puller.pull(request.source, note))
        try:
            quiet_seconds = 0.0
            while not pulling.done():
                await asyncio.wait({pulling}, timeout=_UPDATE_SECONDS)
                quiet_seconds = 0.0 if unsent else quiet_seconds + _UPDATE_SECONDS
                if unsent or quiet_seconds >= _HEARTBEAT_SECONDS:
                    quiet_seconds = 0.0
                    call.exchange.write(b"".join(msgspec.json.encode(update) + b"\n" for update in unsent) or b"\n")
                    unsent.clear()
                    await call.drain()
            call.exchange.finish(msgspec.json.encode(_describe_end(pulling)) + b"\n")
        finally:
            # A client that hangs up ends its pull; what has come is kept.
            pulling.cancel()
            await asyncio.wait({pulling})
            self._pulls -= 1

    async def _list_weights(self) -> list[WeightsFacts]:
        """Return the stored weights, with the services that serve them. Raises ControlError."""
        assignments = [
            assignment for decision in self._machine.decisions.values() for assignment in decision.assignments
        ]
        try:
            return await asyncio.to_thread(list_weights, self._machine.puller.store, assignments)
        except OSError as error:
            raise ControlError(HTTPStatus.INTERNAL_SERVER_ERROR, f"the store cannot be read: {error}") from error

    async def _delete_weights(self, digest: str) -> WeightsFacts:
        """Delete weights and return their facts. Raises ControlError, also while they are in use."""
        for facts in await self._list_weights():
            if facts.digest == digest:
                break
        else:
            raise ControlError(
                HTTPStatus.NOT_FOUND, f"no weights have the digest {digest[:64]}: see `pomona weights list`"
            )
        try:
            await asyncio.to_thread(delete_weights, self._machine.puller.store, facts)
        except WeightsInUseError as error:
            raise ControlError(HTTPStatus.CONFLICT, str(error)) from error
        except (OSError, ArtifactError) as error:
            raise ControlError(HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot delete {digest[:12]}: {error}") from error
        return facts


async def _read_request(call: AwaitedExchange, kind: type[T]) -> T:
    """Return the body of a call. Raises ControlError: it is too long, or something else."""
    try:
        return msgspec.json.decode(await read_body(call, _BODY_BYTES), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(HTTPStatus.BAD_REQUEST, f"no {kind.__name__}: {error}") from error


def _describe_end(pulling: asyncio.Task[str]) -> PullUpdate:
    """Return the last line of a pull that has ended."""
    error = pulling.exception()
    match error:
        case None:
            return PullUpdate(digest=pulling.result())
        case ArtifactError():
            return PullUpdate(problem=error.message)
        case SourceError() | ModelNameError() | OSError():
            return PullUpdate(problem=str(error))
        case _:
            raise error
