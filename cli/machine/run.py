"""`pomona run`: talk to a model, by a running `pomona up` or by one that is started for it."""

import asyncio
import shlex
import sys
from pathlib import Path

import click

from cli.cluster_access import INTERRUPTED_EXIT
from cli.completion import complete_instance_services
from cli.machine.background import start_in_background
from cli.machine.chat import chat_here
from cli.machine.instance import Instance, find_instance, locate_state_folder
from cli.machine.service_watch import watch_service
from cli.options import state_folder_option
from cli.output import print_note


@click.command("run")
@click.argument("model", shell_complete=complete_instance_services)
@click.argument("prompt", required=False)
@state_folder_option
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the endpoint, if none runs. Default: as `up` has it."
)
def command(model: str, prompt: str | None, *, state_dir: Path | None, port: int | None) -> None:
    """Send PROMPT to MODEL, or have a conversation with it.

    MODEL is a service of the running `pomona up` of this machine, or what `pomona up --model` takes. If none runs, one
    is started in the background, which goes on after this command: it loads the model by the first request, and unloads
    it when it is idle. `pomona ps` shows it, and `pomona down` ends it.

    \b
    Examples:
      pomona run qwen3-8b
      pomona run ~/models/tiny.gguf 'Who are you?'
    """
    from standalone.ask import AskError  # noqa: PLC0415 - not needed for --help

    try:
        instance = find_instance(state_dir)
        if instance is None:
            instance = _start(model, locate_state_folder(state_dir), port)
            name = instance.status.services[0].name
        else:
            name = find_served(instance, model)
        service = watch_service(instance, name, lambda service: service.can_serve)
        if service.problem:
            raise click.ClickException(f"{name}: {service.problem}")
        chat_here(instance, name, prompt)
    except AskError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        print()
        sys.exit(INTERRUPTED_EXIT)


def _start(model: str, folder: Path, port: int | None) -> Instance:
    """Start an instance that serves the model on demand. Raises click.ClickException and click.exceptions.Exit."""
    print_note(f"no `pomona up` runs in {folder}: starting one in the background, `pomona down` ends it")
    ports = [] if port is None else [f"--port={port}"]
    return start_in_background([f"--model={model}", "--on-demand", f"--state-dir={folder}", *ports], folder)


def find_served(instance: Instance, model: str) -> str:
    """Return the name of the service that has a name or a source. Raises click.ClickException: there is none."""
    services = instance.status.services
    if any(service.name == model for service in services):
        return model
    source = _find_source(instance, model)
    if served := [service.name for service in services if source and service.source == source]:
        return served[0]

    names = ", ".join(service.name for service in services) or "nothing"
    raise click.ClickException(
        f"the running `pomona up` (pid {instance.status.pid}) serves {names}, and not {model}: add it to its files, or "
        f"end it by `pomona down` and repeat `pomona run {shlex.quote(model)}`"
    )


def _find_source(instance: Instance, model: str) -> str:
    """Return the source of the weights that a name means, without secrets; "" if it means none, or is not known."""
    from artifacts.errors import ArtifactError  # noqa: PLC0415 - not needed for --help
    from artifacts.repositories.repository import SourceAccess  # noqa: PLC0415 - same
    from artifacts.source import SourceError, without_secrets  # noqa: PLC0415 - same
    from cli.outcome import read_endpoint, read_hub_token  # noqa: PLC0415 - same
    from standalone.model_lookup import open_lookup  # noqa: PLC0415 - same
    from standalone.model_names import ModelNameError  # noqa: PLC0415 - same

    access = SourceAccess(token=read_hub_token(), endpoint=read_endpoint(), file_root=Path("/"))
    lookup = open_lookup(instance.folder, access)
    try:
        choice = asyncio.run(lookup.find(model, instance.status.budget_bytes))
    except (ModelNameError, SourceError, ArtifactError):
        return ""
    return without_secrets(choice.source)
