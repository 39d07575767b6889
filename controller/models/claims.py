"""The PersistentVolumeClaims of a Model: which one holds its weights, and when one grows, is replaced or is deleted.

A volume holds one set of weights. Other weights, a StorageClass that differs, or a size that the volume cannot grow to
need another claim; pods serve from the earlier volume until the new one is verified. A claim is deleted only when its
successor is verified, and no pod and no Deployment mounts it, or with its Model and all services that read it.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from controller.models.served import claim_name
from controller.models.volume import WEIGHTS, new_claim, sufficient_size
from controller.reconcile.indexes import CLAIM_INDEX, MODEL_INDEX, OF_MODEL_INDEX, controller_of, namespaced
from controller.reconcile.plan import Patch, Ref, Snapshot, decode_stored, ref_to
from crds.cache import CachedWeights, CacheOptions
from crds.meta import OwnerReference
from crds.model import Model, ModelFacts
from crds.quantity import parse_quantity, quantity_bytes, write_quantity
from crds.size import size_text
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.kinds import PersistentVolumeClaim
from kube.resources import DEPLOYMENTS, INFERENCE_SERVICES, PODS, PVCS, STORAGE_CLASSES, ObjectKey, Resource

RELEASE_SECONDS: Final = 10.0
"""Time between two looks whether pods still mount a claim that is to be deleted."""
_DIGITS: Final = 8
_MOST_READERS: Final = 32
"""Owners of a claim: more would make it large, and each costs a write."""


class ObservedClaims(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of a Model, and what decides about them."""

    claims: Sequence[PersistentVolumeClaim] = ()
    """Those that are not being deleted."""
    leaving: frozenset[str] = frozenset()
    """Names of those that are being deleted, which takes as long as a pod mounts them, also of an earlier Model."""
    mounted: frozenset[str] = frozenset()
    """Names of the claims that a pod or a Deployment mounts."""
    readers: Mapping[str, Sequence[OwnerReference]] = {}
    """By the name of a claim, the services whose Deployments mount it, as owner references."""
    expandable: frozenset[str] = frozenset()
    """StorageClasses whose volumes can grow; only those of claims that are too small are read."""


class VolumeDecision(NamedTuple):
    """The claim for the weights, and the changes of all claims."""

    target: PersistentVolumeClaim | None = None
    """The claim for the weights, which may not hold them yet; None: it has to be created, or nothing needs it."""
    holder: CachedWeights | None = None
    """The same weights, verified on an earlier volume, from which pods serve until the target is verified."""
    create: tuple[tuple[Resource, Obj], ...] = ()
    patch: tuple[Patch, ...] = ()
    superseded: tuple[PersistentVolumeClaim, ...] = ()
    """Claims that nothing needs once the target is verified."""
    change: tuple[str, str] | None = None
    """Reason and message of a change of the volume that is not complete."""


def observe_claims(snapshot: Snapshot, model: Model, classes: Mapping[str, Obj]) -> ObservedClaims:
    """Gather the claims of a Model from the store; `classes` is the result of `read_classes`."""
    namespace = model.metadata.namespace
    # Its own claims, without those that are being deleted.
    own_claims = list_claims(snapshot, model)
    claims = [claim for claim in own_claims if claim.metadata.deletion_timestamp is None]
    names = [claim.metadata.name for claim in claims]

    # The names of all claims: also of those that an earlier Model of this name has left behind.
    same_named = snapshot.store.by_index(PVCS, OF_MODEL_INDEX, namespaced(namespace, model.metadata.name))
    all_names = {obj["metadata"]["name"] for obj in same_named} | {claim.metadata.name for claim in own_claims}
    return ObservedClaims(
        claims=claims,
        leaving=frozenset(all_names.difference(names)),
        mounted=frozenset(
            name
            for name in names
            for resource in (PODS, DEPLOYMENTS)
            if snapshot.store.by_index(resource, CLAIM_INDEX, namespaced(namespace, name))
        ),
        readers={name: _list_readers(snapshot, namespaced(namespace, name)) for name in names},
        expandable=frozenset(name for name, obj in classes.items() if obj.get("allowVolumeExpansion")),
    )


def list_claims(snapshot: Snapshot, model: Model) -> list[PersistentVolumeClaim]:
    """Return the claims of a Model, also those that are being deleted."""
    children = snapshot.children(PVCS, model.metadata.namespace, model.metadata.uid)
    return decode_stored(snapshot.store, PVCS, children, PersistentVolumeClaim)


def _list_readers(snapshot: Snapshot, claim: str) -> list[OwnerReference]:
    """Return the services whose Deployments mount a claim, as owner references, ordered by their names.

    Only services that exist are returned, as a Deployment may name any owner: the garbage collector would take away an
    owner of the claim that does not exist, again and again.
    """
    owners: dict[str, OwnerReference] = {}  # by name
    for deployment in snapshot.store.by_index(DEPLOYMENTS, CLAIM_INDEX, claim):
        owner = controller_of(deployment)
        if owner is None or owner["kind"] != INFERENCE_SERVICES.kind:
            continue
        # The owner must be this very service, not a former one of its name.
        service = snapshot.get(INFERENCE_SERVICES, ObjectKey(deployment["metadata"]["namespace"], owner["name"]))
        if service is not None and service["metadata"]["uid"] == owner["uid"]:
            owners[owner["name"]] = OwnerReference(
                INFERENCE_SERVICES.api_version, INFERENCE_SERVICES.kind, owner["name"], owner["uid"]
            )
    return [owners[name] for name in sorted(owners)]


def build_owner_patches(observed: ObservedClaims) -> tuple[Patch, ...]:
    """Return the patches by which exactly the services that read a claim own it beside the Model.

    Kubernetes deletes an object when its last owner is gone: so the volume of a deleted Model stays for the services
    that still read it. A service that reads other weights by now is removed from the owners, or the volume would stay
    as long as that service exists.
    """
    patches = []
    for claim in observed.claims:
        # Kept are the Model and the services that still read the claim; added are those that read it now.
        current_owners = claim.metadata.owner_references
        readers = {reader.uid: reader for reader in observed.readers.get(claim.metadata.name, ())}
        kept = [owner for owner in current_owners if owner.kind != INFERENCE_SERVICES.kind or owner.uid in readers]
        uids = {owner.uid for owner in kept}
        added = [reader for reader in readers.values() if reader.uid not in uids]
        # A claim with `_MOST_READERS` owners gets no further ones.
        owners = [*kept, *added[: max(0, _MOST_READERS - len(kept))]]

        if owners != current_owners:
            # The tests: if it is another claim or has other owners by now, the patch fails.
            operations = (
                {"op": "test", "path": "/metadata/uid", "value": claim.metadata.uid},
                {"op": "test", "path": "/metadata/ownerReferences", "value": msgspec.to_builtins(current_owners)},
                {"op": "replace", "path": "/metadata/ownerReferences", "value": msgspec.to_builtins(owners)},
            )
            patches.append(Patch(ref_to(PVCS, claim.metadata), operations))
    return tuple(patches)


async def read_classes(client: Client, snapshot: Snapshot, model: Model) -> Mapping[str, Obj]:
    """Return the StorageClasses, by name, that decide whether a volume can grow, or whether copies can use them.

    The class of a bound claim that is too small says whether its volume can grow. The class that the Model states for
    copies on nodes says whether its volumes wait for a node: it is read before the first claim of that class, if any
    service uses the Model. A class that may not be read or does not exist is left out: then a volume is replaced in
    place of growing, and copies try the class. Raises as `Client`.
    """
    # 1. The classes of claims that should grow.
    cache, claims = model.spec.cache, list_claims(snapshot, model)
    names = {claim.spec.storage_class_name for claim in claims if claim.is_bound and is_too_small(claim, cache)}

    # 2. The class for copies on nodes, before its first claim, if any service uses the Model.
    has_claim_of_class = any(claim.spec.storage_class_name == cache.storage_class_name for claim in claims)
    if cache.scope == "node" and not has_claim_of_class:
        index_value = namespaced(model.metadata.namespace, model.metadata.name)
        if snapshot.store.by_index(INFERENCE_SERVICES, MODEL_INDEX, index_value):
            names.add(cache.storage_class_name)

    # 3. Read them, apart from those without a name: a claim or the Model states no class.
    classes = {}
    for name in sorted(filter(None, names)):
        with contextlib.suppress(Forbidden, NotFound):
            classes[name] = await client.get(STORAGE_CLASSES, name)
    return classes


def decide_claims(
    model: Model, facts: ModelFacts, path: str, observed: ObservedClaims, *, is_needed: bool, is_edited: bool = False
) -> VolumeDecision:
    """Decide which claim is for the weights at `path` (the target), and what becomes of all others (the superseded).

    Until the weights on the target are verified, pods serve from the verified claim in the status (the holder); not if
    `is_edited` and it has other weights, because the user wants those of the edit.

    Unless `is_needed` by a service, no claim is created or grows, and a claim need not have the stated size and class.
    """
    cache, cached = model.spec.cache, model.status.cached
    cached_uid = cached.claim if cached is not None else None

    # 1. The target is the verified claim if it matches, else the newest one that does: the last after sorting. A claim
    # is annotated with the path of its weights; one that fits has the stated size and class, or can grow to it.
    matching = [
        claim
        for claim in observed.claims
        if claim.metadata.annotations.get(WEIGHTS) == path
        and (not is_needed or _fits(claim, cache, observed.expandable))
    ]
    matching.sort(key=lambda claim: (claim.metadata.uid == cached_uid, claim.metadata.creation_timestamp))
    target = matching[-1] if matching else None

    # 2. All other claims are superseded; the verified one among them (the holder) has the weights meanwhile.
    superseded = tuple(claim for claim in observed.claims if claim is not target)
    holder = cached if any(claim.metadata.uid == cached_uid for claim in superseded) else None
    if is_edited and holder is not None and (holder.path, holder.sha256) != (path, facts.sha256):
        holder = None

    # 3. There is no target: create its claim if it is needed.
    if target is None:
        if not is_needed:
            return VolumeDecision(holder=holder, superseded=superseded)
        # The first claim has a fixed name; each successor has a name of its own.
        name = claim_name(model)
        if observed.claims or name in observed.leaving:
            name = _name_successor(model, path)
        created_claim = new_claim(model, facts, name, path)
        change = _describe_replacement(name, superseded, holder, cache)
        return VolumeDecision(holder=holder, create=(created_claim,), superseded=superseded, change=change)

    # 4. The target exists: let it grow if it is too small. `change` says that it grows, or replaces another one.
    if is_needed and is_too_small(target, cache):
        growth, change = _build_growth_patch(target, cache), _describe_growth(target, str(cache.size))
        return VolumeDecision(target=target, holder=holder, patch=(growth,), superseded=superseded, change=change)
    replacement = _describe_replacement(target.metadata.name, superseded, holder, cache)
    change = _describe_unfinished_growth(target) or replacement
    return VolumeDecision(target=target, holder=holder, superseded=superseded, change=change)


def list_deletions(model: Model, decision: VolumeDecision, observed: ObservedClaims) -> tuple[Ref, ...]:
    """Return the superseded claims to delete now: those that no pod and no Deployment mounts.

    The claim that the status still names stays, because new pods would mount it; it goes once the status names another.
    """
    cached = model.status.cached
    return tuple(
        ref_to(PVCS, claim.metadata)
        for claim in decision.superseded
        if claim.metadata.name not in observed.mounted and (cached is None or cached.claim != claim.metadata.uid)
    )


def find_size_problem(model: Model, facts: ModelFacts) -> tuple[str, str] | None:
    """Return reason and message if the stated size cannot hold the weights, with the way out; None if it can."""
    size, weights_bytes = model.spec.cache.size, facts.size_bytes or 0
    if size is None or quantity_bytes(size) >= weights_bytes:
        return None
    return "VolumeTooSmall", (
        f"spec.cache.size {size} is less than the weights, which have {size_text(weights_bytes)}: raise it to "
        f"{sufficient_size(facts)}, or remove it"
    )


def _fits(claim: PersistentVolumeClaim, cache: CacheOptions, expandable: frozenset[str]) -> bool:
    """Return whether a claim is as the spec says, or can grow to it."""
    storage_class = claim.spec.storage_class_name
    if cache.storage_class_name not in {None, storage_class}:  # None: the Model states no class
        return False
    return not is_too_small(claim, cache) or (claim.is_bound and storage_class in expandable)


def is_too_small(claim: PersistentVolumeClaim, cache: CacheOptions) -> bool:
    """Return whether the spec states a larger size than the claim requests, and than its volume has."""
    if cache.size is None:
        return False
    return quantity_bytes(cache.size) > max(parse_quantity(size) or 0 for size in (claim.requested, claim.capacity))


def requested_bytes(claim: PersistentVolumeClaim) -> int:
    """Return the space that a claim takes from its disk."""
    return int(parse_quantity(claim.requested) or 0)


def _build_growth_patch(claim: PersistentVolumeClaim, cache: CacheOptions) -> Patch:
    """Return the patch by which a claim requests the size that the Model states; it fails for another claim's uid."""
    operations = (
        {"op": "test", "path": "/metadata/uid", "value": claim.metadata.uid},
        {"op": "replace", "path": "/spec/resources/requests/storage", "value": write_quantity(cache.size or 0)},
    )
    return Patch(ref_to(PVCS, claim.metadata), operations)


def _describe_growth(claim: PersistentVolumeClaim, wanted: str) -> tuple[str, str]:
    name, size = claim.metadata.name, claim.capacity or claim.requested
    return "VolumeGrowing", f"PersistentVolumeClaim {name} grows from {size} to {wanted}; pods serve from it meanwhile"


def _describe_unfinished_growth(claim: PersistentVolumeClaim) -> tuple[str, str] | None:
    """Return reason and message of a growth that the storage driver has not completed; None: there is none."""
    capacity = parse_quantity(claim.capacity)
    if not claim.is_bound or capacity is None or capacity >= (parse_quantity(claim.requested) or 0):
        return None
    reason, message = _describe_growth(claim, claim.requested)
    driver_message = next((condition.message for condition in claim.status.conditions if condition.message), "")
    return reason, f"{message} ({driver_message})" if driver_message else message


def _describe_replacement(
    name: str, superseded: Sequence[PersistentVolumeClaim], holder: CachedWeights | None, cache: CacheOptions
) -> tuple[str, str] | None:
    """Return reason and message while the claim of this name replaces others; None: there are no others."""
    if not superseded:
        return None
    earlier = ", ".join(sorted(claim.metadata.name for claim in superseded))
    message = f"PersistentVolumeClaim {name} replaces {earlier}"
    old = next((claim for claim in superseded if holder is not None and claim.metadata.uid == holder.claim), None)
    if old is not None:
        served = old.metadata.name
        why = _explain_replacement(old, cache)
        message += f", because {why}; pods serve from {served} until the weights on the new volume are verified"
    return "VolumeReplaced", f"{message}. {earlier} is deleted when no pod mounts it"


def _explain_replacement(old: PersistentVolumeClaim, cache: CacheOptions) -> str:
    """Return why a claim is replaced: another class is stated, it cannot grow, or the weights are another revision."""
    storage_class = old.spec.storage_class_name or ""
    if cache.storage_class_name not in {None, storage_class}:
        return f"spec.cache.storageClassName is {cache.storage_class_name} now"
    if is_too_small(old, cache):
        return f"its StorageClass {storage_class} cannot grow it to {cache.size}"
    return "the source has another revision"


def _name_successor(model: Model, path: str) -> str:
    """Return the name of a claim whose first name is taken, with a digest of all that needs another volume.

    Services may still read the claim of an earlier Model of the same name.
    """
    cache = model.spec.cache
    text = "\0".join((model.metadata.uid, path, cache.storage_class_name or "", str(cache.size or "")))
    return f"{claim_name(model)}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
