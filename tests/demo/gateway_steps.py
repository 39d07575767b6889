"""The gateway, as a user sees it: one key for a pod and a host, and a host that dies in the middle of answers."""

import asyncio
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

import aiohttp

from crds.gatewaykey import KEY_ENTRY, key_secret_name
from kube.client import Client
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, SECRETS
from kube.store import Store
from standalone.ask import AskError, ChatAnswer, ChatMessage, continue_chat, open_session
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually

URL: Final = "http://pomona-gateway.pomona-system.svc"
KEY: Final = "demo"
SERVICE: Final = "everywhere"
QUESTION: Final = "Who are you?"
LONG_ANSWERS: Final = 8
"""Conversations that are so many are hardly ever all of one replica."""
LEAST_PIECES: Final = 20
"""So much of each long answer has come when the host is killed."""
QUESTIONS_AFTERWARDS: Final = 5
WaitUntil = Callable[[Callable[[], bool]], Awaitable[object]]
"""Waits until a condition on the store is true."""
PrintEvent = Callable[[str], None]


async def read_key(plane: ControlPlane, client: Client) -> str:
    """Return the key of the GatewayKey of the examples, once the gateway serves."""
    await plane.kubectl("wait", f"gatewaykey/{KEY}", "--for=condition=Ready", "--timeout=60s")
    rollout = ("rollout", "status", "deployment", "pomona-gateway", "--namespace=pomona-system", "--timeout=60s")
    await plane.kubectl(*rollout)
    secret = await client.get(SECRETS, key_secret_name(KEY), "default")
    return b64decode(secret["data"][KEY_ENTRY]).decode()


async def print_endpoint(environment: Mapping[str, str]) -> None:
    """Print what `pomona endpoint` says of the gateway."""
    words = ["endpoint", "--key", KEY]
    print(f"\n$ pomona {' '.join(words)}", flush=True)
    argv = [sys.executable, "-m", "cli.main", *words]
    process = await asyncio.create_subprocess_exec(*argv, cwd=CHECKOUT, env=environment)
    assert await process.wait() == 0
    print()


async def chat_by_gateway(key: str, name: str, place: str) -> ChatAnswer:
    """Ask a service through the gateway, once this knows an endpoint of it, and print the answer as it arrives."""
    print(f"\n{name}, {place}\n  > {QUESTION}\n  < ", end="")
    async with open_session(token=key) as session:
        await eventually(lambda: _is_listed(session, name))
        question = [ChatMessage("user", QUESTION)]
        answer = await continue_chat(session, URL, name, question, show=lambda text: print(text, end="", flush=True))
    print(f"\n  {answer.describe()}")
    return answer


async def _is_listed(session: aiohttp.ClientSession, name: str) -> bool:
    async with session.get(f"{URL}/v1/models/{name}") as response:
        return response.status == HTTPStatus.OK and (await response.json())["status"] == {"value": "loaded"}


async def show_lost_host(
    plane: ControlPlane, store: Store, key: str, host: MetalHost, *, wait_until: WaitUntil, print_event: PrintEvent
) -> None:
    """Apply a service with a replica in a pod and one on the host, kill the host within answers, and ask on."""
    apply = f"apply -f examples/gateway/{SERVICE}.yaml"
    print(f"\n$ kubectl {apply}")
    print((await plane.kubectl(*apply.replace("examples/", f"{CHECKOUT}/examples/").split())).strip())
    await wait_until(lambda: _is_ready(store))
    where = "{.status.choice.message}"
    print(f"$ kubectl get isvc {SERVICE} -o jsonpath='{where}'")
    print(await plane.kubectl("get", "isvc", SERVICE, f"--output=jsonpath={where}"))
    async with open_session(token=key) as session:
        await eventually(lambda: _is_listed(session, SERVICE))
        await _ask_while_host_is_killed(session, host, print_event)
    host.agent.start()
    await plane.kubectl("scale", "isvc", SERVICE, "--replicas=0")
    await wait_until(lambda: _read_phase(store) == "Suspended")


async def _ask_while_host_is_killed(session: aiohttp.ClientSession, host: MetalHost, print_event: PrintEvent) -> None:
    """Begin long answers, which both replicas share, kill the host, and print what becomes of them and of others."""
    answers = LongAnswers(session)
    await answers.wait_for_pieces(LEAST_PIECES)
    await host.host.kill_all()
    print_event(f"{LONG_ANSWERS} long answers of {SERVICE} have begun, and host {host.name} is killed")
    slowest = 0.0
    for number in range(QUESTIONS_AFTERWARDS):
        asked = time.monotonic()
        await _read_first_piece(session, f"Question {number}")
        slowest = max(slowest, time.monotonic() - asked)
    print_event(f"{QUESTIONS_AFTERWARDS} more questions were answered by the pod, the slowest after {slowest:.2f} s")
    await answers.wait_for_pieces(max(answers.pieces) + LEAST_PIECES)
    failures = answers.end()
    print_event(f"{LONG_ANSWERS - len(failures)} long answers go on, and {len(failures)} ended with an error event")
    for reason in sorted(set(failures)):
        print(f"  {reason}")


class LongAnswers:
    """Answers that are read at the same time, each of a conversation of its own."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._changed = asyncio.Event()
        self.pieces = [0] * LONG_ANSWERS
        """The pieces of each that have come."""
        self._reading = [asyncio.create_task(self._read(number)) for number in range(LONG_ANSWERS)]

    async def _read(self, number: int) -> str:
        """Read an answer to its end, and return why it failed; empty: it was whole."""

        def count(_text: str) -> None:
            self.pieces[number] += 1
            self._changed.set()

        question = [ChatMessage("user", f"Long question {number}")]
        try:
            await continue_chat(self._session, URL, SERVICE, question, show=count)
        except AskError as error:
            return str(error).rpartition("the answer failed: ")[2]
        finally:
            self._changed.set()
        return ""

    async def wait_for_pieces(self, least: int) -> None:
        """Wait until each answer has so many pieces, or has ended."""
        while any(
            pieces < least and not reading.done() for pieces, reading in zip(self.pieces, self._reading, strict=True)
        ):
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> list[str]:
        """Hang up on the answers that go on, and return why the others failed."""
        failures = [reading.result() for reading in self._reading if reading.done()]
        for reading in self._reading:
            reading.cancel()
        return [reason for reason in failures if reason]


async def _read_first_piece(session: aiohttp.ClientSession, question: str) -> None:
    """Ask, and hang up after the first piece of the answer, which is long."""
    first = asyncio.get_running_loop().create_future()

    def note(_text: str) -> None:
        if not first.done():
            first.set_result(None)

    messages = [ChatMessage("user", question)]
    asking = asyncio.create_task(continue_chat(session, URL, SERVICE, messages, show=note))
    await asyncio.wait({asking, first}, return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        await asking  # raises why there is no answer
    asking.cancel()


def _read_phase(store: Store) -> str:
    return str((store.get(INFERENCE_SERVICES, SERVICE, "default") or {}).get("status", {}).get("phase", ""))


def _is_ready(store: Store) -> bool:
    """Return whether both replicas serve: a slice of Kubernetes has the pod, and one of the agent the process."""
    ready = [
        endpoint_slice["metadata"]["name"]
        for endpoint_slice in store.list(ENDPOINT_SLICES, "default")
        if endpoint_slice["metadata"]["labels"].get("kubernetes.io/service-name") == SERVICE
        and any(endpoint["conditions"].get("ready") for endpoint in endpoint_slice["endpoints"] or [])
    ]
    return _read_phase(store) == "Ready" and len(ready) == 2
