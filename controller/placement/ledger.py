"""The ledger: one object that says which units are being admitted, written before any of them is.

A leader that was suspended may send a write after another has taken over. So each round is written here first, by
compare-and-swap: of two leaders one fails, and writes nothing else. The next leader finds in the ledger which cells the
last one was giving to whom, keeps them reserved, and finishes what the other began; no cell is promised twice.

One object serves all pools: a unit may wait in several, and two objects could not be swapped as one. What has been
admitted is in the objects themselves, so nothing is lost with a ledger that is deleted or damaged: a new one begins.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.placement.planner import Admit
from controller.placement.units import Amounts, Cell, Unit, UnitKind, subtract_amounts
from crds.meta import CONTROLLER_NAMESPACE, LABEL_MANAGED_BY, MANAGED_BY
from kube.client import Client, Obj
from kube.errors import Conflict, NotFound
from kube.resources import CONFIG_MAPS, ObjectKey

LEDGER: Final = "pomona-queue"
_KEY: Final = "ledger.json"
MOST_CLAIMED: Final = 512
"""Pods and processes that are being admitted at once: the ledger has the name of each, and must not become too large.
More than those of one gang, `MOST_IN_GANG`."""
_MOST_FREED: Final = 2000
"""Places of evicted units that are kept: with more, the object would become too large, and the oldest are dropped."""

_MOST_BYTES: Final = 900_000
"""Size of the content; the API server takes a MiB. Places are dropped for claims, without which nothing starts."""

_NOT_TAKEN_OVER: Final = f"the ledger {CONTROLLER_NAMESPACE}/{LEDGER} was not taken over yet"

log = structlog.get_logger()


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that is being admitted, and its cells."""

    kind: UnitKind
    namespace: str
    names: tuple[str, ...]
    """Names of its pods, or of the process; one for each cell."""
    cells: tuple[str, ...] = ()
    service: str = ""
    """Name of its InferenceService."""
    node_labels: tuple[tuple[str, str], ...] = ()
    """Labels of the nodes on which it may be if it has no cells."""

    @property
    def is_sound(self) -> bool:
        """False if people have edited it so that it says no cell for each object."""
        prefix = "host/" if self.kind == "process" else "node/"
        return bool(self.names) and (
            (not self.cells and self.kind != "process")
            or (len(self.cells) == len(self.names) and all(cell.startswith(prefix) for cell in self.cells))
        )

    @property
    def objects(self) -> tuple[ObjectKey, ...]:
        """Its pods, or the process."""
        return tuple(ObjectKey(self.namespace, name) for name in self.names)


def build_claims(admissions: Iterable[Admit], claimed: int) -> dict[str, Claim]:
    """Return the claims of the first of these units, of as many as may be admitted at once, by `Unit.uid`.

    Args:
        admissions: what is decided.
        claimed: pods and processes of the claims that the ledger has.
    """
    claims = dict[str, Claim]()
    for unit, cells, _, node_labels in admissions:
        claimed += len(unit.objects)
        if claimed > MOST_CLAIMED:
            break
        claims[unit.uid] = Claim(
            kind=unit.key.kind,
            namespace=unit.key.namespace,
            names=tuple(name.name for name in unit.objects),
            cells=cells,
            service=unit.service.name,
            node_labels=node_labels,
        )
    return claims


def reserve(cells: Iterable[Cell], claims: Mapping[str, Claim], units: Iterable[Unit]) -> list[Cell]:
    """Return cells without the room of units that are being admitted and are not seen to have it yet.

    What another leader has claimed may not be seen at all so far, or is no unit here since its service is suspended. It
    may still be given the cell, and what it needs is unknown: nothing is free there until its outcome is known.
    """
    taken: dict[str, list[Amounts]] = {}
    unseen = dict(claims)
    if claims:
        for unit in units:
            claim = unseen.pop(unit.uid, None)
            if claim is not None and unit.state == "waiting":
                for need, cell in zip(unit.parts, claim.cells, strict=False):
                    taken.setdefault(cell, []).append(need)
    unknown = {cell for claim in unseen.values() for cell in claim.cells}
    return [
        msgspec.structs.replace(cell, free=_leave_free(cell, taken.get(cell.id, ()), is_all_claimed=cell.id in unknown))
        if cell.id in taken or cell.id in unknown
        else cell
        for cell in cells
    ]


def _leave_free(cell: Cell, taken: Iterable[Amounts], *, is_all_claimed: bool) -> Amounts:
    free = functools.reduce(subtract_amounts, taken, cell.free)
    return {name: min(0, amount) for name, amount in free.items()} if is_all_claimed else free


class FreedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a unit that was evicted or is gone, which its successor inherits."""

    service: str
    """uid of the InferenceService."""
    unit: str
    """uid of the unit."""
    namespace: str
    name: str
    """Name of its pod or process."""
    enqueued_at: str


class LedgerContent(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the ledger."""

    leader: str = ""
    generation: int = 0
    """Grows with each write."""
    claims: Mapping[str, Claim] = {}
    """By uid of the unit."""
    freed: tuple[FreedPlace, ...] = ()


class LedgerLost(Exception):  # noqa: N818 - no error: another leader has taken over
    """Another leader has written the ledger: nothing that was decided since the last write may be done."""


class _WrittenLedger(NamedTuple):
    version: str
    content: LedgerContent


class QueueLedger:
    """The ledger as `leader` last wrote it."""

    def __init__(self, client: Client, leader: str) -> None:
        self._client, self._leader = client, leader
        self._written: _WrittenLedger | None = None
        self._left: LedgerContent | None = None
        """Content of another leader that is being taken over: the write may be made, and its answer lost."""

    @property
    def content(self) -> LedgerContent:
        """The last content. Raises LedgerLost before `take_over`."""
        if self._written is None:
            raise LedgerLost(_NOT_TAKEN_OVER)
        return self._written.content

    async def take_over(self) -> LedgerContent:
        """Make this leader the one writer, and return what the last one left.

        Raises as `Client`, and LedgerLost; called again, it still returns what the other leader has left.
        """
        try:
            found = await self._client.get(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE)
        except NotFound:
            content = LedgerContent(leader=self._leader)
            self._written = _WrittenLedger(_version(await self._client.create(CONFIG_MAPS, _encode(content))), content)
            return LedgerContent()
        content = _decode(found)
        self._written = _WrittenLedger(_version(found), content)
        if content.leader != self._leader or self._left is None:
            self._left = content
        await self.write(content.claims, content.freed)
        left, self._left = self._left, None
        return left

    async def write(self, claims: Mapping[str, Claim], freed: tuple[FreedPlace, ...]) -> None:
        """Replace the content, if this leader was the last to write it.

        Raises:
            LedgerLost: another leader, or a person, has written or deleted it.
            ApiError, Unreachable: as `Client`; the content may have been written, and `take_over` must be called.
        """
        if self._written is None:
            raise LedgerLost(_NOT_TAKEN_OVER)
        # Until the answer is there, nobody knows what is written.
        (version, last), self._written = self._written, None
        content = _shorten(
            LedgerContent(
                leader=self._leader, generation=last.generation + 1, claims=claims, freed=freed[-_MOST_FREED:]
            )
        )
        operations = (
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/data", "value": _encode(content)["data"]},
        )
        try:
            answer = await self._client.patch_json(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE, operations)
        except (Conflict, NotFound) as error:
            raise LedgerLost(str(error)) from error
        self._written = _WrittenLedger(_version(answer), content)


def _shorten(content: LedgerContent) -> LedgerContent:
    """Return a content that the API server takes: names of pods, which tenants choose, may be long."""
    while content.freed and len(msgspec.json.encode(content)) > _MOST_BYTES:
        content = msgspec.structs.replace(content, freed=content.freed[len(content.freed) // 2 + 1 :])
    return content


def _version(obj: Obj) -> str:
    version: str = obj["metadata"]["resourceVersion"]
    return version


def _encode(content: LedgerContent) -> Obj:
    return {
        "metadata": {
            "name": LEDGER,
            "namespace": CONTROLLER_NAMESPACE,
            "labels": {LABEL_MANAGED_BY: MANAGED_BY},
        },
        "data": {_KEY: msgspec.json.encode(content).decode()},
    }


def _decode(obj: Obj) -> LedgerContent:
    """Return the content of the object; a damaged one counts as empty: the units say what they have."""
    text = (obj.get("data") or {}).get(_KEY, "")
    try:
        content = msgspec.json.decode(text, type=LedgerContent)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        log.warning("ledger_unreadable", name=LEDGER, error=str(error))
        return LedgerContent()
    damaged = [uid for uid, claim in content.claims.items() if not claim.is_sound]
    if not damaged:
        return content
    log.warning("claims_unreadable", name=LEDGER, units=damaged)
    sound = {uid: claim for uid, claim in content.claims.items() if claim.is_sound}
    return msgspec.structs.replace(content, claims=sound)
