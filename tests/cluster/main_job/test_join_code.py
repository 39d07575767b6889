"""A machine joins with a code alone, serves, is told apart from its copy, and is refused once it is removed."""

import asyncio
import shutil
import subprocess
import sys

from metal_agent.cluster.host_identity import FILE_NAME
from metal_agent.exit_codes import TEMPORARY
from tests.cluster.conftest import StartMetalHost
from tests.cluster.main_job.cluster import GIB, Cluster
from tests.controlplane.members import MetalHost
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT
from tests.support.eventually import eventually

POMONA = [sys.executable, "-m", "cli.main"]


async def run(*argv: str, text: str = "") -> str:
    """Run a command and return its output."""
    done = await asyncio.to_thread(
        subprocess.run, argv, input=text, cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def forget_kubeconfig(host: MetalHost) -> None:
    """Drop the options of an agent by which it is told its identity."""
    host.agent.argv[:] = [
        argument for argument in host.agent.argv if not argument.startswith(("--name=", "--kubeconfig="))
    ]


async def test_machine_with_a_code_serves_until_it_is_removed(
    plane: ControlPlane, cluster: Cluster, idle_host: StartMetalHost
) -> None:
    administrator = [*POMONA, "host"]
    kubeconfig = f"--kubeconfig={plane.kubeconfig()}"
    host = await idle_host("studio-1", f"--memory-budget={4 * GIB}")
    forget_kubeconfig(host)
    code = await run(*administrator, "join", "studio-1", kubeconfig)
    join = [*host.host.exec, *POMONA, "agent", "join", "-", f"--state-dir={host.state_folder}"]
    said = await run(*join, text=code)
    assert "this machine is host studio-1" in said
    assert "agent install" in said
    secret = (host.state_folder / FILE_NAME).read_text()
    assert not any(credential in secret for credential in plane.secrets)

    host.agent.start()
    await cluster.apply(cluster.model(memoryBytes=GIB), cluster.service("chat", "metal"))
    await cluster.ready("chat")
    answer = await cluster.ask("chat")
    assert (answer.status, answer.text.startswith("Hello")) == (200, True)
    assert code.strip() not in host.agent.log.read_text()

    copy = await idle_host("studio-2")
    forget_kubeconfig(copy)
    copy_identity(host, copy)
    copy.agent.start()
    assert await copy.agent.wait() == TEMPORARY
    assert "another agent serves as host studio-1" in copy.agent.tail(20)
    assert "if this machine is a copy of the other, have it join as another host" in copy.agent.tail(20)

    before = await cluster.engines("chat")
    misspelt = await run(*administrator, "remove", "studio-11", kubeconfig)
    assert misspelt == "host studio-11 has no rights and no objects: did you mean studio-1?\n"
    removed = await run(*administrator, "remove", "studio-1", "--yes", kubeconfig)
    assert "removed host studio-1: ClusterRoleBinding/pomona-metal-host-studio-1, RoleBinding/studio-1" in removed
    assert await cluster.urls("chat") == []
    await eventually(lambda: "token_refused" in host.agent.tail(1000))
    assert "pomona host join studio-1" in host.agent.tail(1000)
    assert host.agent.running
    assert await cluster.engines("chat") == before


def copy_identity(host: MetalHost, copy: MetalHost) -> None:
    """Copy what makes an agent a host, as a cloned disk would."""
    for name in ("identity.json", FILE_NAME):
        shutil.copy(host.state_folder / name, copy.state_folder / name)
