"""`pomona list` and `pomona status` about a running `pomona up`."""

import sys

import msgspec

from cli.machine.instance import Instance
from cli.machine.service_output import format_services, format_status
from cli.output import DATA_FORMATS, print_facts, progress_width, terminal_width


def print_services(instance: Instance, output_format: str) -> None:
    """Print all services of the instance."""
    instance.say_asked()
    services = instance.status.services
    if output_format in DATA_FORMATS:
        print_facts([msgspec.to_builtins(service) for service in services], output_format)
    elif output_format == "name":
        print("\n".join(service.name for service in services))
    elif not services:
        print("no service: its files have none", file=sys.stderr)
    else:
        is_wide = output_format == "wide"
        print(format_services(services, None if is_wide else progress_width(), is_wide=is_wide))


def print_status(instance: Instance, name: str, output_format: str) -> bool:
    """Print all about one service; return whether it answers requests. Raises click.ClickException: there is none."""
    service = instance.find_service(name)
    instance.say_asked()
    if output_format in DATA_FORMATS:
        print_facts(msgspec.to_builtins(service), output_format)
    else:
        print(format_status(service, terminal_width()))
    return service.can_serve
