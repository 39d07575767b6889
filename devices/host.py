"""This machine: which system's probes are asked. Each system's are imported only there."""

import sys

from devices.facts import HostFacts


def read() -> HostFacts:
    """Probe this machine; what a probe cannot tell is None."""
    if sys.platform == "darwin":
        from devices import macos  # noqa: PLC0415 - only there

        return macos.read()
    from devices import linux  # noqa: PLC0415 - only there

    return linux.read()
