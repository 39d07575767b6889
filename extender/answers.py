"""The answers to the scheduler's requests; what is not known, and what fails here, rejects no node."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import structlog

from extender.extender_metrics import ExtenderMetrics, Outcome, Verb
from extender.score import ScoreWeights, neutral_score
from extender.speed_table import ScoreBoard
from extender.wire import (
    ExtenderArgs,
    PodFacts,
    UndecodableArgsError,
    decode_args,
    encode_filter_error,
    encode_filter_result,
    encode_priorities,
    encode_priority,
)

log = structlog.get_logger()

OK: Final = 200
BAD_REQUEST: Final = 400


class BoardFinder(Protocol):
    """The knowledge of models and nodes."""

    def find_board(self, pod: PodFacts) -> ScoreBoard | None:
        """Return the answers for the model of a pod; None: it is not known."""


class SchedulerAnswer(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: bytes


class Answers:
    """The verbs of the extender.

    Args:
        boards: the knowledge of models and nodes.
        weights: weights of the score.
        metrics: counts each request.
        clock: seconds for durations.
    """

    def __init__(
        self,
        boards: BoardFinder,
        weights: ScoreWeights,
        metrics: ExtenderMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._boards = boards
        self._neutral = neutral_score(weights)
        self._metrics = metrics
        self._clock = clock

    def answer(self, verb: Verb, body: bytes | bytearray) -> SchedulerAnswer:
        """Answer a request whose body is there."""
        began = self._clock()
        scheduler_answer, outcome = self._answer(verb, body)
        self._metrics.count_request(verb, outcome, self._clock() - began)
        return scheduler_answer

    def _answer(self, verb: Verb, body: bytes | bytearray) -> tuple[SchedulerAnswer, Outcome]:
        try:
            args = decode_args(body)
        except UndecodableArgsError as error:
            # A HostPriorityList has no place for an error.
            if verb == "filter":
                return SchedulerAnswer(OK, encode_filter_error(f"pomona extender: {error}")), "refused"
            return SchedulerAnswer(BAD_REQUEST, f"{error}\n".encode()), "refused"
        outcome: Outcome
        try:
            board = self._boards.find_board(args.pod) if args.pod is not None else None
            outcome = "neutral" if board is None else "scored"
        except Exception:  # a defect must not keep pods from their nodes
            log.exception("answer_failed", verb=verb)
            board, outcome = None, "failed"
        return SchedulerAnswer(OK, self._render(verb, args, board)), outcome

    def _render(self, verb: Verb, args: ExtenderArgs, board: ScoreBoard | None) -> bytes:
        if verb == "prioritize":
            if board is None:
                return encode_priorities(encode_priority(name, self._neutral) for name in args.names)
            return encode_priorities(map(board.pieces.__getitem__, args.names))
        if board is None or not (board.failed or board.unresolvable):
            return encode_filter_result(args)
        failed = {name: board.failed[name] for name in args.names if name in board.failed}
        unresolvable = {name: board.unresolvable[name] for name in args.names if name in board.unresolvable}
        self._metrics.count_rejected(len(failed) + len(unresolvable))
        return encode_filter_result(args, failed, unresolvable)
