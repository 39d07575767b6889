"""Checks of the machine: Metal, memory, disk, and the settings of macOS that stop a server."""

import shlex
from pathlib import Path
from typing import Final

from devices.facts import HostFacts
from devices.mac_settings import FIREWALL, MacSettings
from devices.metal import Metal
from launchd.service_definition import PROGRAM
from metal_agent.doctor.finding import Finding

_GIB = 2**30
LINGER: Final = Path("/var/lib/systemd/linger")
"""The folder in which systemd keeps the names of the users whose services run without a login."""
LEAST_DISK_BYTES = 20 * _GIB
"""Free space below which a download of usual weights is likely to fail."""


def check_metal(metal: Metal) -> Finding:
    """Check that this process may use the GPU of the Mac."""
    if metal.name is None or not metal.working_set_bytes:
        fix = (
            "models would be served by the processor: start the agent by `pomona agent install` or in a terminal, not "
            "by a program that puts itself into the background; a virtual machine has no Metal"
        )
        return Finding("Metal", "problem", "no device", fix)
    return Finding("Metal", "ok", f"{metal.name}, {metal.working_set_bytes / _GIB:.1f} GiB for models")


def check_memory(facts: HostFacts) -> Finding:
    """Check that the memory for models is known: without it nothing is started."""
    if facts.model_memory_bytes is None:
        fix = "start the agent with --memory-budget, such as 12GiB"
        return Finding("memory", "problem", "the memory for models is not known", fix)
    return Finding("memory", "ok", f"{facts.model_memory_bytes / _GIB:.1f} GiB for models")


def check_disk(folder: str, free_bytes: int) -> Finding:
    """Check the free space of the disk with the weights."""
    detail = f"{free_bytes / _GIB:.0f} GiB are free in {folder}"
    if free_bytes < LEAST_DISK_BYTES:
        return Finding("disk", "warning", detail, "delete weights by `pomona weights delete`, or other files")
    return Finding("disk", "ok", detail)


def check_settings(settings: MacSettings, python: str, *, starts_at_login: bool, is_reached: bool) -> list[Finding]:
    """Check sleep, firewall, FileVault and the start after a power cut of a Mac.

    Args:
        settings: the settings.
        python: path of the Python that agent and proxy run, by which the firewall knows them.
        starts_at_login: the agent is a LaunchAgent, which starts when its owner logs in.
        is_reached: the controller reaches this host.
    """
    return [
        _check_sleep(settings.sleep_minutes),
        _check_firewall(settings.firewall_state, python, is_reached=is_reached),
        _check_login(settings.file_vault, starts_at_login=starts_at_login),
        *_check_power_cut(settings.restarts),
    ]


def _check_sleep(minutes: int | None) -> Finding:
    """Check that the Mac does not sleep by itself."""
    if minutes is None:
        return Finding("sleep", "unknown", "`pmset -g` prints no sleep setting")
    if minutes == 0:
        return Finding("sleep", "ok", "this Mac does not sleep by itself")
    detail = f"this Mac sleeps after {minutes} min without use, except while it serves"
    return Finding("sleep", "warning", detail, "sudo pmset -a sleep 0 autorestart 1 womp 1")


def _check_firewall(state: int | None, python: str, *, is_reached: bool) -> Finding:
    """Check that the firewall of a Mac lets the cluster through.

    `state` is that of `socketfilterfw`: 0 is off, 1 asks for each program, and 2 blocks all incoming connections.
    """
    if state is None:
        return Finding("firewall", "unknown", "`socketfilterfw --getglobalstate` prints no state")
    if state == 0:
        return Finding("firewall", "ok", "off")
    if state == 1 and is_reached:
        return Finding("firewall", "ok", "on, and the controller reaches this host")

    if state != 1:
        # It is then closed for every program, whatever is allowed.
        fix = 'System Settings > Network > Firewall > Options: turn off "Block all incoming connections"'
        return Finding("firewall", "problem", "on, and it blocks all incoming connections", fix)

    # A daemon has no screen on which macOS could ask its owner.
    tool, program = FIREWALL[0], shlex.quote(python)
    fix = f"allow the Python of Pomona: sudo {tool} --add {program} && sudo {tool} --unblockapp {program}"
    return Finding("firewall", "warning", "on", fix)


def _check_login(file_vault: bool | None, *, starts_at_login: bool) -> Finding:
    """Check that the agent starts with the Mac, without a login."""
    name = "start without a login"
    if starts_at_login:
        fix = f"`sudo {PROGRAM} agent install` has it start with the Mac"
        return Finding(name, "warning", "the agent starts when its owner logs in", fix)
    if file_vault is None:
        return Finding(name, "unknown", "`fdesetup status` does not say whether FileVault is on")
    if file_vault:
        fix = "log in after each start; for a planned one: sudo fdesetup authrestart"
        return Finding(name, "warning", "FileVault keeps the disk locked until somebody logs in", fix)
    return Finding(name, "ok", "FileVault is off: the agent starts without a login")


def check_linger(user: str, folder: Path = LINGER) -> Finding:
    """Check that systemd keeps the services of a user after the logout, which ends engines, too."""
    name = "start without a login"
    if (folder / user).exists():
        return Finding(name, "ok", f"the services of {user} run without a login")
    detail = f"the agent and its engines run only while {user} is logged in"
    return Finding(name, "warning", detail, f"sudo loginctl enable-linger {user}")


def _check_power_cut(restarts: bool | None) -> list[Finding]:
    """Check that a Mac starts after a power cut; a Mac with a battery has no such setting."""
    name = "start after a power cut"
    if restarts is None:
        return []
    if restarts:
        return [Finding(name, "ok", "this Mac starts by itself")]
    return [Finding(name, "warning", "this Mac stays off", "sudo pmset -a autorestart 1")]
