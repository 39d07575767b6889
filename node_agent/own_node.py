"""The Node of this agent, as the watch shows it: its uid, its labels and their owners, and nothing of its images."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kube.client import Obj
from kube.resources import ObjectKey, Resource
from kube.store import Snapshot


class _NodeMetadata(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str
    uid: str
    resource_version: str
    labels: dict[str, str] = {}
    managed_fields: list[dict[str, Any]] = []


class _NodeMetadataOnly(msgspec.Struct, frozen=True):
    metadata: _NodeMetadata


_DECODER = msgspec.json.Decoder(_NodeMetadataOnly)


def read_node_metadata(raw: msgspec.Raw) -> Obj:
    """Decode the part of a Node that this agent needs: a Node has some 10 KiB of images, and changes often."""
    node: Obj = msgspec.to_builtins(_DECODER.decode(raw))
    return node


class OwnNode:
    """The watch cache of one Node; None while it does not exist, or is not known yet."""

    def __init__(self) -> None:
        self.node: Obj | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of the Node, of all labellers."""
        labels: Mapping[str, str] = (self.node or {}).get("metadata", {}).get("labels", {})
        return labels

    def snapshot(self, resource: Resource, namespace: str | None = None) -> Snapshot:
        """Return nothing: each list is taken as it is."""
        del resource, namespace
        return dict[ObjectKey, tuple[str, str]]()

    def replace(
        self, resource: Resource, items: Iterable[Obj], *, namespace: str | None = None, before: Snapshot | None = None
    ) -> None:
        """Take the Node of a list, if there is one."""
        del resource, namespace, before
        self.node = next(iter(items), None)

    def keep_part(self, resource: Resource, obj: Obj) -> Obj:
        """Return the object: `read_node_metadata` has left out the rest."""
        del resource
        return obj

    def put(self, resource: Resource, obj: Obj) -> bool:
        """Take a version of the Node."""
        del resource
        self.node = obj
        return True

    def remove(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> bool:
        """Forget the Node, which was deleted."""
        del resource, namespace, name, uid, resource_version
        self.node = None
        return True
