"""The readiness probe of a service: one generated token, requested with the service's bearer token from an endpoint.

A question is a generation of the service with its current replicas and endpoints; the prober repeats it until a token
is generated. A model may take long for that, so the prober has separate workers; a reconcile reads the last answer. A
service that does not answer soon is probed again by other workers, so that services that hang delay no other. Replicas
in pods are asked again every ten minutes, because the kubelet sees only that an engine's process lives; those on hosts
are watched by their proxy. What follows from a probe is decided in `probe_policy`.
"""

import asyncio
import base64
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec
import structlog

from controller.reconcile.plan import Leading
from controller.services.endpoints import Endpoint
from controller.services.probe_policy import (
    TOKEN_EDITED,
    TOKEN_NOT_FOUND,
    TOKEN_NOT_READ,
    Answer,
    Probe,
    ProbeTrouble,
    Question,
    judge_probe,
    seconds_to_repeat,
    update_trouble,
)
from controller.services.tokens import TOKEN_KEY, is_edited, is_token_secret, token_name
from kube.client import Client
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

log = structlog.get_logger()


@dataclass(slots=True)
class _ProbedService:
    """All that the prober keeps of a service, which it forgets as a whole."""

    question: Question
    answer: Answer | None = None
    answered_question: Question | None = None
    """The question of `answer`, which stays until the next one is answered."""
    answered_endpoints: frozenset[Endpoint] = frozenset()
    """Endpoints that have generated a token: if one of them is silent later, it may be busy."""
    trouble: ProbeTrouble | None = None

    @property
    def last_answer(self) -> Answer | None:
        """The answer to the question, or None if there is none yet."""
        return self.answer if self.answered_question == self.question else None

    @property
    def is_well(self) -> bool:
        """True if it answers and no endpoint is known to fail."""
        last = self.last_answer
        return last is not None and last.result.ok and self.trouble is None

    def take_answer(self, answer: Answer) -> None:
        """Keep the answer to the question."""
        self.answer, self.answered_question = answer, self.question


class Prober:
    """A prober of services that keeps the last answers.

    Args:
        trust: verifies certificates; None: the system's roots do.
        on_probe: is called with the reason of each result.
        on_stale_token: is called with a service whose Secret has not the token that replicas know.
    """

    def __init__(
        self,
        trust: ssl.SSLContext | None = None,
        on_probe: Callable[[str], None] = lambda _reason: None,
        on_stale_token: Callable[[ObjectKey], None] = lambda _service: None,
    ) -> None:
        """Begin with no service; each is probed by the quick workers first, and if it is silent by the patient ones."""
        self._trust = trust
        self._on_probe = on_probe
        self._on_stale_token = on_stale_token
        self._services: dict[ObjectKey, _ProbedService] = {}
        self._quick: WorkQueue[ObjectKey] = WorkQueue()
        """The services to probe with a short time-out."""
        self._patient: WorkQueue[ObjectKey] = WorkQueue()
        """Those that were silent for that time: they are probed with a long one."""

    def find_answer(self, key: ObjectKey, question: Question) -> ProbeResult | None:
        """Return the last answer to this question about a service, or None if there is none yet."""
        service = self._services.get(key)
        if service is None or service.answer is None or service.answered_question != question:
            return None
        return service.answer.result

    def forget(self, key: ObjectKey) -> None:
        """Probe a service no more."""
        self._services.pop(key, None)

    def ask(self, key: ObjectKey, question: Question, proof: ProbeResult | None = None) -> None:
        """Probe a service from now on, if the question is new: which replicas and endpoints are meant.

        `proof` is the answer to it that an earlier leader got: with it, the first probe is made only later.
        """
        service = self._services.get(key)
        if service is None:
            service = self._services[key] = _ProbedService(question)
        elif service.question == question:
            return

        # A new question: without an answer, the quick workers probe it at once.
        service.question, service.trouble = question, None
        if proof is None:
            self._quick.add(key)
        else:
            service.take_answer(Answer(proof))
            service.answered_endpoints = frozenset(question.endpoints)
            self._repeat_later(key, question)

    async def run(self, leading: Leading) -> None:
        """Probe services while this replica leads, by quick workers, and by patient ones if a service is silent."""
        # Enqueue what is known of an earlier run.
        for key, service in self._services.items():
            if service.is_well:  # it answers, and no endpoint is known to fail
                self._repeat_later(key, service.question)
            else:  # an earlier run may have been cancelled before the answer came
                self._quick.add(key)

        # Both kinds of workers share one session, without a limit of connections.
        connector = aiohttp.TCPConnector(ssl=self._trust or True, limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, trust_env=False) as session,
            asyncio.TaskGroup() as lanes,
        ):

            async def ask_quickly(key: ObjectKey) -> None:
                await self._ask(session, leading, key, QUICK_SECONDS)

            async def ask_patiently(key: ObjectKey) -> None:
                await self._ask(session, leading, key, TOKEN_SECONDS)

            # A probe reads the token and makes at most two rounds of requests: three time-outs.
            lanes.create_task(run_workers(self._quick, ask_quickly, QUICK_WORKERS, 3 * QUICK_SECONDS))
            lanes.create_task(run_workers(self._patient, ask_patiently, PATIENT_WORKERS, 3 * TOKEN_SECONDS))

    async def _ask(
        self, session: aiohttp.ClientSession, leading: Leading, key: ObjectKey, timeout_seconds: float
    ) -> None:
        """Probe a service once, note the answer, and enqueue the next probe unless none is needed.

        If the answer is another than before, the service is reconciled. A probe that takes longer than the short
        `timeout_seconds` of the quick workers says nothing: the patient workers, which wait longer, repeat it. No probe
        is needed of a service on hosts that answers: its proxies watch it.
        """
        service = self._services.get(key)
        if service is None or (service.is_well and not service.question.in_pods):
            return

        question = service.question
        failed_before = service.trouble.failed if service.trouble else None
        probe = await _probe(session, leading.client, key, question, timeout_seconds, failed_before=failed_before)
        self._on_probe(probe.result.reason)

        # While the probe ran, the service may have changed, or the time-out may have been too short for it.
        service = self._services.get(key)
        if service is None or service.question != question:
            return  # the service is gone, or another question is queued already
        if probe.result.reason == TIMED_OUT and timeout_seconds < TOKEN_SECONDS:
            self._patient.add(key)
            return

        # The Secret has another token than replicas know, or none: a reconcile is to look at it.
        if probe.result.reason in {TOKEN_EDITED, TOKEN_NOT_FOUND}:
            self._on_stale_token(key)
            leading.enqueue(INFERENCE_SERVICES, key)

        if _note_probe(key, service, probe):
            leading.enqueue(INFERENCE_SERVICES, key)

        # Enqueue the next probe: soon if there is trouble.
        if service.trouble is None:
            self._repeat_later(key, question)
        else:
            # A service that is silent may be so again, and goes to the patient workers.
            lane = self._patient if probe.result.reason == TIMED_OUT else self._quick
            lane.add_after(key, service.trouble.retry_seconds)

    def _repeat_later(self, key: ObjectKey, question: Question) -> None:
        """Enqueue the next probe of a service that answers, if it is in pods."""
        if question.in_pods:
            self._quick.add_after(key, seconds_to_repeat(question.service_uid, asyncio.get_running_loop().time()))


def _note_probe(key: ObjectKey, service: _ProbedService, probe: Probe) -> bool:
    """Note a probe of a service and the answer that follows from it; return whether the answer has changed.

    The trouble (since when probes fail) sets the time of the next probe; the answer is what the status shows, and lasts
    through failures until `judge_probe` finds them long enough.
    """
    result, last = probe.result, service.last_answer
    now = asyncio.get_running_loop().time()

    # 1. The trouble, by which the next probe comes soon.
    service.trouble = update_trouble(service.trouble, probe, now)
    # The endpoints that answered before and still exist.
    answered_before = service.answered_endpoints.intersection(service.question.endpoints)
    if result.ok and probe.endpoint is not None:
        service.answered_endpoints = answered_before | {probe.endpoint}

    # 2. The answer: the last one stays, if `judge_probe` returns None.
    failing_seconds = service.trouble.failing_seconds(result.reason, now) if service.trouble else 0.0
    judged = judge_probe(probe, last, failing_seconds, has_answered=bool(answered_before))
    if judged is None and not result.ok:
        log.info("probe_unanswered", service=str(key), reason=result.reason, message=result.message)

    if judged is None or judged == last:  # the last answer stays
        return False
    service.take_answer(judged)
    log.info("service_probed", service=str(key), **msgspec.structs.asdict(judged.result))
    return True


async def _probe(
    session: aiohttp.ClientSession,
    client: Client,
    key: ObjectKey,
    question: Question,
    timeout_seconds: float,
    *,
    failed_before: Endpoint | None,
) -> Probe:
    """Probe one endpoint of a service, and if it fails some others: the service answers if any of them does.

    `failed_before`, an endpoint that failed while another one answered, is probed first; None: a random one is. The
    result names an endpoint that fails beside one that answers. Without the token of the service, none is probed.
    """
    token = await read_token(client, key, question.service_uid)
    if isinstance(token, ProbeResult):
        return Probe(token)

    async def ask(endpoint: Endpoint) -> tuple[Endpoint, ProbeResult]:
        """Request one generated token from an endpoint, with the bearer token; return the result beside it."""
        probe = await generate_token(
            session,
            endpoint.url,
            model=key.name,
            token=token,
            timeout_seconds=timeout_seconds,
            mode=question.mode,
        )
        return endpoint, _explain_untrusted(probe, endpoint)

    # One broken endpoint does not decide for all: some others are probed when it fails.
    most = min(len(question.endpoints), MOST_ASKED)
    if (first := failed_before) is None:
        first, *others = random.sample(question.endpoints, most)
    else:
        # Always in the same order, so that the message stays the same while that endpoint fails.
        others = [endpoint for endpoint in question.endpoints if endpoint != first][: most - 1]

    _, first_result = await ask(first)
    if first_result.ok:
        return Probe(first_result, endpoint=first)

    # The first has failed. The service answers if one of the others does.
    for other, result in await asyncio.gather(*map(ask, others)):
        if result.ok:
            message = f"{result.message}; {first_result.message}"
            return Probe(msgspec.structs.replace(result, message=message), endpoint=other, failed=first)
    return Probe(first_result, endpoint=first)


async def read_token(client: Client, key: ObjectKey, service_uid: str) -> str | ProbeResult:
    """Return the token of a service, or why it is not known."""
    name = token_name(key.name)
    # Each `message` says why the Secret has no token that replicas know.
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


def _explain_untrusted(probe: ProbeResult, endpoint: Endpoint) -> ProbeResult:
    """Return a result; its message names the host and the way out if that host's certificate is not trusted."""
    if probe.reason != "Untrusted":
        return probe
    message = (
        f"the certificate of host {endpoint.host} is not trusted: {probe.message}; it must name {endpoint.address} as "
        "an IP address and come from a CA that the controller trusts: its --hosts-ca, or else the system's"
    )
    return msgspec.structs.replace(probe, message=message)
