"""The surroundings of a runner, without a network."""

from pathlib import Path
from typing import Any

from metal_agent.memory.ledger import Ledger
from metal_agent.native.engine_keys import EngineKeys
from metal_agent.supervise.host_parts import Exposure, RunnerContext
from metal_agent.supervise.records import Records
from metal_agent.weights import HostWeights


def build_context(folder: Path, ledger: Ledger, exposure: Exposure) -> RunnerContext:
    """Return the context of runners whose state is in `folder`."""
    session: Any = None
    return RunnerContext(
        folder=folder,
        records=Records(folder / "processes"),
        keys=EngineKeys(folder / "keys"),
        weights=HostWeights(folder / "weights", folder),
        ledger=ledger,
        session=session,
        exposure=exposure,
        secret=lambda _namespace, _name: None,
        changed=lambda _runner: None,
    )
