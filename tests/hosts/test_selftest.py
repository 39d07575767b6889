"""The self test on this host, as its owner would run it: it checks everything of the agent that needs no Mac."""

import json
import subprocess
import sys

import psutil


def test_this_host_passes() -> None:
    argv = [sys.executable, "-X", "dev", "-W", "error", "-m", "cli.main", "agent", "selftest", "--output=json"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=240)
    lines = {line["name"]: line for line in json.loads(done.stdout)}
    failed = [line for line in lines.values() if line["verdict"] == "FAILED"]
    assert not failed, done.stderr
    assert done.returncode == 0
    proven = {name for name, line in lines.items() if line["verdict"] == "ok"}
    assert proven >= {
        *("memory", "memory pressure", "boot id", "start of a process", "llama.cpp"),
        *("a session of its own", "port of a wrapped server", "growth of its footprint", "its end is seen"),
        *("its children are gone too", "exit code", "end of one that ignores SIGTERM", "adoption"),
        *("adoption of a reused pid", "process behind a unix socket", "a second agent", "a lock that was inherited"),
    }
    folder = lines["mark in its environment"]["found"]
    assert not [each.pid for each in psutil.process_iter(["environ"]) if folder in str(each.info["environ"])]
