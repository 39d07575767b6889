"""Checks of the connection: the way to the API server and back, clocks, the token, the address, and versions."""

import errno
import ipaddress
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from crds.meta import ADDRESS_ACCEPTED, REACHABLE, Condition
from crds.metalhost import MetalHostStatus
from launchd.service_definition import PROGRAM
from metal_agent.cluster.host_identity import advise_rejoin
from metal_agent.control.agent_status import ConnectionStatus
from metal_agent.doctor.finding import Finding, FindingVerdict

SKEW_WARNING_SECONDS: Final = 30.0
SKEW_PROBLEM_SECONDS: Final = 300.0
"""Clocks that far apart break tokens and certificates; a Lease of the future is ignored at 5 s already, at its first
sight only."""
LEAST_TOKEN_SHARE: Final = 0.25
"""A token with less of its lifetime left was not renewed when it should have been."""
_NETWORK_FIX: Final = "check the network, the address in the kubeconfig or join code, and a VPN"
# macOS 15 and later answer so when Local Network privacy denies a program the hosts of its own network.
_LOCAL_NETWORK_FIX: Final = (
    "macOS may deny it the local network: System Settings > Privacy & Security > Local Network, allow Python; or run "
    f"the agent as a daemon, which is exempt: sudo {PROGRAM} agent install"
)
REACHED: Final = "reached by the cluster"
"""Name of the check whether the controller reaches this host."""
_TUNNELS: Final = ("utun", "tun", "wg", "tailscale", "bridge", "awdl", "llw")
"""Beginnings of interfaces that the nodes of a cluster rarely reach."""


class ApiServerAnswer(NamedTuple):
    """One request to the API server, without a token."""

    server: str
    error: OSError | None = None
    skew_seconds: float | None = None
    """Its clock minus ours; None if its answer has no date."""


class TokenTimes(msgspec.Struct, frozen=True):
    """Times of a ServiceAccount's token, in seconds since 1970, as they are in its payload."""

    issued: float = msgspec.field(name="iat")
    expires: float = msgspec.field(name="exp")


def check_api_server(answer: ApiServerAnswer, system: str) -> list[Finding]:
    """Check that the API server answers, and that its clock agrees with ours. `system` is sys.platform."""
    if error := answer.error:
        detail = f"{answer.server}: {error.strerror or str(error) or type(error).__name__}"
        # macOS answers so when its Local Network privacy denies a program the local network.
        is_denied = system == "darwin" and error.errno == errno.EHOSTUNREACH
        return [Finding("API server", "problem", detail, _LOCAL_NETWORK_FIX if is_denied else _NETWORK_FIX)]

    # The difference of the clocks: the time of the server minus ours.
    skew = answer.skew_seconds
    findings = [Finding("API server", "ok", f"{answer.server} answers")]
    if skew is None:
        return [*findings, Finding("clock", "unknown", "the API server's answer has no date")]

    detail = f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the API server's"
    verdict: FindingVerdict = "ok"
    if abs(skew) >= SKEW_WARNING_SECONDS:
        verdict = "problem" if abs(skew) >= SKEW_PROBLEM_SECONDS else "warning"
    mac_fix = "System Settings > General > Date & Time: set it automatically"
    fix = mac_fix if system == "darwin" else "sudo timedatectl set-ntp true"
    return [*findings, Finding("clock", verdict, detail, fix if verdict != "ok" else "")]


def check_connection(connection: ConnectionStatus, system: str) -> Finding:
    """Check the connection of the agent, which may lack one where this program has it. `system` is sys.platform.

    macOS exempts programs of a terminal, as this one, from Local Network privacy, and does not exempt a LaunchAgent.
    """
    name = "agent's connection"
    if connection.state == "connected":
        return Finding(name, "ok", f"connected since {connection.since}")
    detail = f"{connection.state} since {connection.since}"
    if connection.state == "refused":
        return Finding(name, "problem", detail, connection.message)
    is_denied = system == "darwin" and os.strerror(errno.EHOSTUNREACH) in connection.message
    fix = _LOCAL_NETWORK_FIX if is_denied else _NETWORK_FIX
    return Finding(name, "problem", f"{detail}: {connection.message}", fix)


def check_token(times: TokenTimes | None, now: float, host: str) -> Finding:
    """Check how much is left of the life of the token of `host`; `now` is in seconds since 1970."""
    if times is None:
        return Finding("token", "unknown", "the credentials are no token with an expiry")
    left_seconds, life_seconds = times.expires - now, times.expires - times.issued
    if left_seconds <= 0:
        return Finding("token", "problem", "it has expired", advise_rejoin(host))
    detail = f"valid for {_describe_duration(left_seconds)} more"
    if left_seconds < life_seconds * LEAST_TOKEN_SHARE:
        return Finding("token", "warning", detail, "it is not renewed: see `pomona agent status`")
    return Finding("token", "ok", detail)


def check_address(address: str, interfaces: Mapping[str, str]) -> Finding:
    """Check the address that the host states; `interfaces` are the names of interfaces by address."""
    interface = interfaces.get(address)
    if interface is None:
        fix = "start the agent with --address and an address of this machine"
        return Finding("address", "problem", f"{address} is no address of this machine", fix)
    detail = f"{address} of {interface}"
    # Addresses of other interfaces that other machines may reach.
    usable = {other: name for other, name in interfaces.items() if other != address and _is_usable(other)}
    others = ", ".join(f"{other} of {name}" for other, name in usable.items())
    # _TUNNELS: beginnings of the names of interfaces that nodes of a cluster rarely reach, such as utun.
    if interface.startswith(_TUNNELS) and others:
        return Finding("address", "warning", detail, f"if the cluster is not on that tunnel: --address, of {others}")
    return Finding("address", "ok", detail)


def check_host(status: MetalHostStatus, own_version: str) -> list[Finding]:
    """Check what the controller says of this host, and the versions of both."""
    conditions = {condition.type: condition for condition in status.conditions}
    return [
        _check_condition("registered", conditions.get("Ready")),
        _check_condition("address accepted", conditions.get(ADDRESS_ACCEPTED)),
        _check_condition(REACHED, conditions.get(REACHABLE)),
        _check_versions(status, own_version),
    ]


def _check_condition(name: str, condition: Condition | None) -> Finding:
    """Check a condition of the MetalHost that the controller writes."""
    if condition is None:
        return Finding(name, "unknown", "the controller has not reported it", "check that the controller runs")
    verdict: dict[str, FindingVerdict] = {"True": "ok", "False": "problem"}
    return Finding(name, verdict.get(condition.status, "unknown"), condition.message)


def _check_versions(status: MetalHostStatus, own_version: str) -> Finding:
    """Check that agent, controller and this program are of versions that work together."""
    agent, controller = status.agent_version, status.controller_version
    detail = f"agent {agent or 'unknown'}, controller {controller or 'unknown'}, this program {own_version}"
    if agent and agent != own_version:
        return Finding("versions", "warning", detail, "the agent runs an earlier installation: pomona agent restart")
    if not controller:
        return Finding("versions", "unknown", detail)
    if _minor(controller) != _minor(own_version):
        return Finding("versions", "warning", detail, "one release apart works; update the older one")
    return Finding("versions", "ok", detail)


def _minor(version: str) -> list[str]:
    """Return the major and minor number of a version."""
    return version.split(".")[:2]


def _is_usable(address: str) -> bool:
    """Decide whether other machines may reach the address: not the machine itself or its own link only."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def _describe_duration(seconds: float) -> str:
    """Return a duration as text: days and hours, or hours and minutes."""
    days, hours = divmod(int(seconds // 3600), 24)
    return f"{days} d {hours} h" if days else f"{hours} h {int(seconds % 3600 // 60)} min"
