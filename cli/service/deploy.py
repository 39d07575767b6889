"""`pomona deploy`: serve a model in the cluster, from options, from the catalog or from files."""

import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from cli.api_objects import Obj, find_users
from cli.cluster_access import INTERRUPTED_EXIT, Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_catalog, complete_models
from cli.lazy import program_name
from cli.options import SIZE, choose_files, manifests_option, timeout_option
from cli.output import print_manifests, progress_width, without_managed_fields, wrap_text
from cli.service.progress import ProgressPrinter, wait_until_serving
from cli.service.verdict import Verdict
from crds.meta import CLI_FIELD_MANAGER, Priority
from kube.errors import NotFound
from kube.resources import INFERENCE_SERVICES, MODELS


@click.command("deploy")
@click.argument("name", required=False, shell_complete=complete_catalog)
@click.option(
    "--model",
    metavar="SOURCE|NAME",
    help="Source of the weights, or name of a Model that exists.",
    shell_complete=complete_models,
)
@click.option("--model-name", metavar="NAME", help="Name of the Model of a source. Default: by the file or repository.")
@choose_files
@click.option("--source-secret", metavar="NAME", help="Secret with the token for a gated or private source.")
@click.option("--memory", "memory_bytes", type=SIZE, help="Memory of the model, if its header does not tell it.")
@click.option(
    "--accelerator",
    metavar="NAME",
    help="cpu, nvidia, amd, intel-gaudi, intel; or metal: on a Mac. "
    "Default: that of the catalog entry, else of the Model.",
)
@click.option("--devices", type=int, help="Devices of each replica in a pod, all of one node.")
@click.option("--replicas", type=int, help="Number of replicas. Default: 1.")
@click.option("--context-length", type=int, help="Tokens that each request may use. Default: 4096.")
@click.option("--parallel", type=int, help="Requests that a replica serves at once. Default: 1.")
@click.option("--runtime", metavar="ENGINE", help="Engine. Default: by the format of the weights.")
@click.option("--image", help="Image of the engine, where Pomona has none for the accelerator.")
@click.option(
    "--priority",
    type=click.Choice(get_args(Priority)),
    help="Services of a higher priority go first when hosts are scarce. Default: normal.",
)
@manifests_option
@click.option("--dry-run", is_flag=True, help="Print the objects that would be applied, without any cluster.")
@click.option("--no-wait", is_flag=True, help="Return when the objects are applied.")
@timeout_option
@click.option("--output", "-o", "output_format", type=click.Choice(["yaml", "json"]), help="Print the applied objects.")
@namespaced_cluster_options
def command(
    name: str | None,
    *,
    target: ClusterOptions,
    paths: tuple[Path, ...],
    dry_run: bool,
    no_wait: bool,
    timeout: float | None,
    output_format: str | None,
    **options: Any,
) -> None:
    """Apply a Model and an InferenceService, and wait until it answers.

    NAME is the name of the service. Without --model it is also a model of `pomona catalog`. With --file, the manifests
    are those for `kubectl apply`, and are checked by the same rules. A field that belongs to another tool is never
    overwritten. Ctrl-C ends the wait only: the cluster goes on deploying.

    An option that is left out the next time goes back to its default.

    Exit code: 0 it serves, 1 it cannot serve, does not in time, or the cluster refused it, 2 the options or files are
    invalid.

    \b
    Examples:
      pomona deploy chat --model hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf --accelerator metal
      pomona deploy qwen3-8b --replicas 2 --context-length 8192
      pomona deploy small --model qwen3-8b-q4-k-m --priority batch
      pomona deploy -f model.yaml -f service.yaml
      pomona deploy qwen3-8b --dry-run > qwen3-8b.yaml
      pomona deploy -f - < qwen3-8b.yaml
    """
    from cli.service.manifests import ServiceOptions, build_objects, load_files  # noqa: PLC0415 - not for --help

    # 1. Build the objects, from files or from options. `options` has those of the service; None and (): not stated
    if paths:
        if name or any(value not in (None, ()) for value in options.values()):
            raise click.UsageError("--file takes neither NAME nor options of a service: write them into the file")
        objects = load_files(paths, target.namespace)
    elif name:
        objects = build_objects(ServiceOptions(name=name, **options), target.namespace)
    else:
        raise click.UsageError("nothing to deploy: give NAME, or --file")

    # 2. Print them, or apply them.
    if dry_run:
        print_manifests(objects[0] if len(objects) == 1 else objects, output_format or "yaml")
        return
    sys.exit(_apply_and_wait(target, name, objects, output_format, waits=not no_wait, timeout=timeout))


def _apply_and_wait(
    target: ClusterOptions,
    name: str | None,
    objects: Sequence[Obj],
    output_format: str | None,
    *,
    waits: bool,
    timeout: float | None,
) -> int:
    """Apply the objects, wait until their services serve, and return the exit code.

    Args:
        target: the cluster that the user means.
        name: the service; None: the objects are those of files.
        objects: the objects, Models first.
        output_format: yaml or json, to print the applied objects on standard output and progress on standard error.
        waits: False: return when the objects are applied.
        timeout: the seconds after which the wait ends with exit code 1; the cluster goes on deploying.

    Raises:
        click.ClickException: the cluster refuses an object, or cannot be reached.
    """
    applied: list[Obj] = []  # filled by `_apply` one by one, so that it is right also after Ctrl-C
    # show: prints a line of progress
    show = functools.partial(print, file=sys.stderr if output_format else sys.stdout, flush=True)

    # `applied` grows while `_apply` runs: each call of this function sees what is applied by then.
    def list_services() -> list[tuple[Obj, ClusterOptions]]:
        """Return the services that are applied, each with the options that reach it."""
        services = [manifest for manifest in applied if manifest["kind"] == "InferenceService"]
        return [(service, _locate(target, service, objects)) for service in services]

    # 1. Apply the objects, and wait; after Ctrl-C or a timeout, say how to see how far they are.
    try:
        run_in_cluster(target, lambda cluster: _apply(cluster, name, objects, applied, show))
        if output_format:
            cleaned = [without_managed_fields(manifest) for manifest in applied]
            print_manifests(cleaned[0] if len(cleaned) == 1 else cleaned, output_format)
        services = list_services()
        # Without a service, such as for Models alone, there is nothing to wait for.
        if not waits or not services:
            return 0
        verdicts = run_in_cluster(target, lambda cluster: _wait(cluster, services, show), timeout=timeout)
    except (KeyboardInterrupt, TimeoutError) as error:
        has_timed_out = isinstance(error, TimeoutError)
        names = [service["metadata"]["name"] for service, _ in list_services()]
        if names:
            command = f"{program_name()} status {names[0]}{list_services()[0][1].render()}"
            line_end = "" if has_timed_out else "\n"  # the terminal has shown ^C
            show(f"{line_end}{', '.join(names)} goes on deploying: `{command}` shows how far it is")
        return 1 if has_timed_out else INTERRUPTED_EXIT

    # 2. Print the verdicts.
    for (service, where), verdict in zip(services, verdicts, strict=True):
        _print_result(service["metadata"]["name"], where, verdict, show)
    return 1 if any(verdict.state == "cannot serve" for verdict in verdicts) else 0


def _locate(target: ClusterOptions, service: Obj, objects: Sequence[Obj]) -> ClusterOptions:
    """Return the options with which a proposed command reaches a service: with its namespace, if the user stated one.

    Args:
        target: the options of this command.
        service: the service as it was applied, which has a namespace in any case.
        objects: the objects before that, which have a namespace only if their file or --namespace states one.
    """
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    # A namespace in a file or --namespace must be repeated in the command; that of the context need not.
    stated = any(
        (manifest["metadata"]["name"], manifest["metadata"].get("namespace")) == (name, namespace)
        for manifest in objects
    )
    return replace(target, namespace=namespace) if stated else target


async def _apply(
    cluster: Cluster, name: str | None, objects: Sequence[Obj], applied: list[Obj], show: Callable[[str], None]
) -> None:
    """Apply the objects by server-side apply; a field that another tool owns is never overwritten.

    Args:
        cluster: the cluster.
        name: the service, whose Model is checked first; None: the objects are those of files.
        objects: the objects.
        applied: gets each object as the API server returns it.
        show: prints a line of progress.
    """
    if name is not None:
        await _check_model(cluster, name, objects[0])

    for manifest in objects:
        resource = MODELS if manifest["kind"] == "Model" else INFERENCE_SERVICES
        metadata = {"namespace": cluster.namespace, **manifest["metadata"]}
        # Without `force`, the API server refuses the object if another tool has set one of its fields otherwise.
        stored = await cluster.client.apply(
            resource, {**manifest, "metadata": metadata}, field_manager=CLI_FIELD_MANAGER, force=False
        )
        applied.append(stored)
        show(f"applied {manifest['kind']} {metadata['name']} in namespace {metadata['namespace']}")


async def _check_model(cluster: Cluster, name: str, first: Obj) -> None:
    """Check the Model of a service before anything is applied; `first` is the Model to apply, else the service.

    Raises:
        click.ClickException: the named Model does not exist, or other services use the Model with another source.
    """
    namespace = first["metadata"].get("namespace") or cluster.namespace
    if first["kind"] != "Model":
        # Without its Model the service would wait for ever, which a misspelt name does not deserve.
        await read_object(cluster.client, MODELS, first["spec"]["modelRef"], namespace)
        return

    # A Model of this name may exist with another source; then no other service may use it.
    model, source = first["metadata"]["name"], first["spec"]["source"]
    try:
        present = (await cluster.client.get(MODELS, model, namespace))["spec"]["source"]
    except NotFound:
        return
    if present == source:
        return
    users = find_users(model, name, (await cluster.client.list(INFERENCE_SERVICES, namespace)).items)
    if users:
        raise click.ClickException(
            f"Model {model} has source {present} and is used by {', '.join(users)}: choose another with --model-name"
        )


async def _wait(
    cluster: Cluster, services: Sequence[tuple[Obj, ClusterOptions]], show: Callable[[str], None]
) -> list[Verdict]:
    """Wait for all services at once, and return the verdict on each; a line of several names its service."""
    waits = []
    for service, target in services:
        prefix = f"{service['metadata']['name']}: " if len(services) > 1 else ""
        printer = ProgressPrinter(prefix, show, progress_width())
        waits.append(wait_until_serving(cluster.client, service, target, printer))
    return await asyncio.gather(*waits)


def _print_result(name: str, target: ClusterOptions, verdict: Verdict, show: Callable[[str], None]) -> None:
    """Print what became of a service: by `show`, or on standard error if it cannot serve."""
    program, options = program_name(), target.render()
    match verdict.state:
        case "serves":
            show(f"{name} serves: ask it with `{program} chat {name}{options}`")
        case "suspended":
            show(f"{name} is suspended: {verdict.message}")
        case _:
            for line in wrap_text(f"{name} cannot serve: {verdict.message}", progress_width()):
                print(line, file=sys.stderr)
            print(f"see `{program} status {name}{options}`; {verdict.next_step}", file=sys.stderr)
