"""`pomona logs` ends cleanly with the program that reads its output, and prints as many lines as asked."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from cli.cluster_access import Cluster
from cli.cluster_options import ClusterOptions
from cli.service.logs import print_pod_log, print_process_log
from crds.meta import DEFAULT_CONTAINER
from kube.client import Client, Obj
from kube.credentials import Credentials
from kube.errors import ApiError

POD: Obj = {
    "metadata": {"name": "chat-1", "annotations": {DEFAULT_CONTAINER: "engine"}},
    "spec": {
        "nodeName": "node-1",
        "initContainers": [{"name": "engine", "restartPolicy": "Always"}],
        "containers": [{"name": "proxy"}],
    },
}


class _ClosedPipe:
    """An output whose reader is gone."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return False


class _DeadNode:
    """A client of an API server that does not reach the kubelet of the pod's node."""

    async def stream_log(self, *_: Any, **__: Any) -> AsyncGenerator[bytes, None]:
        for line in list[bytes]():
            yield line
        raise ApiError("get pods default/chat-1/log", status=500, message='Get "https://node-1:10250": dial tcp\x9b')


class _EndedLogs:
    """A client with the log of each container, which is one line."""

    async def stream_log(self, _pod: str, _namespace: str, container: str, **_: Any) -> AsyncGenerator[bytes, None]:
        yield b"said by " + container.encode()


class _OpenLog:
    """A client with one endless log."""

    is_open = False

    async def stream_log(self, *_: Any, **__: Any) -> AsyncGenerator[bytes, None]:
        self.is_open = True
        try:
            while True:
                yield b"a line"
        finally:
            self.is_open = False


def test_log_is_closed_as_soon_as_its_reader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _OpenLog()
    cluster = Cluster(cast("Client", client), cast("Credentials", None), "default", ClusterOptions())

    async def main() -> None:
        monkeypatch.setattr(sys, "stdout", _ClosedPipe())
        with pytest.raises(BrokenPipeError):
            await print_pod_log(cluster, POD, "", follow=True, tail=None)
        assert not client.is_open, "the end of the event loop would close it with a traceback"

    asyncio.run(main())


async def test_log_of_a_pod_is_that_of_its_engine_and_not_of_the_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(cast("Client", _EndedLogs()), cast("Credentials", None), "default", ClusterOptions())
    await print_pod_log(cluster, POD, "", follow=False, tail=None)
    assert capsys.readouterr().out == "said by engine\n"


async def test_dead_node_of_one_replica_does_not_cut_the_logs_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    client = cast("Client", _DeadNode())
    cluster = Cluster(client, cast("Credentials", None), "default", ClusterOptions())
    await print_pod_log(cluster, POD, "[chat-1] ", follow=True, tail=None)
    assert capsys.readouterr().err == '[chat-1] Get "https://node-1:10250": dial tcp\\x9b\n'
    with pytest.raises(ApiError):
        await print_pod_log(cluster, POD, "", follow=True, tail=None)


@pytest.mark.parametrize(("tail", "shown"), [(None, ["a", "b", "c"]), (0, []), (2, ["b", "c"]), (5, ["a", "b", "c"])])
def test_tail_longer_than_the_log_of_a_process_prints_all(
    capsys: pytest.CaptureFixture[str], tail: int | None, shown: list[str]
) -> None:
    process: Obj = {
        "metadata": {"name": "chat-1"},
        "spec": {"hostName": "studio-1"},
        "status": {"lastExit": {"log": "a\nb\nc\n"}},
    }
    print_process_log(process, "", tail)
    assert capsys.readouterr().out.split() == shown
