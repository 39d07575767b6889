"""Reach a service from outside of the cluster: a pod by way of the API server, a host at its own address.

The API server's proxy for Services would do neither: it removes the header with the token, which it takes for its own,
and knows no EndpointSlices of hosts. A port of a pod is forwarded instead, as kubectl does.
"""

import contextlib
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import aiohttp
import click

from cli.api_objects import Obj, has_condition
from cli.cluster_access import Cluster, read_object
from cli.lazy import program_name
from cli.options import load_hosts_ca
from crds.meta import HTTPS, LABEL_SERVICE, LABEL_SERVICE_NAME, LABEL_SLICE_MANAGED_BY, SLICE_MANAGED_BY
from kube.errors import NotFound
from kube.port_forward import forward_port
from kube.resources import ENDPOINT_SLICES, INFERENCE_SERVICES, PODS, SECRETS
from runtimes.pod import SERVICE_PORT
from standalone.ask import CONNECT_SECONDS, AskError, open_session


@contextlib.asynccontextmanager
async def open_service(
    cluster: Cluster, name: str, url: str | None, hosts_ca: Path | None
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Yield a session with the token of a service, and the base URL of a replica.

    Args:
        cluster: the cluster.
        name: the service.
        url: its address, if the user knows a better one.
        hosts_ca: file with the CA of hosts that serve https.

    Raises:
        click.ClickException: the service does not exist, is for no chats, or has no replica that answers.
        AskError: its host cannot be reached.
        ApiError: the API server refuses.
        Unreachable: the API server does not answer.
    """
    # 1. Its token, and the address that the user knows. tls: what the certificate of a host is checked by
    service = await read_object(cluster.client, INFERENCE_SERVICES, name, cluster.namespace)
    mode = service["spec"].get("mode", "chat")
    if mode != "chat":
        raise click.ClickException(f"{name} is for {mode} (spec.mode) and cannot chat")
    token = await _read_token(cluster, name)
    tls = load_hosts_ca(hosts_ca) if hosts_ca else True
    if url:
        # Users may state the address with /v1, which each request adds itself.
        base = url.rstrip("/").removesuffix("/v1")
        async with open_session(aiohttp.TCPConnector(ssl=tls), token) as session:
            yield session, base
        return

    # 2. A ready pod, by a forwarded port.
    label = f"{LABEL_SERVICE}={name}"
    pods = (await cluster.client.list(PODS, cluster.namespace, label_selector=label)).items
    serving = (pod for pod in pods if has_condition(pod, "Ready") and not pod["metadata"].get("deletionTimestamp"))
    if ready := next(serving, None):
        pod = ready["metadata"]["name"]
        async with (
            forward_port(cluster.credentials, cluster.namespace, pod, SERVICE_PORT) as path,
            open_session(aiohttp.UnixConnector(str(path)), token) as session,
        ):
            yield session, f"http://{name}.{cluster.namespace}.svc"
        return

    # 3. Else a ready process on a host, at the address of the host.
    label = f"{LABEL_SERVICE_NAME}={name},{LABEL_SLICE_MANAGED_BY}={SLICE_MANAGED_BY}"
    slices = (await cluster.client.list(ENDPOINT_SLICES, cluster.namespace, label_selector=label)).items
    # `list_host_urls` yields a URL for each process of the service that is ready.
    address = next(list_host_urls(slices), None)
    if address is None:
        raise _explain_missing_replica(cluster, name)
    async with open_session(aiohttp.TCPConnector(ssl=tls), token) as session:
        await check_host(session, address, name)
        yield session, address


def _explain_missing_replica(cluster: Cluster, name: str) -> click.ClickException:
    command = f"{program_name()} status {name}{cluster.target.render()}"
    return click.ClickException(f"{name} has no ready replica: `{command}` says what it waits for")


async def _read_token(cluster: Cluster, name: str) -> str:
    """Return the token of a service. Raises click.ClickException: it has none yet, or one that cannot be sent."""
    try:
        secret = await cluster.client.get(SECRETS, f"{name}-token", cluster.namespace)
    except NotFound as error:
        raise _explain_missing_replica(cluster, name) from error
    token = b64decode(secret.get("data", {}).get("token", "")).decode(errors="replace")
    if not (token.isascii() and token.isprintable()):
        raise click.ClickException(
            f"Secret {cluster.namespace}/{name}-token has a token that no request can carry: the controller replaces "
            "it within ten minutes"
        )
    return token


def list_host_urls(slices: Iterable[Obj]) -> Iterator[str]:
    """Yield the base URLs of the ready endpoints of EndpointSlices."""
    for endpoint_slice in slices:
        for port in endpoint_slice.get("ports") or []:
            scheme = "https" if port.get("appProtocol") == HTTPS else "http"
            for endpoint in endpoint_slice.get("endpoints") or []:
                if endpoint.get("conditions", {}).get("ready"):
                    for address in endpoint["addresses"]:
                        shown = f"[{address}]" if ":" in address else address
                        yield f"{scheme}://{shown}:{port['port']}"


async def check_host(session: aiohttp.ClientSession, address: str, name: str) -> None:
    """Raise AskError, with the way out, if this machine does not reach the host or does not trust it."""
    try:
        # Any answer will do: it shows that the host is reached and its certificate trusted.
        timeout = aiohttp.ClientTimeout(total=2 * CONNECT_SECONDS, sock_connect=CONNECT_SECONDS)
        async with session.get(f"{address}/v1/models", timeout=timeout, allow_redirects=False):
            return
    except aiohttp.ClientConnectorCertificateError as error:
        raise AskError(f"the certificate of {address} is not trusted: name its CA with --hosts-ca") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise AskError(
            f"{name} is served on a host at {address}, which this machine does not reach "
            f"({str(error) or type(error).__name__}): ask from the network of the host, or forward a port yourself and "
            "name it with --url"
        ) from error
