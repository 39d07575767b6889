"""kopf as the source of events for our kinds.

kopf only reads watches and logs in again: it has `on.event` handlers only, so it writes nothing. This module works
around three of its habits. kopf never reports objects that vanished before one of its lists, so every start begins
with a list of ours that replaces the content of the store, and the store is swept after each list of kopf and from time
to time. kopf ends on a refused list or a broken watch, so it is started again with back-off. Its own exit hangs while a
watch waits for a login that no longer comes, and it takes the process's signals: so it runs in a separate thread and
event loop, all of whose tasks we cancel when the first one has ended, and passes its events to our loop.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import aiohttp
import structlog
import uvloop

from kube import watch
from kube.backoff import EXACT, backoff_seconds
from kube.client import Client, Obj
from kube.credentials import Credentials
from kube.errors import ApiError, Unreachable
from kube.kubeconfig import CredentialsError
from kube.resources import Resource
from kube.store import Store
from kube.watch import Selection


@contextlib.contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Hide a module from imports, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment] # documented: an import raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules[name]


# Where `kubernetes` is installed, kopf imports it for classes that we do not use: 18 MiB.
with _hide_module("kubernetes"):
    import kopf

STABLE_SECONDS = 60.0
"""After a run of this length, the back-off starts anew."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
RETRY_SECONDS = (0.5, 1.0, 2.0)
"""The last is the longest delay before a returned API server is noticed."""
STOP_SECONDS = 5.0
CANCEL_SECONDS = 0.1
"""Pause before what has not ended is cancelled again: a watch that waits for a login suppresses the cancellation."""
SWEEP_SECONDS = 600.0
SETTLING_SECONDS = 2.0
"""kopf reports a list object by object, one resource after the other: after this pause, one sweep covers all."""

log = structlog.get_logger()


async def follow(
    client: Client,
    store: Store,
    watched: Collection[Selection],
    credentials: Callable[[], Credentials],
    synced: asyncio.Event,
    *,
    namespace: str | None = None,
    on_restart: Callable[[], None] = lambda: None,
) -> None:
    """Keep the store equal to the server for ever, in one namespace or in all.

    All objects are listed into the store, and kopf, in a thread, then reports the changes. If it ends, that begins anew
    after a pause, which grows with each failure. Another task removes objects whose deletion nobody has reported.

    `synced` is set once the store is complete for the first time. `credentials` is called in the thread of kopf, and
    its result is used there alone. `on_restart` is called before each start of kopf but the first.
    """
    relisted = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_keep_swept(client, store, watched, relisted, namespace))
        failures = 1  # the number of the next one, if this run fails
        while True:
            started = time.monotonic()
            pause_seconds = backoff_seconds(
                failures, first=FIRST_PAUSE_SECONDS, most=LONGEST_PAUSE_SECONDS, jitter=EXACT
            )

            # List all objects, and follow them as long as kopf runs.
            try:
                await load(client, store, watched, namespace)
                synced.set()
                relisted.set()  # an object that vanishes between this list and kopf's is reported by neither
                await _run_kopf(store, watched, credentials, relisted, namespace)
            except (ApiError, Unreachable) as error:
                log.warning("list_failed", error=str(error), again_seconds=pause_seconds)
            except Exception:  # no error of kopf may end the process: kopf is started again
                log.exception("kopf_ended", again_seconds=pause_seconds)

            if time.monotonic() - started > STABLE_SECONDS:  # after a good run, the back-off starts anew
                failures, pause_seconds = 1, FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause_seconds)
            failures += 1
            on_restart()


async def load(client: Client, store: Store, watched: Iterable[Selection], namespace: str | None = None) -> None:
    """Make the store equal to the current state of the server, in one namespace or in all. Raises as `Client`."""
    for selection in watched:
        await watch.load(client, store, selection._replace(namespace=namespace))


async def _keep_swept(
    client: Client,
    store: Store,
    watched: Iterable[Selection],
    relisted: asyncio.Event,
    namespace: str | None = None,
) -> None:
    """Remove objects that vanished without an event: soon after kopf has `relisted`, and from time to time.

    A list does not name what was deleted before it, so each one may leave such objects in the store.
    """
    while True:
        # Wait for a list of kopf, but no longer than `SWEEP_SECONDS`.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_SECONDS):
                await relisted.wait()
        await asyncio.sleep(SETTLING_SECONDS)  # until the rest of the list has arrived
        relisted.clear()

        # Mend what has no event: above all, remove what is gone.
        try:
            await load(client, store, watched, namespace)
        except (ApiError, Unreachable) as error:
            log.warning("sweep_failed", error=str(error), again_seconds=SETTLING_SECONDS)
            relisted.set()  # sweep again soon


async def _run_kopf(
    store: Store,
    watched: Collection[Selection],
    credentials: Callable[[], Credentials],
    relisted: asyncio.Event,
    namespace: str | None,
) -> None:
    """Run kopf in a thread until it ends, or this task is cancelled, which stops kopf. Raises the error of kopf.

    kopf has a loop of its own there; its events are put into the store by our loop.
    """
    # kopf steps through its loop several times for each event: with asyncio's own loop that is most of its cost.
    our_loop, kopf_loop = asyncio.get_running_loop(), uvloop.new_event_loop()
    kopf_loop.set_exception_handler(_log_in_one_line)
    # stop: set in the loop of kopf to end it. outcome: the end of the thread, for our loop.
    stop, outcome = asyncio.Event(), Future[None]()

    def deliver(resource: Resource, event: kopf.RawEvent) -> None:
        """Pass one event from the thread of kopf to our loop, which puts it into the store."""
        our_loop.call_soon_threadsafe(_store_event, store, resource, event, relisted)

    def run() -> None:
        """Run kopf in this thread, on `kopf_loop`, and pass its end or error to `outcome`, which our loop awaits."""
        try:
            with asyncio.Runner(loop_factory=lambda: kopf_loop) as runner:
                runner.run(_operate(watched, credentials(), deliver, stop, namespace))
        except BaseException as error:  # noqa: BLE001 - the thread's end, whatever it is, is reported to its owner
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    # Wait for the end of the thread. If this task is cancelled, stop kopf, and wait for the thread a while.
    threading.Thread(target=run, name="kopf", daemon=True).start()
    ended = asyncio.wrap_future(outcome)
    ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs an unretrieved error
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        with contextlib.suppress(RuntimeError):  # kopf has ended meanwhile, and closed its loop
            kopf_loop.call_soon_threadsafe(stop.set)
        await asyncio.wait([ended], timeout=STOP_SECONDS)
        raise


def _log_in_one_line(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of a task of kopf without its traceback: `follow` logs the one that ends kopf, with it."""
    log.warning("kopf_task_failed", message=context["message"], error=repr(context.get("exception")))


def _store_event(store: Store, resource: Resource, event: kopf.RawEvent, relisted: asyncio.Event) -> None:
    """Put one event of kopf into the store; set `relisted` if it belongs to a list."""
    if event["type"] is None:  # an object of a list
        relisted.set()
    obj: Obj = dict(event["object"])
    if event["type"] == "DELETED":
        metadata = obj["metadata"]
        store.remove(
            resource,
            metadata.get("namespace"),
            metadata["name"],
            uid=metadata["uid"],
            resource_version=metadata["resourceVersion"],
        )
    else:
        store.put(resource, obj)


async def _operate(
    watched: Iterable[Selection],
    credentials: Credentials,
    deliver: Callable[[Resource, kopf.RawEvent], None],
    stop: asyncio.Event,
    namespace: str | None,
) -> None:
    """Run kopf until one of its tasks ends, or `stop` is set; then end all tasks, and raise the error of the first."""
    # kopf would log every event that it handles, and that it gets no signals in a thread, which is intended.
    logging.getLogger("kopf").setLevel(logging.ERROR)

    # 1. Start kopf, with a handler for each kind.
    registry, logins = kopf.OperatorRegistry(), _Logins(credentials, stop)
    kopf.on.login(registry=registry)(logins.log_in)
    for selection in watched:
        _subscribe(registry, selection.resource, deliver)
    tasks = await kopf.spawn_tasks(
        registry=registry,
        settings=_build_settings(watched),
        # Without it kopf asks for the name of its user, and ends if there is none. It is written nowhere.
        identity=cast("Any", "pomona-controller"),
        clusterwide=namespace is None,
        namespaces=[] if namespace is None else [namespace],
        standalone=True,
    )

    # 2. Wait until one of its tasks ends, or `stop` is set.
    stopped = asyncio.create_task(stop.wait())
    ended, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)

    # 3. End all of its tasks, however often one suppresses its cancellation.
    for session in logins.sessions:
        await session.close()  # before the watches end: it waits for the connections that are in use
    # All other tasks of this loop are those of kopf, and `stopped`.
    while running := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_SECONDS)

    # 4. Raise the error of the first one, if it has one.
    for task in ended:
        task.result()


def _subscribe(
    registry: kopf.OperatorRegistry, resource: Resource, deliver: Callable[[Resource, kopf.RawEvent], None]
) -> None:
    """Register a handler that passes each event of a kind to `deliver`."""

    @kopf.on.event(
        group=resource.group, version=resource.version, plural=resource.plural, id=str(resource), registry=registry
    )
    async def deliver_event(event: kopf.RawEvent, **_: Any) -> None:
        deliver(resource, event)


class _Logins:
    """The logins of one run of kopf; `stop` is set if the API server refuses the credentials."""

    def __init__(self, credentials: Credentials, stop: asyncio.Event) -> None:
        self._credentials = credentials
        self._stop = stop
        self._authorization: str | None = None
        """The value of the Authorization header that was sent last."""
        self.sessions: list[aiohttp.ClientSession] = []
        """All that kopf has got, to be closed at the end."""

    async def log_in(self, **_: Any) -> kopf.AiohttpSession:
        """Return another session, at first or because the API server has refused the last one.

        If there are no newer credentials, `stop` is set instead and this never returns: kopf is started again later.
        """
        # 1. The first time, or if there are newer credentials than those that were refused.
        credentials = self._credentials
        may_log_in = not self.sessions  # the first time, with the credentials as they are
        with contextlib.suppress(CredentialsError):  # our own lists report it
            may_log_in = may_log_in or await credentials.refresh(self._authorization)
        if not may_log_in:
            # kopf would send the same at once, again and again: it is started again after a pause instead. An error
            # would be reported by several of its tasks, each with a traceback; the credentials have said it already.
            self._stop.set()
            await asyncio.Event().wait()  # until this task is cancelled, as `stop` ends all

        # 2. A session that asks for the credentials with each request (`_authorize`).
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=credentials.tls or True, limit=0),
            middlewares=(self._authorize,),
            proxy=credentials.proxy,
            trust_env=False,
        )
        self.sessions.append(session)
        return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)

    async def _authorize(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request with the present credentials, which may change on disk while a session lives."""
        self._authorization = authorization = await self._credentials.authorization()
        if authorization:
            request.headers["Authorization"] = authorization
        request.server_hostname = self._credentials.tls_server_name
        return await send(request)


def _build_settings(watched: Iterable[Selection]) -> kopf.OperatorSettings:
    """Return settings that switch off what kopf need not do here, with the label selectors of what is watched."""
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # after such a time-out kopf ends our process with SIGKILL
    settings.posting.enabled = False
    settings.scanning.disabled = True  # all resources exist once our own list succeeded
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 2
    settings.networking.error_backoffs = RETRY_SECONDS
    settings.persistence.diffbase_storage = _NoDiffs()
    for selection in watched:
        resource, label_selector = selection.resource, selection.label_selector
        if label_selector:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = label_selector
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """An empty storage: copying each object for a comparison that is never made is most of the cost of an event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass
