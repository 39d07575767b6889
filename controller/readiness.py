"""Whether a service answers: one generated token, asked with the service's own token at an address of its endpoints.

Asked once for each question, which is a generation of the service with the replicas and endpoints that it then has.
Asking takes as long as a model takes, so it has workers of its own; a reconcile only reads the last answer.
"""

import base64
import random
from collections.abc import Iterable
from typing import Final, NamedTuple

import aiohttp
import structlog

from controller.plan import Key, Leading
from controller.pods import PORT_NAME, TOKEN_KEY, token_name
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, SECRETS
from runtimes.probe import Probe, generate_token

WORKERS: Final = 8
TOKEN_SECONDS: Final = 60.0
"""A large model on a slow processor takes long for its first token."""
FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0

log = structlog.get_logger()


class Endpoint(NamedTuple):
    """An address that a Service sends requests to."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://[{self.address}]:{self.port}" if ":" in self.address else f"http://{self.address}:{self.port}"


class Question(NamedTuple):
    """What is asked: another generation, replica or endpoint is another question."""

    generation: int
    replicas: tuple[str, ...]
    """Sorted uids of what serves."""
    endpoints: tuple[Endpoint, ...]
    """Sorted, never empty."""


def ready_endpoints(slices: Iterable[Obj]) -> tuple[Endpoint, ...]:
    """Return the addresses that the EndpointSlices of one Service offer, sorted."""
    found = set()
    for each in slices:
        ports = [port["port"] for port in each.get("ports") or [] if port.get("name") == PORT_NAME]
        for endpoint in each.get("endpoints") or []:
            # Not said means ready, as for every consumer of slices.
            if endpoint.get("conditions", {}).get("ready", True) is not False:
                found |= {Endpoint(address, port) for address in endpoint["addresses"] for port in ports}
    return tuple(sorted(found))


class Prober:
    """Asks services for a token, and remembers the answers."""

    def __init__(self) -> None:
        self._questions: dict[Key, Question] = {}
        self._answers: dict[Key, tuple[Question, Probe]] = {}
        self._failures: dict[Key, int] = {}
        self._queue: WorkQueue[Key] = WorkQueue()

    def answer(self, key: Key, question: Question | None) -> Probe | None:
        """Return the answer to this question of a service, or None when it is being asked; it is asked if it is new.

        No question forgets the service.
        """
        if question is None:
            for memory in (self._questions, self._answers, self._failures):
                memory.pop(key, None)
            return None
        if self._questions.get(key) != question:
            self._questions[key] = question
            self._failures.pop(key, None)
            self._queue.add(key)
        asked, answer = self._answers.get(key, (None, None))
        return answer if asked == question else None

    async def run(self, leading: Leading) -> None:
        """Ask for ever."""
        async with aiohttp.ClientSession(trust_env=False) as session:

            async def ask(key: Key) -> float | None:
                return await self._ask(session, leading, key)

            await run_workers(self._queue, ask, WORKERS, 2 * TOKEN_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, leading: Leading, key: Key) -> float | None:
        """Ask once; returns the seconds after which to ask again, or None when there is nothing more to ask."""
        question = self._questions.get(key)
        asked, last = self._answers.get(key, (None, None))
        if question is None or (asked == question and last is not None and last.ok):
            return None
        # Any of them, and another at each try: one that hangs must not speak for all.
        endpoint = random.choice(question.endpoints)  # noqa: S311 - nothing depends on its being secret
        probe = await _probe(session, leading.client, key, endpoint)
        if self._questions.get(key) != question:
            return None  # nobody wants to know any more, or the next question waits already
        self._answers[key] = question, probe
        if probe != last or asked != question:
            log.info("probed", service="/".join(key), ok=probe.ok, reason=probe.reason, endpoint=endpoint.url)
            leading.enqueue(INFERENCE_SERVICES, key)
        if probe.ok:
            return None
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return float(min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failures - 1, 16)))


async def _probe(session: aiohttp.ClientSession, client: Client, key: Key, endpoint: Endpoint) -> Probe:
    try:
        secret = await client.get(SECRETS, token_name(key.name), key.namespace)
        token = base64.b64decode(secret["data"][TOKEN_KEY]).decode()
    except (NotFound, KeyError):
        message = f"Secret {token_name(key.name)} has no key {TOKEN_KEY}: delete it, and it is made anew"
        return Probe(ok=False, reason="TokenNotFound", message=message)
    except (ApiError, Unreachable) as error:
        return Probe(ok=False, reason="TokenNotRead", message=str(error))
    return await generate_token(session, endpoint.url, model=key.name, token=token, timeout_seconds=TOKEN_SECONDS)
