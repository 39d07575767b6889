"""The options of an agent, and the error for an agent that cannot start with them."""

from pathlib import Path

import msgspec

from artifacts.repositories.address_policy import Networks
from crds.meta import METRIC_PREFIX
from gateway.proxy.config import Tls
from metal_agent.holds.owner_policy import NO_POLICY, OwnerPolicy


class StartError(Exception):
    """The agent cannot start with its options; the message says how to change them."""


class OptionsError(StartError):
    """The agent can never start with its options, or with this state folder: a service manager does not try again."""


class AgentOptions(msgspec.Struct, frozen=True):
    """The owner's options. `address` and `memory_budget_bytes` are determined by the agent if they are None."""

    name: str
    folder: Path
    address: str | None = None
    first_port: int = 18000
    last_port: int = 18999
    file_root: Path | None = None
    allowed_networks: Networks = ()
    """Private networks that sources may lead to."""
    memory_budget_bytes: int | None = None
    metrics_place: tuple[str, int] | None = None
    """Address and port at which the agent serves its metrics; None to serve none."""
    metric_prefix: str = METRIC_PREFIX
    """Prefix of metric names that are shared with another project."""
    tls: Tls | None = None
    """Certificate and key of the listeners; None for plain HTTP."""
    owner_policy: OwnerPolicy = NO_POLICY
    keep_awake: bool = True
    """Keep the machine awake while a model is loaded or loading."""
    benchmarks: bool = True
    """Measure the speed of each model once, while the machine serves nothing."""
