"""GatewayKeys and their Secrets in memory, with a reconciler that may die between any two writes."""

import base64
from datetime import datetime, timedelta
from typing import Any, Final

from controller.gateway.key_reconciler import KeySecrets, decide_key, key_reconciler
from controller.gateway.usage_reader import UsageReader
from controller.reconcile.indexes import controller_of
from controller.reconcile.plan import Plan, Snapshot
from crds.gatewaykey import digest_key
from kube.apply import merge_conditions
from kube.client import Client, Obj
from kube.errors import Forbidden, NotFound
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, SECRETS, ObjectKey, Resource
from tests.support.api_objects import NAMESPACE, NOW, service, store
from tests.unit.controller.gateway.key_objects import KEY, gateway_key

APP: Final = ObjectKey(NAMESPACE, "app")


class CrashError(Exception):
    """The controller has died."""


class KeyWorld(Client):
    """An API server with GatewayKeys and Secrets; the store shows all GatewayKeys at once.

    Attributes:
        now: the time.
        secrets: by namespace and name.
        reads: number of Secrets that were read.
        is_forbidden: the controller may read no Secret.
        writes_left: number of writes until the controller dies; None: it lives.
        overwritten: the keys that the controller has replaced in Secrets.
    """

    def __init__(self, *keys: Obj, has_service: bool = True) -> None:
        self.store = store(*((GATEWAY_KEYS, key) for key in keys or (gateway_key(),)))
        if has_service:
            self.store.put(INFERENCE_SERVICES, service())
        self.secrets: dict[ObjectKey, Obj] = {}
        self.now: datetime = NOW
        self.reads = 0
        self.is_forbidden = False
        self.writes_left: int | None = None
        self.overwritten: list[str] = []
        self._version = 100
        self.start()

    def start(self) -> None:
        """Start the controller anew."""
        self._known = KeySecrets(lambda: self.now)
        self.usage = UsageReader(self.store, lambda: self.now)
        self.reconciler = key_reconciler(self._known, self.usage, has_gateway=True)

    def next_version(self) -> str:
        self._version += 1
        return str(self._version)

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Obj:
        assert resource == SECRETS
        self.reads += 1
        if self.is_forbidden:
            raise Forbidden("get", status=403)
        if (found := self.secrets.get(ObjectKey(namespace or "", name))) is None:
            raise NotFound("get", status=404)
        return found

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def object(self, key: ObjectKey = APP) -> Obj:
        found = self.store.get(GATEWAY_KEYS, key.name, key.namespace)
        assert found is not None
        return found

    def status(self, key: ObjectKey = APP) -> Obj:
        status: Obj = self.object(key)["status"]
        return status

    def reason(self, key: ObjectKey = APP) -> str:
        (condition,) = self.status(key)["conditions"]
        reason: str = condition["reason"]
        return reason

    def message(self, key: ObjectKey = APP) -> str:
        (condition,) = self.status(key)["conditions"]
        message: str = condition["message"]
        return message

    def change(self, key: ObjectKey = APP, *, rotate: str | None = None, **spec: Any) -> None:
        """Edit a GatewayKey as a user does."""
        old = self.object(key)
        annotations = old["metadata"]["annotations"] | ({"inference.pomona.dev/rotate-key": rotate} if rotate else {})
        metadata = old["metadata"] | {"annotations": annotations, "resourceVersion": self.next_version()}
        self.store.put(GATEWAY_KEYS, old | {"metadata": metadata, "spec": old["spec"] | spec})

    def secret(self, key: ObjectKey = APP) -> Obj:
        return self.secrets[ObjectKey(key.namespace, f"{key.name}-key")]

    def text(self, key: ObjectKey = APP) -> str:
        """Return the key in a Secret."""
        return base64.b64decode(self.secret(key)["data"]["key"]).decode()

    def edit(self, text: str = KEY, key: ObjectKey = APP) -> None:
        """Put a key of the user into a Secret."""
        old = self.secret(key)
        self._put_secret(old | {"data": {"key": base64.b64encode(text.encode()).decode()}})

    def delete_secret(self, key: ObjectKey = APP) -> None:
        del self.secrets[ObjectKey(key.namespace, f"{key.name}-key")]

    def accepted(self, key: ObjectKey = APP) -> set[str]:
        """Return the digests that the gateway accepts for a GatewayKey now."""
        status = self.status(key)
        ends = {entry["digest"]: entry["validUntil"] for entry in status.get("previous", ())}
        digests = {digest for digest, end in ends.items() if datetime.fromisoformat(end) > self.now}
        return digests | ({status["digest"]} if "digest" in status else set())

    def accepts(self, text: str, key: ObjectKey = APP) -> bool:
        return digest_key(text) in self.accepted(key)

    async def reconcile(self, key: ObjectKey = APP) -> Plan:
        """Decide once, and make the writes of the plan. Raises CrashError at the write at which the controller dies."""
        assert self.reconciler.observe is not None
        inputs = await self.reconciler.observe(self, Snapshot(self.store, self.now), key)
        plan = decide_key(Snapshot(self.store, self.now, inputs), key, has_gateway=True)
        for resource, obj in plan.create:
            assert resource == SECRETS
            self._count_write()
            self._put_secret(obj | {"metadata": obj["metadata"] | {"uid": f"uid-{self.next_version()}"}})
            self._answer(obj)
        for patch in plan.patch:
            self._count_write()
            self._patch(patch.operations)
        if plan.status is not None and plan.status != self._status_as_decided(key):
            self._count_write()
            self._put_status(key, plan.status)
        return plan

    async def settle(self, key: ObjectKey = APP) -> Plan:
        """Reconcile until nothing is due at once; return the last plan."""
        for _ in range(10):
            plan = await self.reconcile(key)
            if plan.again_seconds is None or plan.again_seconds > 0:
                return plan
        raise AssertionError("it never settles")

    def _count_write(self) -> None:
        if self.writes_left is None:
            return
        if not self.writes_left:
            raise CrashError
        self.writes_left -= 1

    def _patch(self, operations: Any) -> None:
        (name, secret) = next(
            (name, secret)
            for name, secret in self.secrets.items()
            if secret["metadata"]["resourceVersion"] == operations[0]["value"]
        )
        self.overwritten.append(base64.b64decode(secret["data"]["key"]).decode())
        by_path = {operation["path"]: operation["value"] for operation in operations[1:]}
        metadata = secret["metadata"] | {"annotations": by_path["/metadata/annotations"]}
        self._put_secret(secret | {"metadata": metadata, "data": by_path["/data"]})
        self._answer(self.secrets[name])

    def _put_secret(self, secret: Obj) -> None:
        metadata = secret["metadata"] | {"resourceVersion": self.next_version()}
        self.secrets[ObjectKey(metadata["namespace"], metadata["name"])] = secret | {"metadata": metadata}

    def _answer(self, secret: Obj) -> None:
        assert controller_of(secret) is not None
        assert self.reconciler.written is not None
        metadata = secret["metadata"]
        self.reconciler.written(SECRETS, self.secrets[ObjectKey(metadata["namespace"], metadata["name"])])

    def _status_as_decided(self, key: ObjectKey) -> Obj:
        status = self.status(key)
        conditions = [
            {name: value for name, value in condition.items() if name != "lastTransitionTime"}
            for condition in status.get("conditions", ())
        ]
        return status | {"conditions": conditions}

    def _put_status(self, key: ObjectKey, status: Obj) -> None:
        old = self.object(key)
        conditions = merge_conditions(old["status"].get("conditions", []), status["conditions"], self.now)
        metadata = old["metadata"] | {"resourceVersion": self.next_version()}
        self.store.put(GATEWAY_KEYS, old | {"metadata": metadata, "status": status | {"conditions": conditions}})
