"""The whole doctor on this host, as its owner would run it: it checks everything of the agent that needs no Mac."""

import json
import subprocess
import sys
from pathlib import Path

import psutil


def test_this_host_passes(tmp_path: Path) -> None:
    argv = [sys.executable, "-X", "dev", "-W", "error", "-m", "cli.main", "agent", "doctor", "--deep", "--output=json"]
    done = subprocess.run([*argv, f"--state-dir={tmp_path}"], check=False, capture_output=True, text=True, timeout=240)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    problems = [finding for finding in findings.values() if finding["verdict"] == "problem"]
    assert not problems, done.stderr
    assert done.returncode == 0
    proven = {name for name, finding in findings.items() if finding["verdict"] == "ok"}
    assert proven >= {
        *("needed facts", "memory in total", "start of a process", "llama.cpp"),
        *("a session of its own", "port of a wrapped server", "growth of its footprint", "its end is seen"),
        *("its children are gone too", "end of one that ignores SIGTERM", "adoption", "adoption of a reused pid"),
        *("process behind a unix socket", "a lock that was inherited"),
    }
    folder = findings["mark in its environment"]["found"]
    assert not [process.pid for process in psutil.process_iter(["environ"]) if folder in str(process.info["environ"])]
