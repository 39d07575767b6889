"""`GatewayKey`: a key for the gateway of the cluster, which services it opens, and how much it may ask for.

The controller makes the key and keeps it in Secret NAME-key; the status has its digest, by which the gateway recognises
it. `may_use` is the one place that decides whether a key opens a service: controller and gateway both call it.
"""

import base64
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from msgspec import Meta

from crds.meta import Amount, ApiObject, ApiStruct, Conditions, ShortText, Time, rule

EVERY_NAMESPACE: Final = "*"
"""Entry of `spec.access.namespaces` of a service that stands for all namespaces."""
MOST_PREVIOUS_KEYS: Final = 4
MOST_COUNTED_REPLICAS: Final = 50
"""Replicas of the gateway whose requests are counted."""
KEY_ENTRY: Final = "key"
"""Entry of the Secret with the key."""

_DAY_SECONDS: Final = 24 * 3600
_YEAR_SECONDS: Final = 365 * _DAY_SECONDS
_LONGEST_PATTERN: Final = 128
_WITH_STARS: Final = r"[-a-z0-9]*(\*[-a-z0-9]*){0,2}"
"""A name with two stars at most: more select nothing that people want, and take longer to compare."""
_ServicePattern = Annotated[
    str,
    Meta(
        min_length=1, max_length=_LONGEST_PATTERN, extra_json_schema={"pattern": rf"^({_WITH_STARS}/)?{_WITH_STARS}$"}
    ),
]
"""NAME or NAMESPACE/NAME, with two stars in each at most."""
_Limit = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
RequestsPerMinute = Annotated[_Limit | None, "The most requests in a minute. Default: no limit."]
TokensPerMinute = Annotated[
    _Limit | None, "The most tokens of prompts and answers together in a minute. Default: no limit."
]
ConcurrentRequests = Annotated[_Limit | None, "The most requests at once. Default: no limit."]


class GatewayKeySpec(ApiStruct, frozen=True):
    """The services that a key opens, for how long, and how much it may ask for."""

    services: Annotated[
        list[_ServicePattern],
        Meta(max_length=64),
        "Services that the key opens: NAME of the namespace of the key, or NAMESPACE/NAME. * stands for any letters "
        "but /, at most twice in each name: chat-* are services of this namespace and */* all. Of other namespaces it "
        "opens only services whose spec.access admits this one. By a ModelRoute the key reaches those of its services "
        "that are listed here; the name of the route counts for nothing. Default: all services that this namespace "
        "may use.",
    ] = []
    suspend: Annotated[
        bool, "If true, the gateway refuses the key and ends its running streams. Set suspend to false to go on."
    ] = False
    expires_at: Annotated[Time | None, "When the gateway begins to refuse the key. Default: never."] = None
    overlap_seconds: Annotated[
        Annotated[int, Meta(ge=0, le=_YEAR_SECONDS)],
        "Time for which a key that was replaced stays valid, so that clients can change over. A smaller value also "
        "shortens the time of keys that were replaced already; 0 ends them at once.",
    ] = _DAY_SECONDS
    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    concurrent_requests: ConcurrentRequests = None


class PreviousKey(ApiStruct, frozen=True):
    """A key that was replaced and is still valid."""

    digest: Annotated[ShortText, "SHA-256 of the key in hexadecimal digits."]
    valid_until: Annotated[Time, "When the gateway begins to refuse it."]


class CountedReplica(ApiStruct, frozen=True):
    """The part of one replica of the gateway in the usage of a key."""

    replica: Annotated[ShortText, "Identifier of the process."]
    requests: Annotated[Amount, "Requests that this process has counted."] = 0
    tokens: Annotated[Amount, "Tokens that this process has counted."] = 0


class GatewayKeyUsage(ApiStruct, frozen=True):
    """The requests of a key and their tokens, and the time of the last one."""

    since: Annotated[Time, "When the controller began to count."] = ""
    requests: Annotated[Amount, "Requests to services that the limits of the key admitted."] = 0
    tokens: Annotated[Amount, "Tokens of their prompts and answers together, as engines report them."] = 0
    last_used_at: Annotated[
        Time | None,
        "When the controller found the last of these requests, up to 10 minutes after its end. Absent if there was "
        "none.",
    ] = None
    counted: Annotated[
        list[CountedReplica],
        Meta(max_length=MOST_COUNTED_REPLICAS),
        "What these sums include of each replica of the gateway, so that nothing is counted twice.",
    ] = []


class GatewayKeyStatus(ApiStruct, frozen=True):
    """Observed state of a key, as the controller reports it."""

    observed_generation: Annotated[Amount | None, "The metadata.generation from which this status was computed."] = None
    digest: Annotated[
        ShortText,
        "SHA-256 of the key in Secret NAME-key, in hexadecimal digits. An edit of the Secret is followed within 10 "
        "minutes: a key of your own has at least 32 printable ASCII characters without blanks. Empty if there is no "
        "key; the condition Ready says why.",
    ] = ""
    previous: Annotated[
        list[PreviousKey],
        Meta(max_length=MOST_PREVIOUS_KEYS),
        "Keys that were replaced and are still valid for spec.overlapSeconds; of more than four the latest.",
    ] = []
    rotation: Annotated[
        ShortText,
        "Identifier of the last replacement of the key. Each new value of the annotation "
        "inference.pomona.dev/rotate-key replaces the key in Secret NAME-key.",
    ] = ""
    usage: Annotated[
        GatewayKeyUsage | None,
        "How much the key was used. While it is in use, this is up to 10 minutes old. Absent if it is unknown, because "
        "no replica of the gateway was read yet.",
    ] = None
    conditions: Conditions = []


class GatewayKey(ApiObject, frozen=True, kw_only=True):
    """A key with which clients ask services through the gateway of the cluster."""

    spec: Annotated[GatewayKeySpec, "The services that the key opens, for how long, and how much it may ask for."] = (
        GatewayKeySpec()
    )
    status: Annotated[GatewayKeyStatus, "State of the key, as the controller reports it."] = GatewayKeyStatus()


NAME_RULE: Final = rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 40",
    "the name becomes that of a Secret: use at most 40 lower-case letters, digits and '-', starting with a letter",
)


def key_secret_name(name: str) -> str:
    """Return the name of the Secret with the key of a GatewayKey."""
    return f"{name}-key"


def read_key(secret: Mapping[str, Any]) -> bytes:
    """Return the key in a Secret without the blanks around it, as a file ends with a line feed; empty: it has none."""
    return base64.b64decode((secret.get("data") or {}).get(KEY_ENTRY) or "").strip()


def digest_key(key: str) -> str:
    """Return the digest of a key by which the gateway recognises it.

    A fast hash is enough for random keys; a password would need a slow one.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def read_expiry_seconds(spec: GatewayKeySpec) -> float:
    """Return when a key expires, in seconds since 1970: infinity if never.

    The API server takes times that Python cannot read: such a key has expired.
    """
    if spec.expires_at is None:
        return math.inf
    try:
        return datetime.fromisoformat(spec.expires_at.upper()).timestamp()
    except (ValueError, OverflowError):
        return -math.inf


def may_use(
    key_namespace: str,
    patterns: Collection[str],
    service_namespace: str,
    service_name: str,
    access_namespaces: Iterable[str],
) -> bool:
    """Return whether a key opens a service.

    Args:
        key_namespace: the namespace of the GatewayKey.
        patterns: its `spec.services`.
        service_namespace: the namespace of the service.
        service_name: the name of the service.
        access_namespaces: its `spec.access.namespaces`.
    """
    if key_namespace != service_namespace and not {key_namespace, EVERY_NAMESPACE}.intersection(access_namespaces):
        return False
    if not patterns:
        return True
    for pattern in patterns:
        namespace, slash, name = pattern.rpartition("/")
        is_of_namespace = _matches(namespace, service_namespace) if slash else key_namespace == service_namespace
        if is_of_namespace and _matches(name, service_name):
            return True
    return False


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern fits a text, whose letters are looked at once for each part between two stars.

    Each part is taken at its first place: if a later one fits, too, nothing is won by it.
    """
    first, *others = pattern.split("*")
    if not others:
        return pattern == text
    *inner, last = others
    start, end = len(first), len(text) - len(last)
    if start > end or not (text.startswith(first) and text.endswith(last)):
        return False
    for part in inner:
        found = text.find(part, start, end)
        if found < 0:
            return False
        start = found + len(part)
    return True
