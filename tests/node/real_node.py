"""A node with a real kubelet and containerd, in the sandbox of root: several of them run on one machine.

Each has its own containerd, because a kubelet ends the pods that it does not know, its own folders and cgroups, and a
part of the bridge's addresses. There is no kube-proxy: tests send requests to the addresses of pods.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Final

import yaml

from tests.controlplane.kubelet.podnet import ensure_address
from tests.controlplane.network import ADDRESS, BRIDGE, PREFIX_LENGTH
from tests.controlplane.plane import NODES, ControlPlane
from tests.controlplane.process import Process
from tests.node.preparation import PAUSE, cgroup_folders
from tests.support.eventually import eventually

CGROUP: Final = "pomona-node"
"""The cgroup of all nodes of a run, below the roots of the hierarchies."""
_CONTAINERD: Final = """
version = 2
root = "{folder}/content"
state = "{folder}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  # Without CAP_SYS_RESOURCE, as in a container, runc may not lower the score.
  restrict_oom_score_adj = true
  sandbox_image = "{pause}"
  stream_server_address = "{address}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


class RealNode:
    """One node.

    Args:
        plane: the control plane to join.
        name: one of NODES; its index there determines the addresses.
        folder: for everything of it but its socket.
        kubelet: the program.
    """

    def __init__(self, plane: ControlPlane, name: str, folder: Path, kubelet: Path) -> None:
        number = NODES.index(name) + 1
        self.name = name
        self.address = f"10.77.0.{10 + number}"
        self.folder = folder / name
        self._socket = Path(f"/run/{name}.sock")
        self._subnet = f"10.77.{number}"
        self._cgroups = [path / CGROUP / name for path in cgroup_folders()]
        self.folder.mkdir(parents=True)
        self._write_settings(number)
        self.containerd = Process(
            f"containerd {name}",
            ["containerd", "--log-level=warn", f"--config={self.folder / 'containerd.toml'}"],
            folder / f"containerd-{name}.log",
        )
        self.kubelet = Process(
            f"kubelet {name}",
            [
                *(str(kubelet), f"--kubeconfig={plane.kubeconfig(f'system:node:{name}')}", "--v=2"),
                *(f"--config={self.folder / 'kubelet.yaml'}", f"--root-dir={self.folder / 'kubelet'}"),
                *(f"--cert-dir={self.folder / 'certificates'}", f"--hostname-override={name}"),
                f"--node-ip={self.address}",
            ],
            folder / f"kubelet-{name}.log",
        )

    async def start(self, archives: list[Path]) -> None:
        """Start the container runtime with these images, and the kubelet."""
        for path in self._cgroups:
            make_cgroup(path)
        await ensure_address(self.address)
        self.containerd.start()
        await eventually(self._answers)
        for archive in archives:
            await self.ctr("images", "import", "--no-unpack=false", str(archive))
        self.kubelet.start()

    async def stop(self) -> None:
        """Stop kubelet and runtime; what they started ends with the sandbox."""
        for process in (self.kubelet, self.containerd):
            if process.running:
                await process.kill()

    async def _answers(self) -> bool:
        with contextlib.suppress(RuntimeError):
            await self.ctr("version")
            return True
        return False

    async def ctr(self, *arguments: str) -> None:
        """Run containerd's client. Raises RuntimeError: it failed."""
        command = ["ctr", f"--address={self._socket}", "--namespace=k8s.io", *arguments]
        client = Process(f"ctr {self.name}", command, self.folder / "ctr.log")
        client.start()
        if await client.wait(180):
            raise RuntimeError(f"{' '.join(command)}: {client.tail(10)}")

    def _write_settings(self, number: int) -> None:
        settings = _CONTAINERD.format(folder=self.folder, socket=self._socket, pause=PAUSE, address=self.address)
        (self.folder / "containerd.toml").write_text(settings)
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(self._describe_network()))
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP}/{self.name}",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "address": self.address,
            "healthzPort": 10300 + number,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "failSwapOn": False,
            "podLogsDir": str(self.folder / "logs"),
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",
            "clusterDomain": "cluster.local",
        }
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))

    def _describe_network(self) -> dict[str, object]:
        # Longer prefixes would send what is for other nodes to a gateway, and the bridge is one network.
        addresses = {
            "subnet": f"{ADDRESS.rpartition('.')[0].rpartition('.')[0]}.0.0/{PREFIX_LENGTH}",
            "rangeStart": f"{self._subnet}.10",
            "rangeEnd": f"{self._subnet}.250",
            "gateway": ADDRESS,
        }
        ipam = {
            "type": "host-local",
            "dataDir": str(self.folder / "addresses"),
            "ranges": [[addresses]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": False, "ipam": ipam}
        return {"cniVersion": "0.4.0", "name": self.name, "plugins": [bridge]}


def make_cgroup(path: Path) -> None:
    """Make a cgroup; in a hierarchy of version 1 with processors and memory nodes, it gets those of its parent."""
    path.mkdir(parents=True, exist_ok=True)
    for folder in (path.parent, path):
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists() and not (folder.parent / "cgroup.controllers").exists():
                (folder / name).write_text((folder.parent / name).read_text())
    if (path / "cgroup.controllers").exists():
        for folder in (path.parents[1], path.parent):
            controllers = (folder / "cgroup.controllers").read_text().split()
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def remove_cgroups() -> None:
    """Remove the cgroups of a run, whose processes ended with its sandbox. Raises OSError: some have not ended yet."""
    for root in cgroup_folders():
        for path, _, _ in os.walk(root / CGROUP, topdown=False):
            Path(path).rmdir()


def remove_folder(folder: Path) -> None:
    """Remove the files of nodes, whose mounts ended with their sandbox."""
    shutil.rmtree(folder, ignore_errors=True)
