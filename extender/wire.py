"""The JSON of kube-scheduler's extender protocol: ExtenderArgs in, ExtenderFilterResult and HostPriorityList out.

The scheduler's structs have no JSON tags, so that their keys begin with a capital, while those of Pod and Node do not;
it decodes keys in any case, and so does this module. What it sends may be large: only what a score needs is decoded,
and the rest is sent back as it came.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_NOTHING: Final = msgspec.Raw(b"null")
_MOST_CONTAINERS: Final = 256


class UndecodableArgsError(ValueError):
    """A request that is no ExtenderArgs, so that nothing can be answered for its nodes."""


class PodFacts(NamedTuple):
    """The part of a pod by which its model and devices are found."""

    namespace: str = ""
    labels: Mapping[str, str] = {}
    devices: Mapping[str, int] = {}
    """Extended resources that the pod requests, with their number."""


class ExtenderArgs(NamedTuple):
    """A decoded request."""

    pod: PodFacts | None
    """None: the pod could not be read, so that nothing is known of its model."""
    names: list[str]
    """Names of the candidate nodes."""
    names_json: bytes
    """The same as the request has them."""
    nodes: list[msgspec.Raw] | None = None
    """The nodes in the order of their names, of a scheduler that wants nodes back (nodeCacheCapable: false)."""


class _Resources(msgspec.Struct, frozen=True):
    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class _Container(msgspec.Struct, frozen=True):
    resources: _Resources | None = None


_Containers = Annotated[list[_Container], Meta(max_length=_MOST_CONTAINERS)]


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: _Containers | None = None
    init_containers: _Containers | None = None


class _PodMetadata(msgspec.Struct, frozen=True):
    namespace: str = ""
    labels: dict[str, str] | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: _PodMetadata
    spec: _PodSpec | None = None


class _NodeMetadata(msgspec.Struct, frozen=True):
    name: str


class _Node(msgspec.Struct, frozen=True):
    metadata: _NodeMetadata


class _NodeList(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw] | None = None


_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_names = msgspec.json.Decoder(list[str] | None).decode
_decode_pod = msgspec.json.Decoder(_Pod | None).decode
_decode_nodes = msgspec.json.Decoder(_NodeList | None).decode
_decode_node = msgspec.json.Decoder(_Node).decode
_encode = msgspec.json.encode


def decode_args(body: bytes | bytearray) -> ExtenderArgs:
    """Decode a request, which lists the candidate nodes by name (NodeNames) or as whole Nodes.

    A scheduler with `nodeCacheCapable: true` sends names. A request with neither has no candidates.

    Raises:
        UndecodableArgsError: the candidate nodes cannot be read. A pod that cannot be read is None.
    """
    try:
        # _NOTHING is null, for a field that is missing; _UNDECODABLE: errors of decoding.
        fields = {key.lower(): value for key, value in _decode_object(body).items()}

        # 1. The candidates by name.
        names_json = fields.get("nodenames", _NOTHING)
        names = _decode_names(names_json)
        if names is not None:
            return ExtenderArgs(_read_pod(fields), names, bytes(names_json))

        # 2. The candidates as whole Nodes.
        listed = _decode_nodes(fields.get("nodes", _NOTHING))
        nodes = listed.items if listed is not None else None
        if nodes is None:
            return ExtenderArgs(_read_pod(fields), [], b"[]")  # no candidates
        names = [_decode_node(node).metadata.name for node in nodes]
    except _UNDECODABLE as error:
        raise UndecodableArgsError(f"the request is no ExtenderArgs: {error}") from error
    # The answer lists Nodes then, and its names are null.
    return ExtenderArgs(_read_pod(fields), names, b"null", nodes)


def _read_pod(fields: Mapping[str, msgspec.Raw]) -> PodFacts | None:
    """Return the namespace, labels and requested devices of the pod in a request; None if it cannot be decoded.

    Its containers run side by side, so their devices add up; init containers run before, one after the other.
    """
    try:
        # _NOTHING is null, for a request without a pod; _UNDECODABLE: errors of decoding.
        pod = _decode_pod(fields.get("pod", _NOTHING))
    except _UNDECODABLE:
        return None
    if pod is None:
        return None

    # devices: the number of each extended resource, such as nvidia.com/gpu
    spec = pod.spec or _PodSpec()
    devices: dict[str, int] = {}
    for container in spec.containers or ():
        for resource, count in _count_devices(container).items():
            devices[resource] = devices.get(resource, 0) + count
    for container in spec.init_containers or ():
        for resource, count in _count_devices(container).items():
            devices[resource] = max(devices.get(resource, 0), count)
    return PodFacts(pod.metadata.namespace, pod.metadata.labels or {}, devices)


def _count_devices(container: _Container) -> dict[str, int]:
    """Return the extended resources of a container: those that have a domain and a whole number."""
    resources = container.resources or _Resources()
    stated = {**(resources.limits or {}), **(resources.requests or {})}
    return {name: int(value) for name, value in stated.items() if "/" in name and _is_count(value)}


def _is_count(value: str | int) -> bool:
    if isinstance(value, int):
        return 0 < value < 1 << 16
    return value.isascii() and value.isdecimal() and len(value) < 6 and int(value) > 0  # noqa: PLR2004 - digits


def encode_filter_result(
    args: ExtenderArgs, failed: Mapping[str, str] = {}, unresolvable: Mapping[str, str] = {}
) -> bytes:
    """Return the ExtenderFilterResult: all candidates but those that are rejected, each of which has its reason.

    The scheduler gets candidates in the form in which it sent them: as names, or as whole Nodes.

    Args:
        args: the request.
        failed: reason by name of nodes that may fit later.
        unresolvable: reason by name of nodes that never fit, where no preemption is tried.
    """
    # Without rejected nodes, the candidates go back as they came.
    if not failed and not unresolvable:
        return _render_result(args, args.names_json, args.nodes, b"{}", b"{}")

    # Indices, not names: whole Nodes are in the same order as their names.
    rejected = failed.keys() | unresolvable.keys()
    passed = [index for index, name in enumerate(args.names) if name not in rejected]
    if args.nodes is None:
        names_json, nodes = _encode([args.names[index] for index in passed]), None
    else:
        names_json, nodes = b"null", [args.nodes[index] for index in passed]
    return _render_result(args, names_json, nodes, _encode(failed), _encode(unresolvable))


def _render_result(
    args: ExtenderArgs, names: bytes, nodes: list[msgspec.Raw] | None, failed: bytes, unresolvable: bytes
) -> bytes:
    """Return the ExtenderFilterResult; `names`, `failed` and `unresolvable` are JSON already.

    `nodes` are the whole Nodes; they are null in the answer if the request had names only.
    """
    listed = b"null" if args.nodes is None else b'{"metadata":{},"items":%b}' % _encode(nodes)
    return b'{"Nodes":%b,"NodeNames":%b,"FailedNodes":%b,"FailedAndUnresolvableNodes":%b,"Error":""}' % (
        listed,
        names,
        failed,
        unresolvable,
    )


def encode_filter_error(message: str) -> bytes:
    """Return the ExtenderFilterResult of a request that cannot be decoded."""
    return b'{"Nodes":null,"NodeNames":null,"FailedNodes":null,"FailedAndUnresolvableNodes":null,"Error":%b}' % (
        _encode(message)
    )


def encode_priority(name: str, score: int) -> bytes:
    """Return the HostPriority of a node, which is an item of a HostPriorityList."""
    return b'{"Host":%b,"Score":%d}' % (_encode(name), score)


def encode_priorities(priorities: Iterable[bytes]) -> bytes:
    """Return the HostPriorityList of items that `encode_priority` has made."""
    return b"[%b]" % b",".join(priorities)
