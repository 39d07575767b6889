"""A stand-in for launchd: a program that takes the arguments of launchctl, and answers as recorded outputs do.

`python launchctl_stand_in.py FOLDER VERB ...` keeps its state in FOLDER, and runs each loaded job by a process of its
own, which starts it again as KeepAlive of its plist says. `FOLDER/faults.json` has codes with which the next calls of
a verb end before they do anything.
"""

import contextlib
import json
import os
import plistlib
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

OPEN_FILES = 256
"""The limit of open files with which launchd starts a job."""
SPOKEN = {
    3: "Boot-out failed: 3: No such process",
    5: "Bootstrap failed: 5: Input/output error\nTry re-running the command as root for richer errors.",
    36: "Boot-out failed: 36: Operation now in progress",
    37: "Bootstrap failed: 37: Operation already in progress",
    119: "Bootstrap failed: 119: Service is disabled",
    122: "Bootstrap failed: 122: Path had bad ownership/permissions",
    125: "Bootstrap failed: 125: Domain does not support specified action",
}
PRINTED = """\
{domain}/{label} = {{
\tactive count = {active}
\tpath = {path}
\ttype = LaunchDaemon
\tstate = {state}

\tprogram = {program}
\tdefault environment = {{
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}}

\tenvironment = {{
\t\tPOMONA_SUPERVISOR => launchd
\t\tXPC_SERVICE_NAME => {label}
\t}}

\tdomain = {domain}
\tminimum runtime = 10
\texit timeout = 60
\truns = {runs}
{pid}\tlast exit code = {last_exit}

\tspawn type = interactive (4)
\tsubmitted job. ignore execute allowed
\tproperties = keepalive | runatload
}}"""


class LaunchctlStandIn:
    """The folder of a stand-in, and the program in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.program = folder / "launchctl"
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} "$@"\n')
        self.program.chmod(0o755)

    def fail_next(self, verb: str, *codes: int) -> None:
        """Make the next calls of `verb` end with `codes`."""
        faults = read(self.folder / "faults.json")
        (self.folder / "faults.json").write_text(json.dumps({**faults, verb: [*faults.get(verb, []), *codes]}))

    def disable(self, *jobs: str) -> None:
        (self.folder / "disabled.json").write_text(json.dumps(dict.fromkeys(jobs, True)))

    def be_headless(self) -> None:
        """Lack the domain gui/UID, as without a login at the screen."""
        (self.folder / "headless").touch()

    def log_in(self) -> None:
        """Make the domain gui/UID, as a login at the screen does."""
        (self.folder / "headless").unlink()

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def end(self) -> None:
        """End the jobs that are still loaded, and wait for their ends: an agent starts what a test kills."""
        for path in self.folder.glob("job-*.json"):
            with contextlib.suppress(ProcessLookupError, KeyError):  # the job may end meanwhile, and its file with it
                os.kill(read(path)["supervisor"], signal.SIGTERM)
        wait_until(lambda: not any(self.folder.glob("job-*.json")))


def read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def job_file(folder: Path, job: str) -> Path:
    return folder / f"job-{job.replace('/', '-')}.json"


def answer(folder: Path, verb: str, *words: str) -> tuple[int, str]:
    """Return exit code and output of one call."""
    with (folder / "calls").open("a") as file:
        file.write(" ".join((verb, *words)) + "\n")
    faults = read(folder / "faults.json")
    if faults.get(verb):
        code = faults[verb].pop(0)
        write(folder / "faults.json", faults)
        return code, SPOKEN.get(code, "")
    job = words[-1] if verb != "bootstrap" else f"{words[0]}/{plistlib.loads(Path(words[1]).read_bytes())['Label']}"
    domain, _, label = job.rpartition("/")
    path = job_file(folder, job)
    loaded = read(path)
    match verb:
        case "enable":
            write(folder / "disabled.json", {k: v for k, v in read(folder / "disabled.json").items() if k != job})
            return 0, ""
        case "bootstrap":
            return bootstrap(folder, domain, job, Path(words[1]))
        case "bootout" if not loaded:
            return 3, SPOKEN[3]
        case "bootout":
            os.kill(loaded["supervisor"], signal.SIGTERM)
            return 36, SPOKEN[36]
        case _ if not loaded:
            who = "system" if domain == "system" else f"user gui: {domain.rpartition('/')[2]}"
            return 113, f'Could not find service "{label}" in domain for {who}'
        case "kickstart":
            if words[0] == "-k":
                os.kill(loaded["supervisor"], signal.SIGUSR1)
                wait_until(lambda: read(path).get("runs", 0) > loaded["runs"])
            elif not loaded["pid"]:
                os.kill(loaded["supervisor"], signal.SIGUSR1)
            return 0, ""
        case "print":
            pid = f"\tpid = {loaded['pid']}\n" if loaded["pid"] else ""
            return 0, PRINTED.format(**loaded | {"pid": pid}, domain=domain, label=label, active=int(bool(pid)))
        case _:
            return 64, f"Unrecognized subcommand: {verb}"


def bootstrap(folder: Path, domain: str, job: str, plist: Path) -> tuple[int, str]:
    if domain.startswith("gui/") and (folder / "headless").exists():
        return 125, SPOKEN[125]
    if read(folder / "disabled.json").get(job):
        return 119, SPOKEN[119]
    if plist.stat().st_mode & 0o777 != 0o644:
        return 122, SPOKEN[122]
    if job_file(folder, job).exists():
        return 5, SPOKEN[5]
    subprocess.Popen(
        [sys.executable, __file__, str(folder), "run", job, str(plist)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: job_file(folder, job).exists())
    return 0, ""


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def run_job(folder: Path, job: str, plist: Path) -> None:
    """Run a job as launchd does: again after a failure, and not again after exit code 0; end with SIGTERM."""
    keys, path = plistlib.loads(plist.read_bytes()), job_file(folder, job)
    ended = {"asked": False, "kicked": False}
    state: dict[str, Any] = {"supervisor": os.getpid(), "path": str(plist), "program": keys["ProgramArguments"][0]}
    state |= {"runs": 0, "last_exit": "(never exited)"}
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, _frame: FrameType | None) -> None:
        ended["asked" if number == signal.SIGTERM else "kicked"] = True
        if child:
            child.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, end)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    while not ended["asked"]:
        state["runs"] += 1
        child = subprocess.Popen(
            keys["ProgramArguments"],
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **keys["EnvironmentVariables"]},
            cwd=keys["WorkingDirectory"],
            stdin=subprocess.DEVNULL,
            stdout=Path(keys["StandardOutPath"]).open("ab"),  # noqa: SIM115 - until the end of this process
            stderr=subprocess.STDOUT,
            umask=keys["Umask"],
            start_new_session=True,
        )
        if ended.get("asked"):  # while the program was started, so that `end` did not know it
            child.terminate()
        write(path, state | {"pid": child.pid, "state": "running"})
        code = child.wait()
        state["last_exit"] = code if code >= 0 else f"(signal {-code})"
        is_kept = keys["KeepAlive"] is True or (keys["KeepAlive"]["SuccessfulExit"] == (code == 0))
        write(path, state | {"pid": 0, "state": "spawn scheduled" if is_kept else "not running"})
        while not is_kept and not any(ended.values()):
            time.sleep(0.02)
        ended["kicked"] = False
    path.unlink()


if __name__ == "__main__":
    if sys.argv[2] == "run":
        run_job(Path(sys.argv[1]), sys.argv[3], Path(sys.argv[4]))
    else:
        exit_code, output = answer(Path(sys.argv[1]), *sys.argv[2:])
        print(output, file=sys.stderr if exit_code else sys.stdout)
        sys.exit(exit_code)
