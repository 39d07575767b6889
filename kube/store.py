"""What we know of the cluster: one dict per resource, with indexes and listeners.

Sources put into it (kopf, kube/watch.py, answers to our own writes), reconcilers read from it. It never goes back in
time for an object of the same uid, so that a late event does not undo the answer to our own write.
"""

from collections.abc import Callable, Iterable, Mapping

from kube.client import Client, Obj
from kube.resources import Resource

Key = tuple[str, str]
"""(namespace, name); the namespace of a cluster-scoped object is empty."""
Listener = Callable[[Resource, Obj | None, Obj | None], None]
Objects = list[Obj]
Snapshot = Mapping[Key, tuple[str, str]]
"""(uid, resourceVersion) of each object at one moment."""


class Store:
    """Objects by resource, namespace and name. Treat what it returns as frozen: it is shared."""

    def put(self, resource: Resource, obj: Obj) -> bool:
        """Take an object as observed; returns whether it is news. An older version of the same uid is ignored."""
        raise NotImplementedError

    def remove(self, resource: Resource, namespace: str | None, name: str, *, uid: str | None = None) -> bool:
        """Forget an object (with `uid`: only this very one); returns whether it was there."""
        raise NotImplementedError

    def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj | None:
        """One object, if known."""
        raise NotImplementedError

    def list(self, resource: Resource, namespace: str | None = None) -> Objects:
        """All known objects of a resource, in one namespace or in all."""
        raise NotImplementedError

    def index(self, resource: Resource, name: str, keys: Callable[[Obj], Iterable[str]]) -> None:
        """Keep an index under `name`: `keys` gives the values under which an object is found."""
        raise NotImplementedError

    def by_index(self, resource: Resource, name: str, value: str) -> Objects:
        """The objects that the index has under `value`."""
        raise NotImplementedError

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(resource, old or None, new or None)` after each change, in the order of changes."""
        raise NotImplementedError

    def snapshot(self, resource: Resource, namespace: str | None = None) -> Snapshot:
        """Who is known now; take it before a list is requested, and hand it to `replace`."""
        raise NotImplementedError

    def replace(
        self, resource: Resource, items: Iterable[Obj], *, namespace: str | None = None, before: Snapshot | None = None
    ) -> None:
        """Take a list as the truth; listeners hear exactly the differences, vanished objects among them.

        What was put since `before` is younger than the list, and stays.
        """
        raise NotImplementedError

    async def sweep(
        self, client: Client, resource: Resource, *, namespace: str | None = None, label_selector: str = ""
    ) -> int:
        """Remove ghosts, objects that vanished unseen (kopf reports none after a relist); returns how many.

        The selector must be that of the source, or everything it does not select is taken for a ghost.
        Raises ApiError and Unreachable, and then changes nothing.
        """
        raise NotImplementedError
