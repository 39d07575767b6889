"""The answers to the scheduler's requests; neither unknown facts nor failures reject a node."""

import time
from collections.abc import Callable
from typing import Final

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
from gateway.http.whole_answers import JSON, WholeAnswer

log = structlog.get_logger()

_OK: Final = 200
_BAD_REQUEST: Final = 400

FindBoard = Callable[[PodFacts], ScoreBoard | None]
"""Returns the score board of a pod: the score of each node for its model; None: the model is not known."""


class Answers:
    """The verbs of the extender.

    Args:
        find_board: finds the scores for a pod.
        weights: weights of the score.
        metrics: counts each request.
        clock: seconds for durations.
    """

    def __init__(
        self,
        find_board: FindBoard,
        weights: ScoreWeights,
        metrics: ExtenderMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Keep what answers need; the neutral score is the one that all nodes get if a model is not known."""
        # find_board returns the score of each node for the model of a pod; None: the model is not known.
        self._find_board = find_board
        self._neutral_score = neutral_score(weights)
        self._metrics = metrics
        self._clock = clock

    def answer(self, verb: Verb, body: bytes | bytearray) -> WholeAnswer:
        """Return the answer to a request that was received whole, and count it with its duration."""
        began = self._clock()
        answer, outcome = self._answer(verb, body)
        self._metrics.count_request(verb, outcome, self._clock() - began)
        return answer

    def _answer(self, verb: Verb, body: bytes | bytearray) -> tuple[WholeAnswer, Outcome]:
        """Return the answer to the scheduler's verb, filter or prioritize, and the outcome for the metrics.

        1. A body that cannot be decoded is refused: there are no node names to answer for.
        2. Find the score board of the pod's model. If the model is not known, or this code fails, there is none.
        3. Answer from the board. Without one, filter rejects no node, and prioritize gives all the neutral score.
        """
        try:
            args = decode_args(body)
        except UndecodableArgsError as error:
            # The answer to filter has a field for an error; that to prioritize has none, so it is an HTTP error.
            if verb == "filter":
                return WholeAnswer(_OK, encode_filter_error(f"pomona extender: {error}"), JSON), "refused"
            return WholeAnswer(_BAD_REQUEST, f"{error}\n".encode()), "refused"

        outcome: Outcome
        try:
            # args.pod is None if the pod could not be read.
            # board: the score of each node for the pod's model; None: the model is not known
            board = self._find_board(args.pod) if args.pod is not None else None
            outcome = "neutral" if board is None else "scored"
        except Exception:  # a defect must not keep pods from their nodes
            log.exception("answer_failed", verb=verb)
            board, outcome = None, "failed"

        render = self._render_filter if verb == "filter" else self._render_priorities
        return WholeAnswer(_OK, render(args, board), JSON), outcome

    def _render_priorities(self, args: ExtenderArgs, board: ScoreBoard | None) -> bytes:
        """Return the score of each candidate; that of an unknown node if the model is not known."""
        if board is None:
            return encode_priorities(encode_priority(name, self._neutral_score) for name in args.names)
        return encode_priorities(map(board.pieces.__getitem__, args.names))

    def _render_filter(self, args: ExtenderArgs, board: ScoreBoard | None) -> bytes:
        """Return the candidate nodes, without those on which the board says that the pod cannot run.

        Such a node is "failed" if it may fit later, and "unresolvable" if it never will, so that the scheduler does not
        preempt pods there. Both are counted.
        """
        # Both dictionaries hold the reason by the name of the node.
        if board is None or not (board.failed or board.unresolvable):
            return encode_filter_result(args)
        failed = {name: board.failed[name] for name in args.names if name in board.failed}
        unresolvable = {name: board.unresolvable[name] for name in args.names if name in board.unresolvable}
        self._metrics.count_rejected(len(failed) + len(unresolvable))
        return encode_filter_result(args, failed, unresolvable)
