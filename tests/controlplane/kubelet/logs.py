"""Log files of containers, in the layout of a kubelet, and the server of logs and ports that kubectl reaches."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from aiohttp import web

from tests.controlplane.kubelet import port_forward

# The part of a log that may become a termination message: the last 2048 bytes or 80 lines, whichever is less.
FALLBACK_BYTES = 2048
FALLBACK_LINES = 80
TERMINATION_MESSAGE_BYTES = 4096
FOLLOW_SECONDS = 0.2


class LogFolder:
    """Log files of one node: `<root>/<namespace>_<pod>_<uid>/<container>/<restart count>.log`; they outlive the pod."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, namespace: str, pod: str, uid: str, container: str, restart_count: int) -> Path:
        """Return the file of one run of a container; create its folder."""
        folder = self.root / f"{namespace}_{pod}_{uid}" / container
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{restart_count}.log"

    def latest(self, namespace: str, pod: str, container: str, *, previous: bool = False) -> Path | None:
        """Return the newest run's file, or the one before it, of the newest pod of this name."""
        folders = self.root.glob(f"{namespace}_{pod}_*/{container}")
        newest = max(folders, key=lambda folder: folder.stat().st_mtime_ns, default=None)
        runs = sorted(newest.glob("*.log"), key=lambda path: int(path.stem)) if newest else []
        position = 2 if previous else 1
        return runs[-position] if len(runs) >= position else None


def tail(path: Path, *, lines: int = FALLBACK_LINES, limit_bytes: int = FALLBACK_BYTES) -> str:
    """Return the last lines of a file, at most `limit_bytes` of it; empty when there is no file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit_bytes))
        content = file.read()
    return b"".join(content.splitlines(keepends=True)[-lines:]).decode(errors="replace")


def termination_message(message_file: Path, log: Path, *, policy: str, failed: bool) -> str:
    """Return the content of the message file, else the end of the log if the policy selects it."""
    with message_file.open("rb") as file:
        message = file.read(TERMINATION_MESSAGE_BYTES).decode(errors="replace")
    if not message and failed and policy == "FallbackToLogsOnError":
        return tail(log)
    return message


def complete(log: Path) -> None:
    """Mark a log as complete by making the file read-only."""
    log.chmod(0o444)


def _is_complete(log: Path) -> bool:
    return not log.stat().st_mode & 0o200


async def serve(
    folder: LogFolder,
    find_address: port_forward.FindAddress,
    address: str,
    port: int,
    *,
    certificate: Path,
    key: Path,
) -> web.AppRunner:
    """Serve `kubectl logs` (with --tail, --follow, --previous) and ports over TLS; the caller cleans the runner up."""

    async def container_logs(request: web.Request) -> web.StreamResponse:
        names = request.match_info
        path = folder.latest(
            names["namespace"], names["pod"], names["container"], previous=request.query.get("previous") == "true"
        )
        if path is None:
            waiting = f'container "{names["container"]}" in pod "{names["pod"]}" is waiting to start: ContainerCreating'
            return web.Response(status=400, text=waiting)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        with path.open("rb") as file:
            if lines := request.query.get("tailLines"):
                await response.write(b"".join(file.readlines()[-int(lines) :] if int(lines) else []))
            while request.transport is not None:  # the client is connected
                follow = request.query.get("follow") == "true" and not _is_complete(path)
                if content := file.read(1 << 16):
                    await response.write(content)
                elif follow:
                    await asyncio.sleep(FOLLOW_SECONDS)
                else:
                    break
        return response

    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", container_logs)
    app.router.add_get("/portForward/{namespace}/{pod}", port_forward.handle_with(find_address))
    app.router.add_post("/portForward/{namespace}/{pod}", port_forward.upgrade_with(find_address))
    # A port that is forwarded stays open as long as its client likes.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    await web.TCPSite(runner, address, port, ssl_context=context).start()
    return runner
