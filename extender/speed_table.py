"""The table from which requests are answered: nodes by their facts, speeds, and the answers that follow from both.

The answers for one subject are a score board: a ready piece of JSON by node. A board is computed when its subject is
first asked for, once for all nodes with equal facts. Nodes that have changed are scored again when it is asked for the
next time, and all nodes only if a measurement, the fastest hardware or the dearest node is another. The least recently
used boards are dropped, so that memory does not grow with the number of models times the number of nodes; pieces of
JSON are shared by all boards.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from devices.vendors import Vendors
from extender.misfit import find_static_misfit, find_transient_misfit
from extender.node_facts import ScoringFacts
from extender.score import BEST_SCORE, ScoreWeights, compute_score, neutral_score
from extender.subject import ScoringSubject, ServedModel
from extender.wire import encode_priority
from fitness.corrections import Corrections
from fitness.performance import MeasuredPerformance
from fitness.performance_store import PerformanceTable
from fitness.serving_devices import ServingDevices
from fitness.stated_hardware import DeviceHardware

MOST_ENTRIES: Final = 1_000_000
"""Nodes of all boards together: some 40 MB."""
_LEAST_BOARDS: Final = 8
MOST_BOARDS: Final = 4096
"""Boards in all: one of few nodes takes a KB, and a tenant makes subjects by the devices that pods request."""
_MOST_GONE: Final = 1000
"""Nodes that are gone and whose change is known, beside as many as there are."""

EstimateSpeed = Callable[[ServedModel, ServingDevices, Corrections], float | None]
"""Return the tokens a second of a replica with these corrections, or None if nothing is known."""


class ScorePieces(dict[str, bytes]):
    """The HostPriority of each node as JSON; unknown nodes get the neutral score."""

    __slots__ = ("neutral",)

    def __init__(self, neutral: int) -> None:
        super().__init__()
        self.neutral = neutral

    def __missing__(self, name: str) -> bytes:
        """Return the piece of an unknown node, which is not kept: names are whatever a client sends."""
        return encode_priority(name, self.neutral)


class ScoreScale(NamedTuple):
    """The values of all nodes to which one node is compared; a board holds as long as they are equal."""

    fastest: float = 0.0
    """Tokens a second of the fastest hardware that fits."""
    dearest: float = 0.0
    """Cost of the dearest node."""


class HardwareVerdict(NamedTuple):
    """The fit and the speed of a subject on some hardware."""

    misfit: str | None
    """Why it can never run a replica."""
    speed: float
    """Tokens a second; 0 if unknown."""


class ScoreBoard:
    """The answers for one subject."""

    __slots__ = ("failed", "pieces", "revision", "scale", "unresolvable")

    def __init__(self, neutral: int, scale: ScoreScale = ScoreScale()) -> None:  # noqa: B008 - it is immutable
        """Begin an empty board; an unknown node gets the score `neutral`."""
        self.pieces = ScorePieces(neutral)
        """The score of each node, encoded as an item of the answer to prioritize."""
        self.scale = scale
        """The fastest hardware and the dearest node, with which the scores compare each node."""
        self.failed: dict[str, str] = {}
        """Reason by name of nodes that may fit later."""
        self.unresolvable: dict[str, str] = {}
        """Reason by name of nodes that never fit."""
        self.revision = 0
        """Revision of the table up to which changes of nodes are in it."""


class SubjectSpeeds(NamedTuple):
    """The speeds of a subject by hardware."""

    inputs: tuple[object, ...]
    """`ServedModel.speed_inputs` of the model; empty if it is not served by a service."""
    speeds: Mapping[DeviceHardware, float | None]
    """Tokens a second; None: unknown."""


class SpeedTable:
    """The nodes and speeds that are known.

    Args:
        vendors: the table of vendors.
        weights: weights of the score.
        estimate_speed: estimates what was not measured.
        measured: the measurements; `forget_speeds` is called after each change of them.
    """

    def __init__(
        self,
        vendors: Vendors,
        weights: ScoreWeights,
        estimate_speed: EstimateSpeed,
        measured: PerformanceTable,
    ) -> None:
        """Begin without nodes. A revision is the number of changes of nodes so far."""
        # 1. What scores are computed by.
        self._vendors = vendors
        self._weights = weights
        self._neutral = neutral_score(weights)
        """The score of a node of which nothing is known."""
        self._estimate_speed = estimate_speed
        self.measured = measured

        # 2. The nodes, which `set_node` and `remove_node` change.
        self._facts: dict[str, ScoringFacts] = {}  # by name
        self._costs: Counter[float] = Counter()
        """Number of nodes by cost."""
        self._groups: dict[DeviceHardware, dict[ScoringFacts, dict[str, None]]] = {}
        """Names of the nodes with equal facts, by their hardware, then by their facts; the inner dict is a set. Nodes
        of a group have the same score, which is computed once for all."""

        # 3. The answers that `find_board` has computed.
        self._pieces: dict[str, list[bytes | None]] = {}
        """The encoded score of each node for each score from 0 to 10, made when it is first needed."""
        self._boards: dict[ScoringSubject, ScoreBoard] = {}
        """The score boards by subject, the least recently used one first."""
        self._speeds: dict[ScoringSubject, SubjectSpeeds] = {}
        """The speeds of the subjects that have a board."""

        # 4. The changes of nodes, by which a board is brought up to date.
        self._revision = 0
        self._revision_of_change: dict[str, int] = {}
        """Revision of the last change of each node, the latest one last."""
        self._forgotten_revision = 0
        """Revision up to which changes of nodes are no longer known one by one: an older board is made anew."""

    @property
    def board_count(self) -> int:
        """Number of boards that are kept."""
        return len(self._boards)

    @property
    def node_count(self) -> int:
        """Number of nodes that are known."""
        return len(self._facts)

    def set_node(self, name: str, facts: ScoringFacts) -> None:
        """Add a node, or replace its facts."""
        old_facts = self._facts.get(name)
        if old_facts == facts:
            return
        if old_facts is not None:
            self._leave_group(name, old_facts)
        self._facts[name] = facts
        # _groups: names of nodes, by hardware, then by facts. The inner dict is a set in order.
        self._groups.setdefault(facts.hardware, {}).setdefault(facts, {})[name] = None
        # _costs: the number of nodes by cost, for the cost of the dearest
        self._costs[facts.cost or 0.0] += 1
        self._record_change(name)

    def remove_node(self, name: str) -> None:
        """Forget a node."""
        facts = self._facts.pop(name, None)
        if facts is not None:
            self._leave_group(name, facts)
            # _pieces: the encoded scores of each node
            self._pieces.pop(name, None)
            self._record_change(name)

    def forget_speeds(self) -> None:
        """Forget what follows from the measurements: one of them has changed."""
        self._speeds.clear()
        self._boards.clear()

    def find_board(self, subject: ScoringSubject, served: ServedModel | None = None) -> ScoreBoard:
        """Return the scores of all nodes for a subject, brought up to date and kept for the next request.

        A board without scores is returned, and not kept, if nothing is known: no service and no measurement.

        Args:
            subject: the model and the devices of a pod, for which nodes are scored.
            served: its service and Model; None if it is not served by one.
        """
        # Taken out, and put back at the end: the boards are in the order of their last use.
        board = self._boards.pop(subject, None)

        # revision: the number of changes of nodes so far. A board of the same revision is up to date.
        if board is None or board.revision != self._revision:
            measured = self.measured.list_classes(subject.model_hash, subject.namespace)
            if served is None and not measured:
                # Anyone may ask for a hash that does not exist: nothing is kept for it.
                self._speeds.pop(subject, None)
                return ScoreBoard(self._neutral)
            board = self._renew_board(board, subject, self._update_speeds(subject, served, measured))

        self._boards[subject] = board
        self._drop_oldest_boards()
        return board

    def _update_speeds(
        self, subject: ScoringSubject, served: ServedModel | None, measured: Mapping[str, MeasuredPerformance]
    ) -> Mapping[DeviceHardware, float | None]:
        """Return the tokens a second of a subject on each hardware that nodes have; None: unknown.

        Speeds that are kept are used again, as long as the inputs of their estimate are the same
        (`ServedModel.speed_inputs`).
        """
        # kept: the speeds that can be used again
        last = self._speeds.get(subject)
        inputs = served.speed_inputs if served is not None else ()
        kept = last.speeds if last is not None and last.inputs == inputs else {}

        # The keys of _groups are the hardware that nodes have now. Other hardware is left out of the new result.
        speeds = {
            hardware: kept[hardware] if hardware in kept else self._find_speed(hardware, subject, served, measured)
            for hardware in self._groups
        }
        self._speeds[subject] = SubjectSpeeds(inputs, speeds)
        return speeds

    def _find_speed(
        self,
        hardware: DeviceHardware,
        subject: ScoringSubject,
        served: ServedModel | None,
        measured: Mapping[str, MeasuredPerformance],
    ) -> float | None:
        """Return the tokens a second of a subject on some hardware: the measured ones, else an estimate.

        None: it was not measured there, and cannot be estimated, because no service serves it, its devices are of
        another vendor, or facts are missing.
        """
        # device_class: a name of the devices of a replica, such as nvidia-l4x2, by which measurements are recorded
        device_class = hardware.name_class(subject.device_count, subject.partition)
        if record := measured.get(device_class):
            return record.tokens_per_second

        if served is None or (subject.device_count and hardware.vendor != subject.accelerator):
            return None

        devices = hardware.describe_replica(subject.device_count, subject.partition)
        return self._estimate_speed(served, devices, self.measured.corrections.select(subject.namespace))

    def _renew_board(
        self, board: ScoreBoard | None, subject: ScoringSubject, speeds: Mapping[DeviceHardware, float | None]
    ) -> ScoreBoard:
        """Return the board of a subject, up to date.

        1. Judge each hardware, which many nodes share: whether it can run the subject, and how fast.
        2. Find the scale: the fastest hardware and the dearest node, with which each score compares a node.
        3. Score all nodes if there is no board, if the scale has changed, or if changes since its last update are
           forgotten; else only the nodes that have changed since then.
        """
        # _groups: names of the nodes, by hardware, then by facts
        verdicts = {  # step 1
            hardware: HardwareVerdict(find_static_misfit(hardware, subject, self._vendors), speeds[hardware] or 0.0)
            for hardware in self._groups
        }

        fastest = max((verdict.speed for verdict in verdicts.values() if verdict.misfit is None), default=0.0)
        scale = ScoreScale(fastest, dearest=max(self._costs, default=0.0))  # step 2

        # Step 3. Changes up to `_forgotten_revision` are no longer known one by one, so an older board is made anew.
        if board is None or board.scale != scale or board.revision < self._forgotten_revision:
            board = ScoreBoard(self._neutral, scale)
            for hardware, groups in self._groups.items():
                for facts, names in groups.items():
                    self._score_nodes(board, names, facts, subject, verdicts[hardware])
        else:
            # Take out what the board has about a node that has changed, and score it again unless it is gone.
            for name in self._list_changed(board.revision):
                for entries in (board.pieces, board.failed, board.unresolvable):
                    entries.pop(name, None)
                new_facts = self._facts.get(name)
                if new_facts is not None:
                    self._score_nodes(board, (name,), new_facts, subject, verdicts[new_facts.hardware])
        board.revision = self._revision
        return board

    def _score_nodes(
        self,
        board: ScoreBoard,
        names: Iterable[str],
        facts: ScoringFacts,
        subject: ScoringSubject,
        verdict: HardwareVerdict,
    ) -> None:
        """Enter nodes with equal facts in a board: the reason why they do not fit, if there is one, and their score.

        A node whose hardware never fits has the score 0; one that is only full now keeps its score.
        """
        # 1. The reason. verdict.misfit: why this hardware can never run the subject
        if verdict.misfit is not None:
            board.unresolvable.update(dict.fromkeys(names, verdict.misfit))
        elif facts.free_gib and (busy := find_transient_misfit(facts, subject)):
            board.failed.update(dict.fromkeys(names, busy))

        # 2. The score, which is the same for all these nodes.
        score = 0
        if verdict.misfit is None:
            # A scale of 0 means that all values are 0, so that their shares are, too.
            speed_share = verdict.speed / (board.scale.fastest or 1.0)
            cost_share = (facts.cost or 0.0) / (board.scale.dearest or 1.0)
            score = compute_score(speed_share, facts.utilization or 0.0, cost_share, self._weights)

        # `pieces` has the score of each node as JSON.
        for name in names:
            board.pieces[name] = self._find_piece(name, score)

    def _list_changed(self, revision: int) -> Iterator[str]:
        """Yield the names of the nodes that have changed since a revision, the latest change first."""
        # _revision_of_change: the revision of each node's last change, the latest last
        for name, changed_revision in reversed(self._revision_of_change.items()):
            if changed_revision <= revision:
                return
            yield name

    def _record_change(self, name: str) -> None:
        """Record that a node has changed, as a new revision; the oldest change is forgotten if there are too many.

        Boards that are older than a forgotten change cannot be updated, and are made anew.
        """
        self._revision += 1
        # Taken out and put in again, the latest change is the last in the dict, and the oldest the first.
        self._revision_of_change.pop(name, None)
        self._revision_of_change[name] = self._revision
        # Room for a change of each node, and for as many nodes and some more (`_MOST_GONE`) that are gone.
        if len(self._revision_of_change) > 2 * len(self._facts) + _MOST_GONE:
            # Boards that are older than the forgotten change are made anew.
            oldest = next(iter(self._revision_of_change))
            self._forgotten_revision = self._revision_of_change.pop(oldest)

    def _find_piece(self, name: str, score: int) -> bytes:
        """Return the item of the answer to prioritize for a node with this score, as JSON.

        It is encoded once, and shared by all boards.
        """
        # _pieces: the items that were encoded for each node; the index in its list is the score
        pieces = self._pieces.get(name)
        if pieces is None:
            pieces = self._pieces[name] = [None] * (BEST_SCORE + 1)
        piece = pieces[score]
        if piece is None:
            piece = pieces[score] = encode_priority(name, score)
        return piece

    def _drop_oldest_boards(self) -> None:
        """Drop the least recently used boards beyond the limit, which is lower the more nodes there are."""
        # MOST_ENTRIES bounds the nodes of all boards together. At least _LEAST_BOARDS stay, at most MOST_BOARDS.
        most = min(MOST_BOARDS, max(_LEAST_BOARDS, MOST_ENTRIES // max(1, len(self._facts))))
        while len(self._boards) > most:
            # _boards is in the order of use; _speeds has the speeds of the same subjects.
            oldest = next(iter(self._boards))
            del self._boards[oldest]
            self._speeds.pop(oldest, None)

    def _leave_group(self, name: str, facts: ScoringFacts) -> None:
        """Take a node out of the group of these facts, and out of the count of costs; drop what is empty then."""
        cost = facts.cost or 0.0
        # _costs: number of nodes by cost; _groups: names of nodes, by hardware, then by facts
        self._costs[cost] -= 1
        if not self._costs[cost]:
            del self._costs[cost]
        groups = self._groups[facts.hardware]
        del groups[facts][name]
        if not groups[facts]:
            del groups[facts]
        if not groups:
            del self._groups[facts.hardware]
