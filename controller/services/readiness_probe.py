"""The readiness probe of a service: one generated token, requested with the service's bearer token from an endpoint.

A question is a generation of the service with its current replicas and endpoints; the prober repeats it until a token
is generated. A model may take long for that, so the prober has separate workers; a reconcile reads the last answer. A
service that does not answer soon is probed again by other workers, so that services that hang delay no other. Replicas
in pods are asked again every ten minutes, because the kubelet sees only that an engine's process lives; those on hosts
are watched by their proxy.
"""

import asyncio
import base64
import hashlib
import random
import ssl
import zlib
from collections.abc import Callable, Iterable
from typing import Final, Literal, NamedTuple

import aiohttp
import msgspec
import structlog

from controller.reconcile.plan import Leading
from controller.services.deployment import PORT_NAME
from controller.services.tokens import TOKEN_KEY, is_edited, is_token_secret, token_name
from crds.meta import HTTPS, split_slice_name
from crds.serving import Mode
from kube.backoff import EXACT, backoff_seconds
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.queue import WorkQueue, run_workers
from kube.resources import INFERENCE_SERVICES, SECRETS, ObjectKey
from runtimes.probe import TIMED_OUT, ProbeResult, generate_token

QUICK_WORKERS: Final = 64
QUICK_SECONDS: Final = 10.0
"""Time-out of a first probe; a service that exceeds it is probed by the patient workers."""
PATIENT_WORKERS: Final = 128
TOKEN_SECONDS: Final = 60.0
"""A large model on a slow processor takes long for its first token."""
MOST_ASKED: Final = 4
"""Most endpoints of one service that are probed in one try."""
FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0
REPEAT_SECONDS: Final = 600.0
"""Pause between two questions to a service in pods that answers: at 1,000 services, 1.7 tokens a second."""
DOUBT_SECONDS: Final = 10.0
"""Time for which a service that has answered must fail until it is not ready: a new token takes seconds to arrive."""
SILENT_SECONDS: Final = 300.0
"""Time for which a service that has answered must be silent before its message says so: it may be busy."""
TOKEN_EDITED: Final = "TokenEdited"  # noqa: S105 - a reason
TOKEN_NOT_FOUND: Final = "TokenNotFound"  # noqa: S105 - a reason
TOKEN_NOT_READ: Final = "TokenNotRead"  # noqa: S105 - a reason
UNKNOWN: Final = frozenset({TIMED_OUT, TOKEN_EDITED, TOKEN_NOT_READ})
"""Reasons of probes that prove nothing about a service that has answered before."""

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

    @property
    def in_pods(self) -> bool:
        """True if a pod is among the endpoints."""
        return any(not each.host for each in self.endpoints)

    @property
    def digest(self) -> str:
        """A digest by which a later leader recognises the question."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


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


def replica_addresses(pods: Iterable[Obj], hosts: Iterable[Obj]) -> set[str]:
    """Return the addresses of these pods and MetalHosts of a service; to no other one its token is sent."""
    addresses = {address["ip"] for pod in pods for address in pod.get("status", {}).get("podIPs") or []}
    return addresses | {each.get("status", {}).get("address", "") for each in hosts}


def judge_probe(
    result: ProbeResult, last: ProbeResult | None, failing_seconds: float, *, has_answered: bool
) -> ProbeResult | None:
    """Return the answer that follows from a probe, or None if it is the last one still.

    Args:
        result: the result of the probe.
        last: the last answer to the same question.
        failing_seconds: time since the first failure of this sort (an error, or nothing proved) after the last answer.
        has_answered: an endpoint of the service has generated a token.
    """
    if result.ok and last is not None and last.ok and "; " not in last.message + result.message:
        return None  # another endpoint answered than before: that is no news
    if result.ok or not has_answered:
        return result
    if result.reason not in UNKNOWN:
        return result if failing_seconds >= DOUBT_SECONDS else None
    is_news = result.reason == TIMED_OUT and last is not None and last.ok and "; " not in last.message
    if last is None or not is_news or failing_seconds < SILENT_SECONDS:
        return None
    return msgspec.structs.replace(
        last, message=f"{last.message}; {result.message}: it is busy, or it hangs and must be restarted"
    )


def seconds_to_repeat(service_uid: str, now: float) -> float:
    """Return the seconds from `now` to the moment of each `REPEAT_SECONDS` that is the service's."""
    share = zlib.crc32(service_uid.encode()) / 2**32
    return (share * REPEAT_SECONDS - now) % REPEAT_SECONDS


class Probe(NamedTuple):
    """One probe of a service: its result, the endpoint that the result is of, and one that failed beside it."""

    result: ProbeResult
    endpoint: Endpoint | None = None
    failed: Endpoint | None = None


class Prober:
    """A prober of services that keeps the last answers. `trust` verifies certificates; None: the system's roots.

    `on_probe` is called with the reason of each result.
    """

    def __init__(
        self, trust: ssl.SSLContext | None = None, on_probe: Callable[[str], None] = lambda _reason: None
    ) -> None:
        self._trust = trust
        self._on_probe = on_probe
        self._questions: dict[ObjectKey, Question] = {}
        self._answers: dict[ObjectKey, tuple[Question, ProbeResult]] = {}
        self._failures: dict[ObjectKey, int] = {}
        self._answered: dict[ObjectKey, frozenset[Endpoint]] = {}
        """Endpoints that have generated a token: if one of them is silent later, it may be busy."""
        self._failing_since: dict[ObjectKey, float] = {}
        """When the first error came since the last answer, by the loop's clock."""
        self._unknown_since: dict[ObjectKey, float] = {}
        """When the first probe since the last answer proved nothing."""
        self._stale_tokens: set[ObjectKey] = set()
        """Services whose Secret has not the token that replicas know."""
        self._failed: dict[ObjectKey, Endpoint] = {}
        """An endpoint that failed while another one answered: it is probed until it answers, too."""
        self._quick: WorkQueue[ObjectKey] = WorkQueue()
        self._patient: WorkQueue[ObjectKey] = WorkQueue()

    def answer(self, key: ObjectKey, question: Question | None, proof: ProbeResult | None = None) -> ProbeResult | None:
        """Return the answer to this question about a service, or None if there is none yet; enqueue a new question.

        If `question` is None, the service is forgotten. `proof` is the answer that an earlier leader got.
        """
        if question is None:
            for memory in (self._questions, self._answers, self._answered):
                memory.pop(key, None)
            self._stale_tokens.discard(key)
            self._forget_failures(key)
            return None
        if self._questions.get(key) != question:
            self._questions[key] = question
            self._forget_failures(key)
            if proof is None:
                self._quick.add(key)
            else:
                self._answers[key] = question, proof
                self._answered[key] = frozenset(question.endpoints)
                self._repeat_later(key, question)
        return self._last_answer(key, question)

    def take_stale_token(self, key: ObjectKey) -> bool:
        """Return whether a probe since the last call found that the Secret of a service has to be read again."""
        is_stale = key in self._stale_tokens
        self._stale_tokens.discard(key)
        return is_stale

    async def run(self, leading: Leading) -> None:
        """Probe for ever."""
        for key, question in self._questions.items():
            answer = self._last_answer(key, question)
            if answer is not None and answer.ok and key not in self._failures:
                self._repeat_later(key, question)
            else:  # an earlier run may have been cancelled before the answer came
                self._quick.add(key)
        connector = aiohttp.TCPConnector(ssl=self._trust or True, limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, trust_env=False) as session,
            asyncio.TaskGroup() as lanes,
        ):

            async def ask_quickly(key: ObjectKey) -> None:
                await self._ask(session, leading, key, QUICK_SECONDS)

            async def ask_patiently(key: ObjectKey) -> None:
                await self._ask(session, leading, key, TOKEN_SECONDS)

            lanes.create_task(run_workers(self._quick, ask_quickly, QUICK_WORKERS, 3 * QUICK_SECONDS))
            lanes.create_task(run_workers(self._patient, ask_patiently, PATIENT_WORKERS, 3 * TOKEN_SECONDS))

    async def _ask(
        self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey, timeout_seconds: float
    ) -> None:
        """Probe once; enqueue the next probe unless none is needed."""
        question = self._questions.get(key)
        if question is None:
            return
        last = self._last_answer(key, question)
        if last is not None and last.ok and key not in self._failures and not question.in_pods:
            return
        result, endpoint, failed = await _probe(
            session, leading.client, key, question, timeout_seconds, first=self._failed.get(key)
        )
        self._on_probe(result.reason)
        if self._questions.get(key) != question:
            return  # the service is gone, or another question is queued already
        last = self._last_answer(key, question)  # the other workers may have got one meanwhile
        if result.reason == TIMED_OUT and timeout_seconds < TOKEN_SECONDS:
            self._patient.add(key)
            return
        if result.reason in {TOKEN_EDITED, TOKEN_NOT_FOUND}:
            self._stale_tokens.add(key)
            leading.enqueue(INFERENCE_SERVICES, key)
        answered = self._answered.get(key, frozenset()).intersection(question.endpoints)
        if result.ok and endpoint is not None:
            self._answered[key] = answered | {endpoint}
        judged = judge_probe(result, last, self._failing_seconds(key, result), has_answered=bool(answered))
        if judged is None and not result.ok:
            log.info("probe_unanswered", service=str(key), reason=result.reason, message=result.message)
        elif judged is not None and judged != last:
            self._answers[key] = question, judged
            log.info("service_probed", service=str(key), ok=judged.ok, reason=judged.reason, message=judged.message)
            leading.enqueue(INFERENCE_SERVICES, key)
        self._probe_again(key, question, failed if result.ok else None, result)

    def _failing_seconds(self, key: ObjectKey, result: ProbeResult) -> float:
        """Return the time since the first failure of this sort after the last answer; 0 for an answer."""
        if result.ok:
            self._failing_since.pop(key, None)
            self._unknown_since.pop(key, None)
            return 0.0
        now = asyncio.get_running_loop().time()
        since = self._unknown_since if result.reason in UNKNOWN else self._failing_since
        return now - since.setdefault(key, now)

    def _probe_again(self, key: ObjectKey, question: Question, failed: Endpoint | None, result: ProbeResult) -> None:
        """Enqueue the next probe: soon, unless the service answers and no endpoint of it is known to fail."""
        if result.ok and failed is None:
            self._forget_failures(key)
            self._repeat_later(key, question)
            return
        self._failed.pop(key, None)
        if failed is not None:
            self._failed[key] = failed
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = backoff_seconds(failures, first=FIRST_RETRY_SECONDS, most=LAST_RETRY_SECONDS, jitter=EXACT)
        (self._patient if result.reason == TIMED_OUT else self._quick).add_after(key, pause)

    def _repeat_later(self, key: ObjectKey, question: Question) -> None:
        """Enqueue the next probe of a service that answers, if it is in pods."""
        if question.in_pods:
            self._quick.add_after(key, seconds_to_repeat(question.service_uid, asyncio.get_running_loop().time()))

    def _forget_failures(self, key: ObjectKey) -> None:
        for memory in (self._failures, self._failed, self._failing_since, self._unknown_since):
            memory.pop(key, None)

    def _last_answer(self, key: ObjectKey, question: Question) -> ProbeResult | None:
        asked, answer = self._answers.get(key, (None, None))
        return answer if asked == question else None


async def _probe(
    session: aiohttp.ClientSession,
    client: Client,
    key: ObjectKey,
    question: Question,
    timeout_seconds: float,
    *,
    first: Endpoint | None,
) -> Probe:
    """Probe the endpoints of a question, first one that failed before."""
    token = await _read_token(client, key, question.service_uid)
    if isinstance(token, ProbeResult):
        return Probe(token)

    async def ask(endpoint: Endpoint) -> tuple[Endpoint, ProbeResult]:
        probe = await generate_token(
            session,
            endpoint.url,
            model=key.name,
            token=token,
            timeout_seconds=timeout_seconds,
            mode=question.mode,
        )
        return endpoint, _explained(probe, endpoint)

    # One broken endpoint does not decide for all: the others are probed when it fails.
    count = min(len(question.endpoints), MOST_ASKED)
    if first is None:
        first, *others = random.sample(question.endpoints, count)
    else:
        # Always in the same order, so that the message stays the same while that endpoint fails.
        others = [each for each in question.endpoints if each != first][: count - 1]
    endpoint, failed = await ask(first)
    if failed.ok:
        return Probe(failed, endpoint)
    for other, answer in await asyncio.gather(*map(ask, others)):
        if answer.ok:
            message = f"{answer.message}; {failed.message}"
            return Probe(msgspec.structs.replace(answer, message=message), other, endpoint)
    return Probe(failed, endpoint)


async def _read_token(client: Client, key: ObjectKey, service_uid: str) -> str | ProbeResult:
    """Return the token of a service, or why it is not known."""
    name = token_name(key.name)
    try:
        secret = await client.get(SECRETS, name, key.namespace)
        if is_token_secret(secret, service_uid):
            if is_edited(secret, service_uid):
                message = f"Secret {name} was edited: waiting until all replicas know the new token"
                return ProbeResult(ok=False, reason=TOKEN_EDITED, message=message)
            return base64.b64decode(secret["data"][TOKEN_KEY]).decode().strip()
        message = f"Secret {name} belongs to another owner: delete it, so that the controller can create it"
    except NotFound:
        message = f"Secret {name} does not exist: waiting for the controller to create it"
    except (KeyError, UnicodeDecodeError):
        message = f"Secret {name} has no text under key {TOKEN_KEY}: waiting for the controller to make a new token"
    except (ApiError, Unreachable) as error:
        return ProbeResult(ok=False, reason=TOKEN_NOT_READ, message=str(error))
    return ProbeResult(ok=False, reason=TOKEN_NOT_FOUND, message=message)


def _explained(probe: ProbeResult, endpoint: Endpoint) -> ProbeResult:
    """Name the host whose certificate is not trusted, and the way out."""
    if probe.reason != "Untrusted":
        return probe
    message = (
        f"the certificate of host {endpoint.host} is not trusted: {probe.message}; it must name {endpoint.address} as "
        "an IP address and come from a CA that the controller trusts: its --hosts-ca, or else the system's"
    )
    return msgspec.structs.replace(probe, message=message)
