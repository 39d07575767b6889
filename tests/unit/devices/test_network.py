"""The messages of a routing socket that are changes; tests of the agent's address check that changes are received."""

import struct

import pytest

from devices.network import is_change


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(0x1, True, id="RTM_ADD"),
        pytest.param(0x2, True, id="RTM_DELETE"),
        pytest.param(0xC, True, id="RTM_NEWADDR"),
        pytest.param(0xD, True, id="RTM_DELADDR"),
        pytest.param(0xE, True, id="RTM_IFINFO"),
        pytest.param(0x4, False, id="RTM_GET"),
        pytest.param(0x7, False, id="RTM_MISS, which our own look for a route brings about where there is none"),
    ],
)
def test_a_lookup_of_a_route_is_no_change(kind: int, changes: bool) -> None:
    # <net/route.h>: rtm_msglen, rtm_version, rtm_type.
    assert is_change(struct.pack("=HBB", 92, 5, kind) + bytes(88)) is changes


def test_an_unknown_message_counts_as_a_change() -> None:
    assert is_change(b"\x00")
