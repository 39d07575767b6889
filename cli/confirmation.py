"""A question before something is taken away, which only a person at a terminal can answer."""

import signal
import sys

import click


def confirm(situation: str, question: str) -> None:
    """Ask whether to go on.

    Raises:
        click.Abort: the answer is no, or Ctrl-C.
        click.ClickException: there is nobody to answer.
    """
    if not sys.stdin.isatty():
        raise click.ClickException(f"{situation}: add --yes to go on")
    # asyncio takes the first Ctrl-C for its task, which cannot end while the prompt blocks the loop.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        click.confirm(f"{situation}. {question}", abort=True, err=True)
    finally:
        signal.signal(signal.SIGINT, former)
