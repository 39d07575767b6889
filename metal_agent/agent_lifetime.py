"""The time of one agent, from its start to its end: when it began, what changes, and the request to stop everything."""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime

from metal_agent.change_counter import ChangeCounter


@dataclass(frozen=True, slots=True)
class AgentLifetime:
    """The time of one agent."""

    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when everything is to be drained and stopped."""
    recovered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engines that an earlier agent left running are adopted."""
    changes: ChangeCounter = field(default_factory=ChangeCounter)
    """Changes of the states of processes."""


class EverythingStopped(Exception):  # noqa: N818 - no error
    """Exception that cancels the loops of the agent's task group: everything was stopped on request."""
