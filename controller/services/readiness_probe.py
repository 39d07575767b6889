"""The readiness probe of a service: one generated token, requested with the service's bearer token from an endpoint.

A question is a generation of the service with its current replicas and endpoints; the prober repeats it until a token
is generated. A model may take long for that, so the prober has separate workers; a reconcile reads the last answer.
"""

import asyncio
import base64
import random
import ssl
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import aiohttp
import msgspec
import structlog

from controller.reconcile.plan import Leading
from controller.services.deployment import PORT_NAME
from controller.services.tokens import TOKEN_KEY, is_token_secret, token_name
from crds.meta import HTTPS, split_slice_name
from crds.serving import Mode
from kube.backoff import EXACT, backoff_seconds
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey
from runtimes.probe import ProbeResult, generate_token

WORKERS: Final = 8
TOKEN_SECONDS: Final = 60.0
"""A large model on a slow processor takes long for its first token."""
MOST_ASKED: Final = 8
"""Most endpoints of one service that are probed in one try."""
FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0

log = structlog.get_logger()


class Endpoint(NamedTuple):
    """An address that a Service sends requests to."""

    address: str
    port: int
    scheme: Literal["http", "https"] = "http"
    host: str = ""
    """Its MetalHost; empty for a pod."""

    @property
    def url(self) -> str:
        """Its base URL."""
        place = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{place}:{self.port}"


class Question(NamedTuple):
    """The subject of a probe: another service, generation, replica or endpoint makes another question."""

    service_uid: str
    generation: int
    replicas: tuple[str, ...]
    """Sorted uids of the ready replicas."""
    endpoints: tuple[Endpoint, ...]
    """Sorted, never empty."""
    mode: Mode = "chat"


def ready_endpoints(slices: Iterable[Obj]) -> tuple[Endpoint, ...]:
    """Return the addresses that the EndpointSlices of one Service offer, sorted."""
    found = set()
    for each in slices:
        ports = [port for port in each.get("ports") or [] if port.get("name") == PORT_NAME]
        _service, host = split_slice_name(each["metadata"]["name"])
        for endpoint in each.get("endpoints") or []:
            # An absent `ready` means ready, as for every consumer of slices.
            if endpoint.get("conditions", {}).get("ready", True) is not False:
                found |= {
                    Endpoint(address, port["port"], "https" if port.get("appProtocol") == HTTPS else "http", host)
                    for address in endpoint["addresses"]
                    for port in ports
                }
    return tuple(sorted(found))


class Prober:
    """A prober of services that keeps the last answers. `trust` verifies certificates; None: the system's roots."""

    def __init__(self, trust: ssl.SSLContext | None = None) -> None:
        self._trust = trust
        self._questions: dict[ObjectKey, Question] = {}
        self._answers: dict[ObjectKey, tuple[Question, ProbeResult]] = {}
        self._failures: dict[ObjectKey, int] = {}
        self._queue: WorkQueue[ObjectKey] = WorkQueue()

    def answer(self, key: ObjectKey, question: Question | None) -> ProbeResult | None:
        """Return the answer to this question about a service, or None if there is none yet; enqueue a new question.

        If `question` is None, the service is forgotten.
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
        """Probe for ever."""
        for key in self._questions:  # an earlier run may have been cancelled before their answers came
            self._queue.add(key)
        connector = aiohttp.TCPConnector(ssl=self._trust or True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:

            async def ask(key: ObjectKey) -> float | None:
                return await self._ask(session, leading, key)

            await run_workers(self._queue, ask, WORKERS, 3 * TOKEN_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey) -> float | None:
        """Probe once; returns the seconds until the next probe, or None when no other is needed."""
        question = self._questions.get(key)
        asked, last = self._answers.get(key, (None, None))
        if question is None or (asked == question and last is not None and last.ok):
            return None
        probe = await _probe(session, leading.client, key, question)
        if self._questions.get(key) != question:
            return None  # the service is gone, or another question is queued already
        self._answers[key] = question, probe
        if probe != last or asked != question:
            log.info("service_probed", service=str(key), ok=probe.ok, reason=probe.reason, message=probe.message)
            leading.enqueue(INFERENCE_SERVICES, key)
        if probe.ok:
            return None
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS, jitter=EXACT)


async def _probe(session: aiohttp.ClientSession, client: Client, key: ObjectKey, question: Question) -> ProbeResult:
    name = token_name(key.name)
    try:
        secret = await client.get(SECRETS, name, key.namespace)
        if not is_token_secret(secret, question.service_uid):
            message = f"Secret {name} belongs to another owner: delete it, so that the controller can create it"
            return ProbeResult(ok=False, reason="TokenNotFound", message=message)
        token = base64.b64decode(secret["data"][TOKEN_KEY]).decode().strip()
    except NotFound:
        message = f"Secret {name} does not exist: waiting for the controller to create it"
        return ProbeResult(ok=False, reason="TokenNotFound", message=message)
    except (KeyError, UnicodeDecodeError):
        message = f"Secret {name} has no text under key {TOKEN_KEY}: set it to the token that the replicas started with"
        return ProbeResult(ok=False, reason="TokenNotFound", message=message)
    except (ApiError, Unreachable) as error:
        return ProbeResult(ok=False, reason="TokenNotRead", message=str(error))

    async def ask(endpoint: Endpoint) -> ProbeResult:
        probe = await generate_token(
            session,
            endpoint.url,
            model=key.name,
            token=token,
            timeout_seconds=TOKEN_SECONDS,
            mode=question.mode,
        )
        return _explained(probe, endpoint)

    # One broken endpoint does not decide for all: the others are probed when it fails.
    first, *others = random.sample(question.endpoints, min(len(question.endpoints), MOST_ASKED))
    failed = await ask(first)
    if failed.ok:
        return failed
    for answer in await asyncio.gather(*map(ask, others)):
        if answer.ok:
            return msgspec.structs.replace(answer, message=f"{answer.message}; {failed.message}")
    return failed


def _explained(probe: ProbeResult, endpoint: Endpoint) -> ProbeResult:
    """Name the host whose certificate is not trusted, and the way out."""
    if probe.reason != "Untrusted":
        return probe
    message = (
        f"the certificate of host {endpoint.host} is not trusted: {probe.message}; it must name {endpoint.address} as "
        "an IP address and come from a CA that the controller trusts: its --hosts-ca, or else the system's"
    )
    return msgspec.structs.replace(probe, message=message)
