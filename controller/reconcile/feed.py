"""The feed of one scope: the watches that keep the store equal to the whole cluster, or to one namespace.

A namespace that refuses the controller (it is gone, or the controller is not bound there) holds up no other one: it is
asked again from time to time, and followed once it answers.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from controller.reconcile.kopf_feed import follow, load
from crds.meta import HOSTS_NAMESPACE, OURS
from kube.client import Client
from kube.credentials import Credentials
from kube.errors import ApiError, Forbidden, Unreachable
from kube.resources import (
    ACCELERATOR_POOLS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    GATEWAY_KEYS,
    INFERENCE_SERVICES,
    JOBS,
    METAL_HOSTS,
    METAL_PROCESSES,
    MODEL_ROUTES,
    MODELS,
    NETWORK_POLICIES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SERVICES,
)
from kube.store import Store
from kube.watch import Selection, reflect

REFUSED_SECONDS: Final = 60.0
"""Pause before a namespace that refused is asked again."""
RETRY_SECONDS: Final = 5.0
"""Pause before a namespace is asked again that could not be asked."""

WRITTEN_BY_USERS: Final = (Selection(MODELS), Selection(INFERENCE_SERVICES))
"""Followed by kopf."""
_CHILDREN: Final = (DEPLOYMENTS, SERVICES, JOBS, PODS, PVCS, ENDPOINT_SLICES, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES)
REPORTED_IN_NAMESPACES: Final = tuple(Selection(resource, label_selector=OURS) for resource in _CHILDREN)
REPORTED: Final = (
    *map(Selection, (METAL_HOSTS, METAL_PROCESSES, NODES, ACCELERATOR_POOLS, GATEWAY_KEYS, MODEL_ROUTES)),
    *REPORTED_IN_NAMESPACES,
)
"""Followed by `kube.watch`: agents and the cluster report them again and again, and an event costs kopf 1 ms of CPU."""

log = structlog.get_logger()


class Feed:
    """The watches of one scope.

    Args:
        client: the API server.
        store: the store to keep equal.
        namespace: the only namespace; None: the whole cluster, with its hosts and nodes.
    """

    def __init__(self, client: Client, store: Store, namespace: str | None = None) -> None:
        """Select the kinds to watch: what users write goes through kopf, other kinds through `kube.watch`."""
        self._client = client
        self._store = store
        self.namespace = namespace
        self._reported = REPORTED if namespace is None else REPORTED_IN_NAMESPACES
        self.watched: tuple[Selection, ...] = (*WRITTEN_BY_USERS, *self._reported)
        self.settled = asyncio.Event()
        """Set once the store has all objects of the scope, or the namespace has refused."""

    async def run(
        self,
        credentials: Callable[[], Credentials],
        *,
        on_complete: Callable[[str | None], None],
        on_restart: Callable[[], None],
    ) -> None:
        """Follow for ever.

        Args:
            credentials: makes those of kopf, in its thread.
            on_complete: gets the namespace, None for the whole cluster, once the store has all objects of the scope.
            on_restart: called before each start of kopf but the first.
        """
        client, store, namespace = self._client, self._store, self.namespace
        if namespace is not None:
            await self._wait_until_readable(namespace)

        # Each is set once the store has all objects of its kind.
        kopf_synced = asyncio.Event()
        watches_synced = {selection: asyncio.Event() for selection in self._reported}
        async with asyncio.TaskGroup() as tasks:
            # Start: kopf follows what users write, `reflect` one kind each, and for the cluster the grants of hosts.
            kopf = follow(
                client, store, WRITTEN_BY_USERS, credentials, kopf_synced, namespace=namespace, on_restart=on_restart
            )
            tasks.create_task(kopf)
            for selection, synced in watches_synced.items():
                tasks.create_task(reflect(client, store, selection._replace(namespace=namespace), synced))
            if namespace is None:
                for resource in (ROLES, ROLE_BINDINGS):
                    tasks.create_task(reflect(client, store, Selection(resource, HOSTS_NAMESPACE, OURS)))

            # Report once all of them are complete; the grants of hosts are not waited for.
            for synced in (kopf_synced, *watches_synced.values()):
                await synced.wait()
            on_complete(namespace)
            self.settled.set()

    async def _wait_until_readable(self, namespace: str) -> None:
        """List everything into the store, and retry after a pause until that succeeds.

        A refusal sets `settled`, so that the start of the controller does not wait for this namespace.
        """
        while True:
            pause_seconds = RETRY_SECONDS
            try:
                await load(self._client, self._store, self.watched, namespace)
            except Forbidden as error:
                pause_seconds = REFUSED_SECONDS
                if not self.settled.is_set():
                    log.warning("namespace_refused", namespace=namespace, error=str(error))
                self.settled.set()
            except (ApiError, Unreachable) as error:
                log.warning("list_failed", namespace=namespace, error=str(error))
            else:
                return
            await asyncio.sleep(pause_seconds)
