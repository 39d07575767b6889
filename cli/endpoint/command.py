"""`pomona endpoint`: print where the gateway is, and a ready configuration for a client of it."""

import shlex
from collections.abc import Sequence
from typing import Final, NamedTuple

import click

from cli.api_objects import Obj, find_condition, has_condition
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_keys
from cli.endpoint.client_configuration import (
    CLIENTS,
    KEY_PLACEHOLDER,
    KEY_VARIABLE,
    EndpointFacts,
    render_configuration,
)
from cli.endpoint.gateway_address import GatewayAddress, find_gateway_address
from cli.lazy import program_name
from cli.output import print_note
from crds.gatewaykey import KEY_ENTRY, key_secret_name, may_use, read_key
from crds.text import escape_controls
from kube.resources import GATEWAY_KEYS, INFERENCE_SERVICES, SECRETS

_PLACEHOLDER: Final = "MODEL"
"""Stands for the model if the namespace has no service for chats."""


class _Endpoint(NamedTuple):
    """The gateway as a client with one key sees it."""

    address: GatewayAddress
    services: Sequence[Obj]
    """The services of the namespace that the key opens."""
    key: str
    """An expression of the shell for the key."""


@click.command("endpoint")
@click.option("--for", "client", type=click.Choice(list(CLIENTS)), help="Client. Default: a short overview of all.")
@click.option(
    "--key",
    "key_name",
    metavar="NAME",
    shell_complete=complete_keys,
    help=f"GatewayKey of the namespace whose key the client uses. Default: the key is in the variable {KEY_VARIABLE}.",
)
@click.option("--show-key", is_flag=True, help="Print the key itself, in place of the command that reads it.")
@click.option("--model", "model_name", metavar="NAME", help="Name of /v1/models. Default: the first service for chats.")
@click.option("--url", help="Address of the gateway, such as https://llm.example.com. Default: that in the cluster.")
@namespaced_cluster_options
def command(
    *,
    target: ClusterOptions,
    client: str | None,
    key_name: str | None,
    show_key: bool,
    model_name: str | None,
    url: str | None,
) -> None:
    """Print where the gateway of the cluster is, and how a client is configured for it.

    With --for, standard output can be put into a shell as it is; for codex, into its config.toml.

    \b
    Examples:
      pomona endpoint
      pomona endpoint --key ci --for openai
      pomona endpoint --key ci --for claude-code --url https://llm.example.com
    """
    if show_key and key_name is None:
        raise click.UsageError("--show-key needs --key NAME")
    endpoint = run_in_cluster(target, lambda cluster: _read_endpoint(cluster, key_name, url, show_key=show_key))

    names = [str(service["metadata"]["name"]) for service in endpoint.services]
    by_name = dict(zip(names, endpoint.services, strict=True))
    if model_name is None and (picked := pick_model(endpoint.services)):
        model_name = str(picked["metadata"]["name"])
    if model_name is None:
        print_note(
            f"the key opens no service for chats in this namespace: {_PLACEHOLDER} stands for one; "
            "name it by --model, as /v1/models lists it"
        )
        model_name = _PLACEHOLDER
    serving = by_name.get(model_name, {}).get("status", {}).get("serving", {})
    facts = EndpointFacts(endpoint.address.url, endpoint.key, model_name, serving.get("contextLength"))
    if client is None:
        print(escape_controls(render_overview(endpoint.address, facts, names, key_name)))
    else:
        comments = render_comments(endpoint.address, has_key=key_name is not None)
        print(escape_controls(comments + render_configuration(client, facts)), end="")


async def _read_endpoint(cluster: Cluster, key_name: str | None, url: str | None, *, show_key: bool) -> _Endpoint:
    """Read what the command prints. Raises click.ClickException, ApiError or Unreachable."""
    if url:
        # Users may state the address with /v1, which OpenAI's clients want and Anthropic's do not.
        address = GatewayAddress(url.rstrip("/").removesuffix("/v1"), "--url")
    else:
        address = await find_gateway_address(cluster)
    patterns: list[str] = []
    key = KEY_PLACEHOLDER
    if key_name is not None:
        gateway_key = await read_object(cluster.client, GATEWAY_KEYS, key_name, cluster.namespace)
        _check_key(gateway_key)
        patterns = gateway_key.get("spec", {}).get("services", [])
        key = await _read_key(cluster, key_name) if show_key else _render_key_command(cluster, key_name)
    listed = (await cluster.client.list(INFERENCE_SERVICES, cluster.namespace)).items
    services = [
        service
        for service in listed
        if may_use(cluster.namespace, patterns, cluster.namespace, service["metadata"]["name"], ())
    ]
    return _Endpoint(address, services, key)


def _check_key(gateway_key: Obj) -> None:
    """Print a note if the gateway refuses a key. Raises click.ClickException: there is no key yet."""
    if has_condition(gateway_key, "Ready"):
        return
    name, reason = gateway_key["metadata"]["name"], find_condition(gateway_key, "Ready").get("message", "")
    if not gateway_key.get("status", {}).get("digest"):
        raise click.ClickException(f"GatewayKey {name} has no key: {reason or 'the controller has not made it yet'}")
    print_note(f"the gateway refuses the key of GatewayKey {name} now: {reason}")


async def _read_key(cluster: Cluster, name: str) -> str:
    """Return the key of a GatewayKey, quoted for the shell. Raises click.ClickException: no client can send it."""
    secret = await cluster.client.get(SECRETS, key_secret_name(name), cluster.namespace)
    key = read_key(secret).decode(errors="replace")
    if not (key.isascii() and key.isprintable()):
        raise click.ClickException(f"Secret {cluster.namespace}/{key_secret_name(name)} has a key that cannot be sent")
    return shlex.quote(key)


def _render_key_command(cluster: Cluster, name: str) -> str:
    """Return an expression of the shell that reads the key of a GatewayKey when it is evaluated."""
    options = cluster.target.render(namespace=cluster.namespace)
    return f"\"$(kubectl get secret {key_secret_name(name)}{options} -o jsonpath='{{.data.{KEY_ENTRY}}}' | base64 -d)\""


def pick_model(services: Sequence[Obj]) -> Obj | None:
    """Return the first service for chats, of those that serve if any does; None if there is none."""
    chats = [service for service in services if service["spec"].get("mode", "chat") == "chat"]
    return min(chats, key=lambda service: not has_condition(service, "Ready"), default=None)


def render_comments(address: GatewayAddress, *, has_key: bool) -> str:
    """Return what stands above a configuration, in lines that shells and TOML pass over."""
    lines = [f"# {address.url} is the gateway, by {address.origin}."]
    if address.forwarding:
        lines.append(f"# First, in another terminal: {address.forwarding}")
    if address.service_url:
        lines.append(f"# In pods of the cluster it is {address.service_url}.")
    if not has_key:
        lines.append(f"# First, or with --key NAME: export {_render_key_creation()}")
    return "\n".join(lines) + "\n"


def render_overview(address: GatewayAddress, facts: EndpointFacts, names: Sequence[str], key_name: str | None) -> str:
    """Return the base URLs with the clients that use each, the way there, the key, the models, and the next step."""
    clients = [
        ", ".join(name for name, configuration in CLIENTS.items() if configuration.is_of_anthropic is of_anthropic)
        for of_anthropic in (False, True)
    ]
    rows = {
        "OpenAI's API": f"{facts.openai_url}  for {clients[0]}",
        "Anthropic's API": f"{facts.url}  for {clients[1]}",
        "reached by": address.forwarding or address.origin,
        "in pods": address.service_url,
        "key": f"{KEY_VARIABLE}={facts.key}" if key_name else _render_key_creation(),
        "services": ", ".join(names) or "none in this namespace",
        "next": f"{program_name()} endpoint --key {key_name or 'NAME'} --for CLIENT",
    }
    return "\n".join(f"{title:<17}{text}" for title, text in rows.items() if text)


def _render_key_creation() -> str:
    return f'{KEY_VARIABLE}="$({program_name()} key create NAME)"'
