"""The stand-in of launchd ends a job at whatever moment it is asked to."""

import plistlib
import subprocess
import sys
from pathlib import Path

from tests.controlplane.process import CHECKOUT

ENDED_AT_ITS_START = """
import os, signal, subprocess, sys
from pathlib import Path
from tests.support.launchctl_stand_in import run_job

class Ended(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Ended
run_job(Path(sys.argv[1]), "system/job", Path(sys.argv[2]))
"""


def test_job_ends_that_is_ended_while_its_program_is_started(tmp_path: Path) -> None:
    job = {
        "ProgramArguments": ["sleep", "1000"],
        "EnvironmentVariables": {},
        "WorkingDirectory": str(tmp_path),
        "StandardOutPath": str(tmp_path / "log"),
        "Umask": 0o077,
        "KeepAlive": True,
    }
    plist = tmp_path / "job.plist"
    plist.write_bytes(plistlib.dumps(job))
    argv = [sys.executable, "-c", ENDED_AT_ITS_START, str(tmp_path), str(plist)]
    subprocess.run(argv, cwd=CHECKOUT, check=True, timeout=60)
    assert list(tmp_path.glob("job-*.json")) == []
