"""`pomona run`: talk to a model, by a running `pomona up` or by one that is started for it."""

import dataclasses
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

    MODEL is a service of the running `pomona up` of this machine, or what `pomona up --model` takes, which is added to
    it: loaded by its first request, unloaded when it is idle, and there again after a restart, until `pomona delete`.
    If no `pomona up` runs, one is started in the background, which goes on after this command. `pomona ps` shows what
    is loaded, and `pomona down` ends it.

    \b
    Examples:
      pomona run qwen3-8b
      pomona run ~/models/tiny.gguf 'Who are you?'
    """
    from standalone.ask import AskError  # noqa: PLC0415 - not needed for --help

    try:
        instance = find_instance(state_dir) or _start(locate_state_folder(state_dir), port)
        name = _prepare(instance, model)
        chat_here(dataclasses.replace(instance, status=instance.read_status()), name, prompt)
    except AskError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        print()
        sys.exit(INTERRUPTED_EXIT)


def _start(folder: Path, port: int | None) -> Instance:
    """Start an instance. Raises click.ClickException and click.exceptions.Exit."""
    print_note(f"no `pomona up` runs in {folder}: starting one in the background, `pomona down` ends it")
    return start_in_background([f"--state-dir={folder}", *([] if port is None else [f"--port={port}"])], folder)


def _prepare(instance: Instance, model: str) -> str:
    """Add a model unless it is served, and wait until requests for it are taken; return the name of its service.

    Raises click.ClickException: it cannot be served, and is not added.
    """
    name, is_new = model, False
    if instance.status.find_service(model) is None:
        added = instance.call(lambda client: client.add(_locate(model)))
        name, is_new = added.name, added.is_new
        if added.note:
            print_note(added.note)
    service = watch_service(instance, name, lambda service: service.can_serve)
    if service.problem:
        if is_new:
            instance.call(lambda client: client.remove(name))
        raise click.ClickException(f"{name}: {service.problem}")
    return name


def _locate(model: str) -> str:
    """Return a path as an absolute one: the instance has another working folder. Names of the catalog are no paths."""
    path = Path(model).expanduser()
    return str(path.absolute()) if ("/" in model or path.suffix) and path.exists() else model
