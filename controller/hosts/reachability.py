"""The question whether the cluster reaches a host: the controller asks the agent, which answers with the host's name.

A host cannot see a firewall or a route that keeps the cluster away from it. The answer is reported in condition
Reachable and decides nothing: a service whose endpoints do not answer is not Ready anyway. Only an address that was
granted to the host is asked, and nothing that another program answers there is shown.
"""

import asyncio
import contextlib
import functools
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.reconcile.conditions import condition, find
from controller.reconcile.plan import Leading
from crds.meta import REACHABLE
from crds.metalhost import MetalHost
from kube.backoff import backoff_seconds
from kube.client import Obj
from kube.queue import WorkQueue, run_workers
from kube.resources import METAL_HOSTS, ObjectKey

ASK_SECONDS: Final = 5.0
"""Time-out of one question. A host that drops packets gives no other answer."""
AGAIN_SECONDS: Final = 600.0
"""Time until a host that answered is asked again."""
LEAST_PAUSE_SECONDS: Final = 10.0
"""Shortest time between two questions to one host, whatever place it states, and also if it is forgotten meanwhile."""
FIRST_RETRY_SECONDS: Final = 10.0
LAST_RETRY_SECONDS: Final = 120.0
WORKERS: Final = 128
"""A thousand hosts that do not answer are asked in 40 seconds, so they keep no other from its answer for longer."""
_ANSWER_BYTES: Final = 1024

log = structlog.get_logger()


class AgentPlace(NamedTuple):
    """The place at which an agent answers. After a restart of the host it is another question."""

    address: str
    port: int
    boot_id: str


class AskAgent(msgspec.Struct, frozen=True):
    """The effect of a decision about a host: its agent is asked there from now on; None: nowhere."""

    place: AgentPlace | None


class ReachabilityAnswer(NamedTuple):
    """The outcome of one question; `reason` and `message` are those of the condition."""

    reached: bool
    reason: str
    message: str


class _AskedHost(NamedTuple):
    """A host that is asked."""

    place: AgentPlace
    answer: ReachabilityAnswer | None
    failures: int
    """Questions in a row that it has not answered."""


class ReachabilityProber:
    """The questions to all hosts and their last answers."""

    def __init__(self) -> None:
        self._hosts: dict[str, _AskedHost] = {}
        """By host: the place that is asked, with the last answer."""
        self._asked_at: dict[str, float] = {}
        """When each host was last asked, on the clock of the event loop, in seconds."""
        self._queue: WorkQueue[str] = WorkQueue()

    def find_answer(self, host: str, place: AgentPlace) -> ReachabilityAnswer | None:
        """Return the last answer from this place, or None if there is none yet."""
        record = self._hosts.get(host)
        return record.answer if record is not None and record.place == place else None

    def perform(self, key: ObjectKey, effect: AskAgent) -> None:
        """Ask the agent at the place of `effect` from now on; without a place, stop asking."""
        host, place = key.name, effect.place
        record = self._hosts.get(host)
        if place is None:
            self._hosts.pop(host, None)
        elif record is None or record.place != place:
            self._hosts[host] = _AskedHost(place, answer=None, failures=0)
            # Not before the pause between two questions is over, or a stolen host could have the controller probe one
            # place after the other.
            self._queue.add_after(host, self._wait_seconds(host))

    async def run(self, leading: Leading) -> None:
        """Ask for ever, while this replica leads."""
        self._hosts = {}
        await run_workers(self._queue, functools.partial(self._ask, leading), WORKERS, 2 * ASK_SECONDS)

    def _wait_seconds(self, host: str) -> float:
        """Return the seconds until a host may be asked again."""
        last = self._asked_at.get(host)
        return 0.0 if last is None else max(0.0, last + LEAST_PAUSE_SECONDS - asyncio.get_running_loop().time())

    async def _ask(self, leading: Leading, host: str) -> float | None:
        """Ask one host and keep the answer; enqueue the host if the answer has changed.

        Returns the seconds until it is asked again; None: it is not to be asked, or is queued already.
        """
        # 1. Not too soon after the last question, and not if the host was forgotten.
        if wait := self._wait_seconds(host):
            return wait
        record = self._hosts.get(host)
        if record is None:
            self._asked_at.pop(host, None)
            return None

        # 2. Ask. Meanwhile the host may have been forgotten, or have another place, whose question is queued already.
        self._asked_at[host] = asyncio.get_running_loop().time()
        answer = await ask_agent(host, record.place)
        if self._hosts.get(host) != record:
            return None

        # 3. Keep the answer; a new one is reported in the status of the host.
        failures = 0 if answer.reached else record.failures + 1
        self._hosts[host] = _AskedHost(record.place, answer, failures)
        if answer != record.answer:
            log.info("host_asked", host=host, reached=answer.reached, reason=answer.reason)
            leading.enqueue(METAL_HOSTS, ObjectKey("", host))

        # 4. Ask again after a back-off; or, if it has answered, after a pause with jitter: hosts that a new leader has
        # asked at one time would else be asked again at one time.
        if failures:
            return backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS)
        return backoff_seconds(1, first=AGAIN_SECONDS, most=AGAIN_SECONDS)


async def ask_agent(host: str, place: AgentPlace) -> ReachabilityAnswer:
    """Ask once whether the agent of `host` answers at `place`."""
    where = f"{place.address} port {place.port}"
    try:
        async with asyncio.timeout(ASK_SECONDS):
            answered_name = await _read_answer(place)  # an agent answers with the name of its host
    except TimeoutError:
        message = (
            f"no answer from {where}: a firewall may drop the packets, or the cluster has no route to this address; "
            "allow the port range of the agent, or start the agent with another --address"
        )
        return ReachabilityAnswer(reached=False, reason="NoAnswer", message=message)
    except OSError as error:
        message = (
            f"{where}: {error.strerror or type(error).__name__}: the address must lead from the cluster to this host; "
            "start the agent with another --address"
        )
        return ReachabilityAnswer(reached=False, reason="NotConnected", message=message)

    if answered_name != host:
        message = (
            f"another program than the agent of this host answers at {where}: give each host an address of its own"
        )
        return ReachabilityAnswer(reached=False, reason="AnotherAnswer", message=message)
    return ReachabilityAnswer(reached=True, reason="AgentAnswered", message=f"the agent answers at {where}")


async def _read_answer(place: AgentPlace) -> str:
    """Return the body of the agent's response, or "" if it is no HTTP response. Raises OSError."""
    reader, writer = await asyncio.open_connection(place.address, place.port, limit=_ANSWER_BYTES)
    try:
        authority = f"[{place.address}]" if ":" in place.address else place.address
        writer.write(f"GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n".encode())
        response = b""
        while len(response) < _ANSWER_BYTES and (more := await reader.read(_ANSWER_BYTES - len(response))):
            response += more
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = response.partition(b"\r\n\r\n")
    return body.decode("ascii", errors="replace").strip() if head.startswith(b"HTTP/1.1 200 ") else ""


def find_agent_place(host: MetalHost) -> AgentPlace | None:
    """Return the place at which the agent of a host answers; None: it has none."""
    status = host.status
    return AgentPlace(status.address, status.reachability_port, status.boot_id) if status.reachability_port else None


def build_reachable_condition(host: MetalHost, answer: ReachabilityAnswer | None) -> Obj:
    """Return the condition Reachable, which says whether the agent of a host has answered the controller.

    Its status is Unknown while the agent was never asked, or has no port to answer at. Without an `answer`, what an
    earlier leader has found stays.
    """
    # True None: the status is Unknown.
    true, reason, message = None, "NotAsked", "the controller asks the agent once the address is accepted"
    if host.status.reachability_port is None:
        message = "the agent does not listen: its --port-range has no spare port"
    elif answer is not None:
        true, reason, message = answer.reached, answer.reason, answer.message
    elif last := find(host.status.conditions, REACHABLE):
        true, reason, message = {"True": True, "False": False}.get(last.status), last.reason, last.message
    return condition(REACHABLE, true=true, reason=reason, message=message, generation=host.metadata.generation)
