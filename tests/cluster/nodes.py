"""Nodes of one test, and nodes lent to consecutive tests: each start of a kubelet costs the processors a second.

A test sees the nodes that it asks for and no others. The scheduler uses every node that it finds, and which tests ran
before in the same worker differs from run to run.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import pytest

from kube.resources import NODES
from tests.controlplane import members
from tests.controlplane.kubelet.worker import kill_leftovers
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import Process
from tests.support.eventually import eventually


class Node:
    """A node, not yet joined.

    Args:
        plane: the control plane to join.
        name: one of `tests.controlplane.plane.NODES`.
        folder: for its pods and its log.
        watched: processes whose logs a failed test shows; the kubelet is one of them while the node is there.
        options: more of `members.kubelet`.
    """

    def __init__(self, plane: ControlPlane, name: str, folder: Path, watched: list[Process], **options: Any) -> None:
        self.kubelet: Final = members.kubelet(plane, name, folder, **options)
        self._plane = plane
        self._name = name
        self._folder = folder
        self._watched = watched

    async def join(self) -> None:
        """Start the kubelet, and wait until the scheduler may use the node."""
        self._watched.append(self.kubelet)
        self.kubelet.start()
        await eventually(self._accepts_pods)

    async def leave(self) -> None:
        """End the kubelet and its containers, and delete the node."""
        self._watched.remove(self.kubelet)
        await self.kubelet.kill()
        # Containers outlive their kubelet, and have addresses that the next node of this name gives to others.
        await kill_leftovers(self._folder / self._name)
        # Pods of later tests would be bound to a node whose kubelet ended a moment ago.
        await self._plane.request("DELETE", NODES.path(None, self._name), accept={HTTPStatus.NOT_FOUND})

    async def _accepts_pods(self) -> bool:
        node = await self._plane.request("GET", NODES.path(None, self._name))
        ready = {"type": "Ready", "status": "True"}.items()
        is_ready = any(ready <= condition.items() for condition in node["status"]["conditions"])
        return is_ready and "taints" not in node["spec"]


@asynccontextmanager
async def joined(
    plane: ControlPlane, name: str, folder: Path, watched: list[Process], **options: Any
) -> AsyncIterator[Process]:
    """Join a node for one test, which may kill its kubelet; the arguments are those of `Node`."""
    node = Node(plane, name, folder, watched, **options)
    try:
        await node.join()
        yield node.kubelet
    finally:
        await node.leave()


class SharedNodes:
    """The nodes of a session, which tests borrow one after the other.

    Args:
        plane: their control plane.
        folders: makes a folder for each start.
        watched: processes whose logs a failed test shows.
    """

    def __init__(self, plane: ControlPlane, folders: pytest.TempPathFactory, watched: list[Process]) -> None:
        self._plane = plane
        self._folders = folders
        self._watched = watched
        self._nodes: dict[str, Node] = {}

    async def lend(self, fixture: str, name: str, **options: Any) -> Process:
        """Return the kubelet of a node that accepts pods.

        Args:
            fixture: name of the fixture that lends it, always with the same options.
            name: one of `tests.controlplane.plane.NODES`.
            options: more of `members.kubelet`.
        """
        if fixture not in self._nodes:
            node = Node(self._plane, name, self._folders.mktemp(fixture), self._watched, **options)
            self._nodes[fixture] = node
            await node.join()
        return self._nodes[fixture].kubelet

    async def end_all_but(self, fixtures: Collection[str]) -> None:
        """End the nodes that other fixtures lent, and those whose kubelet a test has ended."""
        for fixture in [*self._nodes]:
            if fixture not in fixtures or not self._nodes[fixture].kubelet.running:
                await self._nodes.pop(fixture).leave()
