"""`pomona load` and `pomona unload`: bring a model on demand into memory, and take it out."""

from pathlib import Path

import click

from cli.cluster_access import INTERRUPTED_EXIT
from cli.completion import complete_instance_services
from cli.machine.instance import require_instance
from cli.machine.service_watch import watch_service
from cli.options import state_folder_option


@click.command("load")
@click.argument("name", shell_complete=complete_instance_services)
@state_folder_option
def load(name: str, state_dir: Path | None) -> None:
    """Load the model of the service NAME now, as its first request would, and wait until it answers.

    It is unloaded again after its idle time. Ctrl-C ends the wait only.

    \b
    Example:
      pomona load chat
    """
    from cli.machine.service_output import describe_memory  # noqa: PLC0415 - not needed for --help

    instance = require_instance(state_dir)
    instance.say_asked()
    answer = instance.call(lambda client: client.load(name))
    if answer.message:
        print(answer.message)
        return
    try:
        service = watch_service(instance, name, lambda service: service.phase in {"Ready", "Degraded"})
    except KeyboardInterrupt:
        click.get_current_context().exit(INTERRUPTED_EXIT)
    if service.problem:
        raise click.ClickException(f"{name}: {service.problem}")
    print(f"{name} is loaded, with {describe_memory(service)}")


@click.command("unload")
@click.argument("name", shell_complete=complete_instance_services)
@state_folder_option
def unload(name: str, state_dir: Path | None) -> None:
    """Unload the model of the service NAME once its running requests have ended, and wait for that.

    Its next request loads it again. `pomona stop`, as Ollama calls it, does the same. Ctrl-C ends the wait only.

    \b
    Examples:
      pomona unload chat
      pomona stop chat
    """
    instance = require_instance(state_dir)
    instance.say_asked()
    answer = instance.call(lambda client: client.unload(name))
    if answer.message:
        print(answer.message)
        return
    # A request that waits loads it again at once: then it has ended to load, and not to be unloaded.
    try:
        watch_service(instance, name, lambda service: not service.is_loaded or service.phase == "Starting")
    except KeyboardInterrupt:
        click.get_current_context().exit(INTERRUPTED_EXIT)
    print(f"{name} is unloaded; its next request loads it again")
