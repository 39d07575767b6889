"""`pomona agent` on a machine without a network: `python -m tests.support.agent_on_loopback agent ...`.

The API server is away, and the address of the host is one of loopback, which no cluster could reach; the rest is the
real agent.
"""

import ipaddress

from cli.main import main
from metal_agent import agent
from metal_agent.cluster import address


def _accept_loopback(text: str) -> str:
    return str(ipaddress.ip_address(text))


if __name__ == "__main__":
    address.check_address = _accept_loopback
    agent.PATIENCE_SECONDS = 0.5  # type: ignore[misc]  # the API server does not answer in any case
    main()
