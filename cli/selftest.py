"""`pomona agent selftest`: what the agent relies on, on this machine, beside what it expects."""

import click


@click.command("selftest")
def command() -> None:
    """Look at this machine as the agent does, and say where it differs from what the agent expects.

    \b
    Example:
      pomona agent selftest
    """
