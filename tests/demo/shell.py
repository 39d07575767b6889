"""`make demo-shell`: a shell in the sandbox of a demo that runs, or one command there."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tests.controlplane import sandbox

DEMO: Final = "tests.demo.inside"
"""Module of the demo in its sandbox, which names the process to enter."""
NOTE: Final = Path("/run/pomona-demo")
"""File in the demo's own /run with the commands by which a shell begins."""
GREETING: Final = f"""\
This shell is in the demo's namespaces. Use kubectl, helm, pomona and curl here, for example

  kubectl get isvc,endpointslices
  pomona chat tiny-host
  pomona endpoint --key demo --url http://pomona-gateway.pomona-system.svc --for curl | sh
  TOKEN=$(kubectl get secret tiny-pod-token -o jsonpath='{{.data.token}}' | base64 -d)
  curl http://tiny-pod.default.svc:8080/v1/models -H "Authorization: Bearer $TOKEN"

ClusterIPs and names of Services work, as in pods. kubectl port-forward finds pods only, so none for tiny-host, and its
port is open in here only: no program outside reaches it.
/tmp and /run belong to the demo and end with it; {sandbox.CHECKOUT} is your own.
"""


def write_note(variables: Mapping[str, str], programs: Iterable[Path]) -> None:
    """Write, in the demo's sandbox, the variables of a shell there, and the programs that it finds."""
    path = ":".join(str(program.parent) for program in programs)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    lines = [*exports, f"export PATH={shlex.quote(path)}:$PATH", "PS1='demo:\\w\\$ '"]
    NOTE.write_text("\n".join(lines) + "\n")


def main(command: list[str]) -> None:
    """Become a shell in the sandbox of the last demo, or a command there; end with 1 if no demo runs."""
    pid = sandbox.find_sandbox(DEMO)
    if pid is None:
        sys.exit("make demo-shell: no demo runs: start one in another terminal with `make demo KEEP=1`")
    if not command:
        print(GREETING, flush=True)
    options = ["-c", *command] if command else ["--rcfile", str(NOTE), "-i"]
    argv = [*sandbox.enter_command(pid), "env", f"BASH_ENV={NOTE}", "bash", *options]
    os.execvp(argv[0], argv)  # noqa: S606 - the command of the user


if __name__ == "__main__":
    main(sys.argv[1:])
