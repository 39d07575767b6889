"""This host's EndpointSlices: one for each service that it serves, whose one endpoint is the proxy's port for it.

A host that was out of touch may have been replaced meanwhile: its endpoint is made ready only while its Lease is
fresh, and after a gap only for what a fresh list still assigns to it. Making an endpoint not ready is always allowed.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import structlog

from crds.meta import (
    API_VERSION,
    HTTPS,
    LABEL_MANAGED_BY,
    LABEL_SERVICE_NAME,
    LABEL_SLICE_MANAGED_BY,
    MANAGED_BY,
    SLICE_MANAGED_BY,
    slice_name,
)
from kube.client import Client, Obj
from kube.errors import Invalid, NotFound
from kube.resources import ENDPOINT_SLICES

FIELD_MANAGER: Final = "pomona-metal-agent"

Service = tuple[str, str]
"""Namespace and name."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Member:
    """One process behind a service, as its endpoint sees it."""

    uid: str
    name: str
    ready: bool
    stopping: bool = False
    """Ends after the requests that it still answers."""


def service_of(slice_: Obj, host: str) -> Service | None:
    """Tell whose slice it is, if it is one of `host`."""
    name, _, owner = slice_["metadata"]["name"].partition(".")
    return (slice_["metadata"]["namespace"], name) if owner == host else None


def desired(
    service: Service, host: str, address: str, port: int | None, members: Sequence[Member], *, tls: bool = False
) -> Obj | None:
    """The slice of `service` on `host`, with a certificate or without; None when nothing of it is here."""
    if not members or port is None:
        return None
    namespace, name = service
    ready = any(member.ready for member in members)
    stopping = not ready and any(member.stopping for member in members)
    return {
        "metadata": {
            "name": slice_name(name, host),
            "namespace": namespace,
            "labels": {
                LABEL_SERVICE_NAME: name,
                LABEL_SLICE_MANAGED_BY: SLICE_MANAGED_BY,
                LABEL_MANAGED_BY: MANAGED_BY,
            },
            "ownerReferences": [
                {"apiVersion": API_VERSION, "kind": "MetalProcess", "name": member.name, "uid": member.uid}
                for member in members
            ],
        },
        "addressType": f"IPv{ipaddress.ip_address(address).version}",
        # The name is that of the Service's port, by which Kubernetes joins the two, with a certificate or without.
        "ports": [{"name": "http", "port": port, "protocol": "TCP"} | ({"appProtocol": HTTPS} if tls else {})],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": ready, "serving": ready or stopping, "terminating": stopping},
            }
        ],
    }


class Endpoints:
    """Keeps the slices of `host` as `wanted` says, which is asked for the slice of a service when it is written."""

    def __init__(self, client: Client, host: str, wanted: Callable[[Service], Obj | None]) -> None:
        self._client = client
        self._host = host
        self._wanted = wanted
        self._applied: dict[Service, Obj | None] = {}
        # A withdrawal must never be overtaken by an earlier write that said ready.
        self._locks: WeakValueDictionary[Service, asyncio.Lock] = WeakValueDictionary()

    def forget(self) -> None:
        """Assume nothing about what the API has: the controller may have taken our slices away."""
        self._applied.clear()

    async def found(self) -> set[Service]:
        """Ask the API for which services it has slices of this host. Raises ApiError and Unreachable."""
        listed = await self._client.list(ENDPOINT_SLICES, label_selector=f"{LABEL_SLICE_MANAGED_BY}={SLICE_MANAGED_BY}")
        return {service for item in listed.items if (service := service_of(item, self._host)) is not None}

    async def missed(self) -> set[Service]:
        """Ask the API which slices are not as they were left, and assume nothing about them any more. Raises as found.

        What takes a slice away that this host is still to have, such as a controller that held it for dead, says no
        word of it here.
        """
        found = await self.found()
        missed = {service for service, left in self._applied.items() if (left is not None) != (service in found)}
        for service in missed:
            del self._applied[service]
        return missed

    async def publish(self, service: Service) -> None:
        """Make the slice of `service` what it should be. Raises ApiError and Unreachable."""
        async with self._locks.setdefault(service, asyncio.Lock()):
            wanted = self._wanted(service)
            if service in self._applied and self._applied[service] == wanted:
                return
            self._applied.pop(service, None)
            if wanted is None:
                await self._remove(service)
            else:
                await self._apply(service, wanted)
                log.info("endpoint", service="/".join(service), conditions=wanted["endpoints"][0]["conditions"])
            self._applied[service] = wanted

    async def _apply(self, service: Service, wanted: Obj) -> None:
        try:
            await self._client.apply(ENDPOINT_SLICES, wanted, field_manager=FIELD_MANAGER)
        except Invalid as error:
            # A slice is of IPv4 or IPv6 for ever: a host that changed from one to the other needs a new one.
            if all(field != "addressType" for field, _ in error.causes):
                raise
            await self._remove(service)
            await self._client.apply(ENDPOINT_SLICES, wanted, field_manager=FIELD_MANAGER)

    async def _remove(self, service: Service) -> None:
        namespace, name = service
        try:
            await self._client.delete(ENDPOINT_SLICES, slice_name(name, self._host), namespace)
        except NotFound:
            return
        log.info("endpoint removed", service="/".join(service))
