"""A real control plane as local processes: etcd, API server, controller manager, scheduler.

It is meant for a sandbox, where fixed addresses and ports are free. The API server makes its own key and certificate on
its first start. The same key signs ServiceAccount tokens, and clients check the certificate: no key tool is needed.
Ready means that the API server says so and that the ServiceAccount `default/default` exists, which is the last thing
that a pod waits for.
"""

import asyncio
import inspect
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from tests.controlplane import network
from tests.controlplane.admin_session import AdminSession
from tests.controlplane.binaries import Binaries
from tests.controlplane.process import Process

SERVER = f"https://{network.ADDRESS}:443"
ETCD = "http://127.0.0.1:2379"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc"
"""Also the only audience of the API server."""
FEW_PROCESSORS = {"GOGC": "800", "GOMAXPROCS": "1"}
"""Memory is plentiful here, processors are not: Go collects garbage only when the heap is nine times the live data, and
no program runs on two processors at once, where its threads would search for work that the tests have."""
START_SECONDS = 120
POLL_SECONDS = 0.05
THROTTLED_SECONDS = 60
"""The API server asks clients to wait, a second at a time, until the storage of a kind is initialized."""
NODES = (*(f"{kind}-{number}" for kind in ("cpu", "gpu") for number in (1, 2, 3, 4, 5)), "disk-1", "disk-2")
"""Names for nodes, few and fixed because the API server reads their tokens from a file at its start."""

STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "kubernetes.io/host-path",
}


class PlaneError(Exception):
    """The control plane failed; the message has the end of the log that explains it."""


class NotThereError(PlaneError, LookupError):
    """404: there is no such object, or it does not exist yet."""


class ControlPlane:
    """etcd, API server, controller manager and scheduler of one cluster.

    Args:
        binaries: the programs.
        folder: for data, credentials and logs; made when absent.
        apiserver_options: more options of the API server, such as those of its audit log.
    """

    def __init__(self, binaries: Binaries, folder: Path, *apiserver_options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._binaries = binaries
        self._folder = folder
        self.certificates = folder / "certs"
        self._certificate = self.certificates / "apiserver.crt"
        self._tokens = self._write_identities()
        self._admin = AdminSession(self._certificate, self._tokens["admin"])
        self.etcd = self._process("etcd", binaries.etcd, etcd_arguments(folder))
        self.apiserver = self._process(
            "kube-apiserver", binaries.kube_apiserver, [*apiserver_arguments(folder), *apiserver_options]
        )
        self.controller_manager = self._process(
            "kube-controller-manager",
            binaries.kube_controller_manager,
            controller_manager_arguments(folder, self.kubeconfig("controller-manager")),
        )
        self.scheduler = self._process(
            "kube-scheduler",
            binaries.kube_scheduler,
            scheduler_arguments(folder, self.kubeconfig("system:kube-scheduler")),
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        """All processes of the control plane."""
        return self.etcd, self.apiserver, self.controller_manager, self.scheduler

    @property
    def secrets(self) -> list[str]:
        """The tokens of all users, for tests that check files which must not have one."""
        return list(self._tokens.values())

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a kubectl talks to this control plane, as admin."""
        # By default kubectl caches the kinds of an address in the home folder, and the previous plane had this address.
        return {"KUBECONFIG": str(self.kubeconfig()), "KUBECACHEDIR": str(self._folder / "kubectl-cache")}

    async def start(self) -> None:
        """Start everything and wait until pods can be made.

        Raises:
            PlaneError: the control plane did not become ready.
        """
        self.etcd.start()
        self.apiserver.start()
        await self._wait((self.certificates / "apiserver.key").exists, "the API server's certificate and key")
        self.controller_manager.start()
        await self._wait_until_ready()
        self.scheduler.start()  # earlier its role does not exist, and the scheduler would back off for seconds
        await self._wait(lambda: self._answers("/api/v1/namespaces/default/serviceaccounts/default"), "default/default")
        await self.request("POST", "/apis/storage.k8s.io/v1/storageclasses", STORAGE_CLASS)

    async def stop(self) -> None:
        """Kill all processes at once; the data is not used again."""
        await self._admin.close()
        await asyncio.gather(*(process.kill() for process in self.processes if process.running))

    async def stop_apiserver(self) -> None:
        """Kill the API server, as in an outage; clients are refused."""
        await self.apiserver.kill()

    async def start_apiserver(self) -> None:
        """Restart the API server, with the same address and data, and wait until it is ready.

        Controller manager and scheduler are restarted too: after minutes without an API server they retry only once a
        minute, and the next test would wait for them. Before, the API server must list the kinds of all CRDs again:
        a kind that the garbage collector does not find when it starts it does not collect for minutes.
        """
        self.apiserver.start()
        await self._wait_until_ready()
        await self._wait(self._lists_all_kinds, "the API server to list the kinds of all CRDs")
        for process in (self.controller_manager, self.scheduler):
            await _restart(process)

    async def collect_new_kinds(self) -> None:
        """Restart the garbage collector after kinds were installed, as it looks for new ones only twice a minute.

        Until it knows a kind, an object whose owner of this kind is deleted stays.
        """
        await _restart(self.controller_manager)

    def revive_controller_manager(self) -> None:
        """Start the controller manager again if it gave up, after ten seconds without a healthy API server.

        It does so at its start on a busy machine, also after `collect_new_kinds` and an outage.
        """
        if self.controller_manager.exit_code is not None:
            self.controller_manager.start()

    async def end_outage(self) -> None:
        """Restart the API server if it does not run: a test that failed in an outage must not fail those after it."""
        if not self.apiserver.running:
            await self.start_apiserver()

    def kubeconfig(self, user: str = "admin") -> Path:
        """Return the kubeconfig file of `admin` or of `system:node:NAME` for a name in NODES.

        Raises:
            PlaneError: no such user.
        """
        if user not in self._tokens:
            raise PlaneError(f"no user {user!r} in this control plane; there are {', '.join(self._tokens)}")
        return self._write_kubeconfig(user, self._tokens[user])

    async def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Return the kubeconfig file of a ServiceAccount, with a token that is valid for a day.

        Raises:
            PlaneError: there is no such account.
        """
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        review = await self.request("POST", path, {"spec": {"expirationSeconds": 86400}})
        return self._write_kubeconfig(f"{namespace}_{name}", review["status"]["token"])

    def token_kubeconfig(self, name: str, token: str) -> Path:
        """Return a kubeconfig file, named `name`, with a token."""
        return self._write_kubeconfig(name, token)

    async def apply(self, *paths: Path) -> None:
        """`kubectl apply --server-side` files or folders, also what a test before applied with Helm and left.

        Raises:
            PlaneError: kubectl refused; the message has its output.
        """
        await self.kubectl("apply", "--server-side", "--force-conflicts", *(f"--filename={path}" for path in paths))

    async def kubectl(self, *arguments: str) -> str:
        """Run kubectl as admin and return its output.

        Raises:
            PlaneError: it failed; the message has its output.
        """
        process = await asyncio.create_subprocess_exec(
            self._binaries.kubectl,
            *arguments,
            env={**os.environ, **self.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise PlaneError(f"kubectl {' '.join(arguments)}: {errors.decode().strip()}")
        return output.decode()

    async def request(self, method: str, path: str, body: object = None, *, accept: Iterable[int] = ()) -> Any:
        """Send a request as admin, and return the decoded response; one that is throttled is sent again.

        Args:
            method: HTTP method; PATCH is a merge patch.
            path: path and query.
            body: object to send as JSON.
            accept: statuses besides 2xx that are no failure.

        Raises:
            NotThereError: 404.
            PlaneError: any other status.
            aiohttp.ClientError: no answer.
        """
        headers = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        deadline = time.monotonic() + THROTTLED_SECONDS
        while True:
            response = await self._admin.send(method, SERVER + path, body, headers)
            wait = response.retry_after if response.status == HTTPStatus.TOO_MANY_REQUESTS else None
            if wait is None or time.monotonic() + float(wait) > deadline:
                break
            await asyncio.sleep(float(wait))
        if not response.ok and response.status not in accept:
            error = NotThereError if response.status == HTTPStatus.NOT_FOUND else PlaneError
            raise error(f"{method} {path}: {response.status} {response.text[:500]}")
        return json.loads(response.text) if response.content_type == "application/json" else response.text

    def log_tails(self, lines: int) -> str:
        """Return the ends of all logs, for a failed test."""
        return "\n".join(f"--- {process.name}\n{process.tail(lines)}" for process in self.processes)

    async def _wait_until_ready(self) -> None:
        await self._wait(lambda: self._answers("/readyz"), "the API server to be ready")

    async def _lists_all_kinds(self) -> bool:
        crds = (await self.request("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"))["items"]
        try:
            listed = await self.kubectl("api-resources", "--output=name")
        except PlaneError:  # a group is listed a moment before its kinds
            return False
        return {crd["metadata"]["name"] for crd in crds} <= set(listed.split())

    async def _answers(self, path: str) -> bool:
        try:
            await self.request("GET", path)
        except (aiohttp.ClientError, TimeoutError, PlaneError):
            return False
        return True

    async def _wait(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            value = condition()
            if await value if inspect.isawaitable(value) else value:
                return
            self.revive_controller_manager()
            for process in self.processes:
                if process.exit_code is not None:
                    raise PlaneError(f"{process.name} ended with {process.exit_code}:\n{process.tail(20)}")
            if time.monotonic() > deadline:
                raise PlaneError(f"waited {START_SECONDS} s for {what}:\n{self.log_tails(10)}")
            await asyncio.sleep(POLL_SECONDS)

    def _process(self, name: str, program: Path, arguments: list[str]) -> Process:
        return Process(name, [str(program), *arguments], self._folder / f"{name}.log", FEW_PROCESSORS)

    def _write_identities(self) -> dict[str, str]:
        groups = {"admin": "system:masters", "controller-manager": "system:masters", "system:kube-scheduler": ""}
        groups |= {f"system:node:{node}": "system:nodes" for node in NODES}
        tokens = {user: secrets.token_hex(16) for user in groups}
        lines = [f"{tokens[user]},{user},{user},{group}" for user, group in groups.items()]
        _write_private(self._folder / "tokens.csv", "\n".join(lines))
        return tokens

    def _write_kubeconfig(self, name: str, token: str) -> Path:
        path = self._folder / f"{name.replace(':', '_')}.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "pomona", "cluster": {"server": SERVER, "certificate-authority": str(self._certificate)}}
            ],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "pomona", "context": {"cluster": "pomona", "user": name}}],
            "current-context": "pomona",
        }
        _write_private(path, json.dumps(config))
        return path


async def _restart(process: Process) -> None:
    await process.kill()
    process.start()


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def etcd_arguments(folder: Path) -> list[str]:
    """Return the command line of etcd, which never waits for a disk because its data need not survive."""
    peers = "http://127.0.0.1:2380"
    return [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--unsafe-no-fsync",
    ]


def apiserver_arguments(folder: Path) -> list[str]:
    """Return the command line of the API server."""
    key = folder / "certs" / "apiserver.key"
    return [
        f"--etcd-servers={ETCD}",
        f"--cert-dir={folder / 'certs'}",
        "--bind-address=0.0.0.0",  # the Service's address is on the bridge too
        "--secure-port=443",
        f"--advertise-address={network.ADDRESS}",
        f"--service-cluster-ip-range={network.SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--token-auth-file={folder / 'tokens.csv'}",
        f"--service-account-issuer={SERVICE_ACCOUNT_ISSUER}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
    ]


def controller_manager_arguments(folder: Path, kubeconfig: Path) -> list[str]:
    """Return the command line of the controller manager, with short periods for volumes and dead nodes."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--root-ca-file={folder / 'certs' / 'apiserver.crt'}",
        # It writes the tokens of Secrets, as the controller managers of clusters do.
        f"--service-account-private-key-file={folder / 'certs' / 'apiserver.key'}",
        f"--cert-dir={folder / 'controller-manager'}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--enable-hostpath-provisioner",
        "--pvclaimbinder-sync-period=1s",
        "--node-monitor-period=1s",
        "--node-monitor-grace-period=15s",
    ]


def scheduler_arguments(folder: Path, kubeconfig: Path) -> list[str]:
    """Return the command line of the scheduler."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--cert-dir={folder / 'scheduler'}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ]
