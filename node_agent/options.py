"""Options of the node agent, as the command line states them."""

from dataclasses import dataclass, field
from pathlib import Path

from crds.meta import GROUP, METRIC_PREFIX
from devices.node_hardware import NodeRoots


@dataclass(frozen=True, slots=True)
class NodeAgentOptions:
    """Options of one node agent.

    Attributes:
        node_name: the Node on which this agent runs.
        interval_seconds: time from one probe of the hardware to the next.
        label_prefix: what the names of its labels begin with, before the slash.
        metric_prefix: what the names of its metrics begin with, before the underscore.
        metrics_port: port of metrics and health, on every address; 0: not served.
        rest_port: port of the REST API; 0: not served.
        api_key_file: file with the key of the REST API, read at each request; None: no key, and loopback only.
        roots: the folders at which this process sees its node.
    """

    node_name: str
    interval_seconds: float = 30.0
    label_prefix: str = GROUP
    metric_prefix: str = METRIC_PREFIX
    metrics_port: int = 9100
    rest_port: int = 8787
    api_key_file: Path | None = None
    roots: NodeRoots = field(default_factory=NodeRoots)
