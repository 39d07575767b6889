"""A sandbox for a command: new user, network, mount, process and IPC namespaces, without root.

Inside, ports and addresses are free to choose, nothing is visible outside, and everything ends with the first process.
This program stays outside and holds a pipe open. The first process inside reads the pipe, so that after any death of
this program (even by SIGKILL) no process is left. `unshare` alone cannot do that: it blocks SIGTERM.

/run and /tmp are new and in memory. Folders there that the command needs (this checkout, Python, the home folder with
the cache, as in a clone under /tmp) are bind-mounted at their old paths.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

VARIABLE = "POMONA_SANDBOX"
CHECKOUT = Path(__file__).resolve().parents[2]
HIDDEN = (Path("/tmp"), Path("/run"))
NAMESPACES = ["--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
OWN_ROOT = ["--user", "--map-root-user"]
"""Options for a user namespace, in which an ordinary user is root."""
FEW_AUTHORITIES = {"SSL_CERT_FILE": str(CHECKOUT / "tests" / "support" / "certificates" / "expired.crt")}
"""No public server is within reach, and to read the public authorities takes each Python process 40 ms of processor."""
GRACE_SECONDS = 15
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
SWITCHES = {
    # File of the setting, value that forbids namespaces, command that allows them.
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}


class SandboxError(Exception):
    """This machine does not allow namespaces; the message says how to allow them."""


def inside() -> bool:
    """Return whether this process runs in a sandbox."""
    return VARIABLE in os.environ


def find_sandbox(argument: str) -> int | None:
    """Return the pid of this user's last `unshare` whose command has this argument; None if there is none."""
    candidates = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            argv = (folder / "cmdline").read_text().split("\0")
            if argv[0] == "unshare" and argument in argv and folder.stat().st_uid == os.getuid():
                candidates.append((folder.stat().st_mtime, int(folder.name)))
    return max(candidates)[1] if candidates else None


def enter_command(pid: int) -> list[str]:
    """Return the command by which the same user enters, from outside, the sandbox of this `unshare`."""
    # It is in all namespaces of the sandbox except the PID namespace.
    namespaces = ["--user", "--net", "--mount", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children"]
    return ["nsenter", f"--target={pid}", *namespaces, "--preserve-credentials", f"--wd={CHECKOUT}"]


def check() -> None:
    """Check that a sandbox can be made.

    Raises:
        SandboxError: it cannot; the message has one line with the packages to install or the settings to change.
    """
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux namespaces; this is {sys.platform}")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        raise SandboxError(f"not on PATH: {', '.join(missing)}. On Debian and Ubuntu: apt-get install {packages}")
    probe = ["unshare", *OWN_ROOT, *NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"]
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        switches = {path: Path(path).read_text().strip() for path in SWITCHES if Path(path).exists()}
        raise SandboxError(advice(result.stderr, switches))


def advice(complaint: str, switches: Mapping[str, str]) -> str:
    """Return one line for the user of a machine that refuses namespaces: the error, and the commands that allow them.

    Args:
        complaint: the error output of `unshare`.
        switches: the kernel's settings that exist here, by path.
    """
    said = " ".join(complaint.split()) or "unshare failed without a word"
    off = [SWITCHES[path][1] for path, value in switches.items() if SWITCHES[path][0] == value]
    way = (
        f"allow it with: {' && '.join(f'sudo {command}' for command in off)}"
        if off
        else "in a container, start that with --privileged, or with seccomp, apparmor and systempaths unconfined"
    )
    return f"this machine refuses unprivileged namespaces ({said}); {way}"


def run(argv: list[str], user_namespace: Sequence[str] = OWN_ROOT) -> int:
    """Run a command in a new sandbox, and return its exit status; without `user_namespace` it keeps root's rights.

    Raises:
        SandboxError: the sandbox cannot be made.
    """
    if user_namespace:
        check()
    reading, writing = os.pipe()
    first = [sys.executable, "-m", "tests.controlplane.sandbox", "--first", str(reading), "--", *argv]
    with subprocess.Popen(["unshare", *user_namespace, *NAMESPACES, *first], pass_fds=[reading]) as process:
        os.close(reading)
        os.write(writing, f"{process.pid}\n".encode())

        def end(_signal: int, _frame: FrameType | None) -> None:
            with contextlib.suppress(OSError):
                os.close(writing)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGHUP, end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to the command too, which handles it
        return _exit_status(process.wait())


def first_process(pipe: int, argv: list[str]) -> int:
    """Run as process 1: prepare mounts, run the command, reap orphans; end with the command or the outer process."""
    outer = os.read(pipe, 32).decode().strip()
    _mount_private_folders()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    command = subprocess.Popen(argv, env={**os.environ, **FEW_AUTHORITIES, VARIABLE: outer})

    def stop(_signal: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGTERM)  # not terminate(), which might reap the child that the loop waits for
        signal.alarm(GRACE_SECONDS)  # process 1 has no default signal handlers, hence `give_up`

    def give_up(_signal: int, _frame: FrameType | None) -> None:
        os._exit(128 + signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_outer_process() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow_outer_process, daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == command.pid:
            command.returncode = os.waitstatus_to_exitcode(status)
            return _exit_status(command.returncode)


def _exit_status(code: int) -> int:
    return code if code >= 0 else 128 - code  # as a shell reports a signal


def _mount_private_folders() -> None:
    kept = {folder: os.open(folder, os.O_PATH) for folder in _hidden_but_needed()}
    for folder in HIDDEN:
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(folder))
    for folder, descriptor in kept.items():
        folder.mkdir(parents=True, exist_ok=True)
        # The descriptor still refers to the hidden folder; without -c, mount would look up its name again.
        _mount("-c", "--rbind", f"/proc/self/fd/{descriptor}", str(folder), descriptors=[descriptor])
        os.close(descriptor)
    Path("/run/netns").mkdir()
    os.chdir(Path.cwd())  # enter the bind-mounted folder, whose path is the same


def _hidden_but_needed() -> list[Path]:
    needed = {CHECKOUT, Path.cwd(), Path.home(), Path(sys.prefix), Path(sys.base_prefix)}
    needed |= {Path(os.environ[name]) for name in ("XDG_CACHE_HOME", "KUBEBUILDER_ASSETS") if os.environ.get(name)}
    places = {path.resolve() for path in needed if path.exists()}
    return sorted(path for path in places if path not in HIDDEN and any(path.is_relative_to(top) for top in HIDDEN))


def _mount(*arguments: str, descriptors: list[int] | None = None) -> None:
    subprocess.run(["mount", *arguments], check=True, pass_fds=descriptors or [])


def main(argv: list[str]) -> int:
    """Entry point of `python -m tests.controlplane.sandbox -- CMD...`."""
    match argv:
        case ["--first", pipe, "--", *command]:
            return first_process(int(pipe), command)
        case ["--", program, *arguments]:
            try:
                return run([program, *arguments])
            except SandboxError as error:
                print(error, file=sys.stderr)
                return 1
        case _:
            print("usage: python -m tests.controlplane.sandbox -- COMMAND [ARGUMENT]...", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
