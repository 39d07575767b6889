"""Wait until a service serves, and print what it waits for."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cli.api_objects import Obj
from cli.cluster_access import watch_object
from cli.cluster_options import ClusterOptions
from cli.lazy import program_name
from cli.output import wrap_text
from cli.service.verdict import DONE, Verdict, judge_service
from kube.resources import INFERENCE_SERVICES

if TYPE_CHECKING:
    from kube.client import Client

PROGRESS_SECONDS: Final = 10.0
"""Interval between two lines with the same reason: progress of a download changes each second."""
UNSEEN_SECONDS: Final = 15.0
"""Time after which a service that no controller has seen is worth a hint."""


class ProgressPrinter:
    """Printer of each change of a service, in lines that fit the terminal.

    Args:
        prefix: what begins each line, if several services are deployed.
        show: prints a line.
        width: columns of the terminal.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, prefix: str, show: Callable[[str], None], width: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Print lines by `show`, each after `prefix`, in `width` columns."""
        self._prefix = prefix
        self._show = show
        self._width = width
        self._clock = clock
        self._started = clock()
        # The phase and reason of the last line, its text, and when a line with the same state may follow.
        self._printed_state = ("", "")
        self._printed_text = ""
        self._next_progress_at = 0.0

    def print_verdict(self, phase: str, verdict: Verdict) -> None:
        """Print what has changed since the last line; a new message with the same reason only every ten seconds."""
        now, state = self._clock(), (phase, verdict.reason)
        text = f"{phase}: {verdict.message}" if verdict.message else phase
        # _printed_state: phase and reason of the last line
        is_too_early = state == self._printed_state and now < self._next_progress_at
        if text == self._printed_text or is_too_early:
            return
        self._printed_state, self._printed_text = state, text
        # From then on, another message with the same state is printed.
        self._next_progress_at = now + PROGRESS_SECONDS
        self.print_line(text)

    def print_line(self, text: str) -> None:
        """Print a line with the time since the start."""
        head = f"[{self._clock() - self._started:5.1f} s] "
        for line in wrap_text(self._prefix + text, self._width, " " * len(head), first=head):
            self._show(line)


async def wait_until_serving(
    client: "Client", service: Obj, target: ClusterOptions, printer: ProgressPrinter
) -> Verdict:
    """Return the verdict once the service serves the generation that was applied, or cannot.

    Args:
        client: the API server.
        service: the service, as the API server returned it.
        target: the cluster that the user means, with the namespace of the service if it is another.
        printer: prints the progress.

    Raises:
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    metadata = service["metadata"]  # its generation is the one that was applied
    # The hint is printed after UNSEEN_SECONDS, unless the controller has seen the service by then.
    hint = asyncio.get_running_loop().call_later(
        UNSEEN_SECONDS, printer.print_line, "no controller has seen it so far: does it run?"
    )
    try:
        states = watch_object(client, INFERENCE_SERVICES, metadata["name"], metadata["namespace"])
        async with contextlib.aclosing(states):
            async for current in states:
                if current is None:
                    message = f"InferenceService {metadata['name']} was deleted"
                    return Verdict("cannot serve", message, reason="Deleted", next_step="deploy it again")
                verdict = judge_service(current, program_name(), target)
                if verdict.state == "not seen" or current["metadata"]["generation"] < metadata["generation"]:
                    continue  # the status is not of the generation that was applied

                hint.cancel()
                printer.print_verdict(current["status"].get("phase", ""), verdict)
                # DONE: it serves, or is suspended.
                if verdict.state in DONE or verdict.state == "cannot serve":
                    return verdict
    finally:
        hint.cancel()
    raise AssertionError("a watch has no end")
