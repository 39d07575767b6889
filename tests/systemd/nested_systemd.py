"""A real systemd as the first process of namespaces of its own, with no unit but those of a test.

It needs root, for a group of its own in the second hierarchy of control groups. Its units are stubs of the targets that
a service needs, so that nothing of the machine is started, mounted or set.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
ADDRESS = "10.99.0.1"
"""An address of the machine inside, which leads nowhere."""
TARGETS = ("sysinit", "basic", "multi-user", "network-online", "network", "shutdown", "default")
_START_SECONDS = 30.0
_INSIDE = """\
set -e
mount --make-rprivate /
umount -l /sys/fs/cgroup/* 2>/dev/null || true
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs tmpfs /run
mount --bind {units} /etc/systemd/system
ip link set lo up
ip address add {address}/32 dev lo
exec env -i container=pomona-tests SYSTEMD_UNIT_PATH=/etc/systemd/system PATH="$PATH" \
  {systemd} --system --unit=multi-user.target --log-target=console --show-status=no
"""


class NestedSystemd:
    """A systemd whose units are in `folder/units`; `run` runs a command beside it."""

    def __init__(self, folder: Path) -> None:
        self._units = folder / "units"
        self._log = folder / "systemd.log"
        self._group = _control_groups() / f"pomona-systemd-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers. Raises RuntimeError with its log."""
        self._units.mkdir()
        for name in TARGETS:
            (self._units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
        self._group.mkdir()
        script = _INSIDE.format(units=self._units, address=ADDRESS, systemd=SYSTEMD)
        namespaces = ("--mount", "--pid", "--fork", "--ipc", "--uts", "--net", "--mount-proc", "--cgroup")
        # It enters its group first: the namespace of control groups begins where its first process is.
        enter = f'echo 0 > {self._group}/cgroup.procs && exec unshare {" ".join(namespaces)} --kill-child "$@"'
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                ["sh", "-c", enter, "sh", "sh", "-c", script], stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            if self.run("systemctl", "is-active", "multi-user.target").stdout.strip() == "active":
                return
            time.sleep(0.1)
        raise RuntimeError(self._log.read_text())

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespaces of systemd."""
        assert self._process
        first = _first_child(self._process.pid)
        if first is None:
            return subprocess.CompletedProcess(argv, 1, "", "systemd does not run yet")
        command = ("nsenter", f"--target={first}", "--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup", *argv)
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    def stop(self) -> None:
        """End it with all that it has started, and remove its control groups."""
        if self._process:
            first = _first_child(self._process.pid)
            if first:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + _START_SECONDS
        while self._group.exists() and time.monotonic() < deadline:
            for path in sorted(self._group.rglob("*"), key=lambda path: -len(path.parts)):
                if path.is_dir():
                    with contextlib.suppress(OSError):
                        path.rmdir()
            with contextlib.suppress(OSError):
                self._group.rmdir()
            time.sleep(0.1)


def find_obstacle() -> str:
    """Return why systemd cannot run here; empty if it can."""
    if os.geteuid():
        return "it needs root: run sudo make test-systemd"
    missing = [name for name in ("unshare", "nsenter", "ip", "systemctl", "systemd-analyze") if not shutil.which(name)]
    if missing or not SYSTEMD.exists():
        return f"not installed: {', '.join(missing) or SYSTEMD}. On Debian and Ubuntu: apt-get install systemd iproute2"
    return ""


def _control_groups() -> Path:
    """Return where the second hierarchy of control groups is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise RuntimeError("no cgroup2 is mounted: mount one at /sys/fs/cgroup")


def _first_child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None
