"""The API server's audit log: every call of one user, and the creations by which a benchmark's clients load it.

The log counts and times calls on the server's own clock, and neither the controller nor a client does anything for it.
Bodies are kept too, so that a bare loop can repeat a controller's writes.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from crds.meta import GROUP

WRITES: Final = frozenset({"create", "update", "patch", "delete"})
LOOK_SECONDS: Final = 0.25


class _Status(msgspec.Struct, frozen=True):
    code: int = 0


class _Reference(msgspec.Struct, frozen=True):
    resource: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""


class _User(msgspec.Struct, frozen=True):
    username: str


class Call(msgspec.Struct, rename="camel", frozen=True):
    """One finished call; `request_object` is its body, if it was recorded."""

    verb: str
    request_uri: str = msgspec.field(name="requestURI")
    user: _User
    request_received_timestamp: datetime
    stage_timestamp: datetime
    object_ref: _Reference = _Reference()
    response_status: _Status = _Status()
    request_object: Any = None

    @property
    def resource(self) -> str:
        """The plural of the resource, with the subresource: `pods/status`."""
        reference = self.object_ref
        return f"{reference.resource}/{reference.subresource}" if reference.subresource else reference.resource

    @property
    def succeeded(self) -> bool:
        """True for a 2xx answer."""
        return 200 <= self.response_status.code < 300  # noqa: PLR2004 - success

    @property
    def is_event(self) -> bool:
        """True for a write of a Kubernetes Event."""
        return self.object_ref.resource == "events"


class AuditLog:
    """The audit log of a control plane whose `user` (the controller) is watched; Leases and watches are left out."""

    def __init__(self, folder: Path, user: str) -> None:
        self.user = user
        self.path = folder / "audit.log"
        self._policy = folder / "audit-policy.yaml"
        creations = {"level": "Metadata", "verbs": ["create"], "resources": [{"group": GROUP}]}
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "resources": [{"group": "coordination.k8s.io"}]},
                {"level": "None", "verbs": ["watch"]},
                {"level": "Request", "users": [user]},
                creations,
                {"level": "None"},
            ],
        }
        self._policy.write_bytes(msgspec.json.encode(policy))
        self.path.touch()

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the API server that write this log."""
        return f"--audit-policy-file={self._policy}", f"--audit-log-path={self.path}"

    @property
    def size_bytes(self) -> int:
        """Size of the log now: a place to read from later."""
        return self.path.stat().st_size

    def read(self, start_bytes: int) -> list[Call]:
        """Return all calls since the log had this size, in the order in which they were received."""
        with self.path.open("rb") as file:
            file.seek(start_bytes)
            calls = [msgspec.json.decode(line, type=Call) for line in file if line.endswith(b"\n")]
        return sorted(calls, key=lambda call: call.request_received_timestamp)

    def of_user(self, calls: Iterable[Call]) -> Iterator[Call]:
        """Yield the calls of the watched user."""
        return (call for call in calls if call.user.username == self.user)

    async def wait_for_silence(self, seconds: float, limit_seconds: float, sample: "CpuSample | None" = None) -> None:
        """Wait until no call was logged for `seconds`; `sample` keeps the CPU time at the last call.

        Raises:
            TimeoutError: there were calls until `limit_seconds` had passed.
        """
        deadline = time.monotonic() + limit_seconds
        size, changed_at = -1, 0.0
        while True:
            now = time.monotonic()
            if self.size_bytes != size:
                size, changed_at = self.size_bytes, now
                if sample:
                    sample.take()
            elif now - changed_at >= seconds:
                return
            if now >= deadline:
                raise TimeoutError(f"calls for more than {limit_seconds} s: see {self.path}")
            await asyncio.sleep(LOOK_SECONDS)


class CpuSample:
    """CPU seconds of the process `pid` since this object was made, as of the last `take`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = self._read()
        self.seconds = 0.0

    def take(self) -> None:
        """Read the CPU time."""
        self.seconds = self._read() - self._before

    def _read(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system
