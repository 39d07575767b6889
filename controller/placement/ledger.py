"""The ledger: one object that says which units are being admitted, written before any of them is.

A leader that was suspended may send a write after another has taken over. So each round is written here first, by
compare-and-swap: of two leaders one fails, and writes nothing else. The next leader finds in the ledger which cells the
last one was giving to whom, keeps them reserved, and finishes what the other began; no cell is promised twice.

One object serves all pools: a unit may wait in several, and two objects could not be swapped as one.

A ledger that is deleted or damaged is begun anew. What has been admitted is in the objects themselves. A claim of
another leader is lost, and its write may still arrive. So the new ledger says that it is incomplete, and nothing is
admitted by it for as long as the API server works on a write. One case remains: a leader that is suspended for longer
between its last look at its Lease and the sending of a write, while its claim is lost, may book a device twice.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from controller.placement.actions import Admit
from controller.placement.units import MEMORY, UnitKind
from crds.meta import CONTROLLER_NAMESPACE, LABEL_MANAGED_BY, MANAGED_BY
from kube.client import Client, Obj
from kube.errors import Conflict, Invalid, NotFound
from kube.resources import CONFIG_MAPS, PODS, ObjectKey

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
    memory_bytes: int = 0
    """Memory of a process, for which its cell has room; 0: unknown, or it is none."""

    @property
    def is_sound(self) -> bool:
        """False if people have edited it so that it names no objects, or no cell for each."""
        prefix = "host/" if self.kind == "process" else "node/"
        if not self.names or not all(map(_may_exist, self.objects)):
            return False
        if not self.cells:
            return self.kind != "process"
        return len(self.cells) == len(self.names) and all(
            cell.startswith(prefix) and cell != prefix for cell in self.cells
        )

    @property
    def objects(self) -> tuple[ObjectKey, ...]:
        """Its pods, or the process."""
        return tuple(ObjectKey(self.namespace, name) for name in self.names)


def _may_exist(name: ObjectKey) -> bool:
    """Return whether an object may have this name.

    A name that Kubernetes does not allow comes from a damaged ledger. No request can ask for such an object, so its
    claim could never be finished.
    """
    try:
        PODS.path(*name)
    except Invalid:
        return False
    return True


def build_claims(admissions: Iterable[Admit], claimed: int) -> dict[str, Claim]:
    """Return the claims of these units in their order, until the ledger would have MOST_CLAIMED objects, by `Unit.uid`.

    Args:
        admissions: what is decided.
        claimed: pods and processes of the claims that the ledger has.
    """
    claims = dict[str, Claim]()
    for admission in admissions:
        # A unit is claimed with all of its pods, or not at all.
        unit = admission.unit
        claimed += len(unit.objects)
        if claimed > MOST_CLAIMED:
            break

        claims[unit.uid] = Claim(
            kind=unit.key.kind,
            namespace=unit.key.namespace,
            names=tuple(key.name for key in unit.objects),
            cells=admission.cells,
            service=unit.service.name,
            node_labels=admission.node_labels,
            memory_bytes=unit.parts[0][MEMORY] if unit.key.kind == "process" else 0,
        )
    return claims


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
    is_incomplete: bool = False
    """Claims may be missing, since a ledger was deleted or damaged, and their writes may still arrive."""


class LedgerLost(Exception):  # noqa: N818 - no error: another leader has taken over
    """Another leader has written the ledger: nothing that was decided since the last write may be done."""


class _WrittenLedger(NamedTuple):
    version: str
    content: LedgerContent


class QueueLedger:
    """The ledger, with its content as `leader` last wrote it."""

    def __init__(self, client: Client, leader: str) -> None:
        """Start without knowledge of the ledger: `take_over` has to be called first."""
        self._client, self._leader = client, leader
        self._written: _WrittenLedger | None = None
        """The ledger as it is stored; None: that is unknown, since it was not taken over or a write had no answer."""
        self._inherited: LedgerContent | None = None
        """Content that another leader left and `take_over` has not returned yet; None before the first."""

    async def take_over(self) -> LedgerContent:
        """Make this leader the one writer of the ledger, and return what another one, or an earlier term, has left.

        What is left is returned only once: from then on the caller knows better which claims are open. If writing
        fails, it is kept, and the next call returns it: the write may have arrived and its answer be lost, so that the
        ledger looks like our own. A ledger that does not exist is created, and counts as incomplete.

        Raises as `Client`, and LedgerLost if somebody else wrote in between.
        """
        # 1. Read the ledger, or create it.
        try:
            stored = await self._client.get(CONFIG_MAPS, LEDGER, CONTROLLER_NAMESPACE)
        except NotFound:
            # Incomplete: it may have been deleted, and its claims with it.
            content = LedgerContent(leader=self._leader, is_incomplete=True)
            created = await self._client.create(CONFIG_MAPS, _encode(content))
            self._written = _WrittenLedger(_version(created), content)
        else:
            content = _decode(stored)
            # The caller knows what this term wrote, but not what another leader or an earlier term of this one did.
            # `_inherited` is None: this term has read nothing yet, so even content with our own name is older.
            if self._inherited is None or content.leader != self._leader:
                self._inherited = content
            self._written = _WrittenLedger(_version(stored), content)

            # 2. Write it back with our own name: from then on, writes of an earlier leader fail.
            await self._replace(content)

        # 3. Return what was left, once only.
        inherited = self._inherited if self._inherited is not None else LedgerContent()
        self._inherited = LedgerContent()  # not None: what is read later with our own name, this term wrote
        return msgspec.structs.replace(inherited, is_incomplete=content.is_incomplete)

    async def write(self, claims: Mapping[str, Claim], freed: tuple[FreedPlace, ...]) -> None:
        """Replace the content, if this leader was the last to write it. No claim is missing from then on.

        Raises:
            LedgerLost: another leader, or a person, has written or deleted it.
            ApiError, Unreachable: as `Client`; the content may have been written, and `take_over` must be called.
        """
        await self._replace(LedgerContent(claims=claims, freed=freed[-_MOST_FREED:]))

    async def _replace(self, content: LedgerContent) -> None:
        """Write the content if nobody else has written since. Raises as `write`; then `take_over` is needed."""
        if self._written is None:
            raise LedgerLost(_NOT_TAKEN_OVER)
        version, last = self._written
        # Until the answer is there, it is not known what is stored: a failure leaves this None.
        self._written = None
        content = _shorten(msgspec.structs.replace(content, leader=self._leader, generation=last.generation + 1))

        # The API server refuses the patch if the resourceVersion is another one: somebody has written in between.
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
    """Return the content without its oldest freed places, if it is too large for the API server with them."""
    while content.freed and len(msgspec.json.encode(content)) > _MOST_BYTES:
        # The older half is dropped, and one more, so that a single one goes as well.
        newer_half = content.freed[len(content.freed) // 2 + 1 :]
        content = msgspec.structs.replace(content, freed=newer_half)
    return content


def _version(obj: Obj) -> str:
    """Return the resourceVersion of an object, which changes with each write."""
    version: str = obj["metadata"]["resourceVersion"]
    return version


def _encode(content: LedgerContent) -> Obj:
    """Return the ConfigMap with this content."""
    return {
        "metadata": {"name": LEDGER, "namespace": CONTROLLER_NAMESPACE, "labels": {LABEL_MANAGED_BY: MANAGED_BY}},
        "data": {_KEY: msgspec.json.encode(content).decode()},
    }


def _decode(obj: Obj) -> LedgerContent:
    """Return the content of the object; of a damaged one the sound part, marked as incomplete."""
    text = (obj.get("data") or {}).get(_KEY, "")
    try:
        content = msgspec.json.decode(text, type=LedgerContent)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        log.warning("ledger_unreadable", name=LEDGER, error=str(error))
        return LedgerContent(is_incomplete=True)
    damaged = [uid for uid, claim in content.claims.items() if not claim.is_sound]
    if not damaged:
        return content
    log.warning("claims_unreadable", name=LEDGER, units=damaged)
    sound = {uid: claim for uid, claim in content.claims.items() if claim.is_sound}
    return msgspec.structs.replace(content, claims=sound, is_incomplete=True)
