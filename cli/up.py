"""`pomona up`: serve models on this machine alone, from the same files as a cluster."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
import click
from rich.console import Console

from artifacts.errors import ArtifactError
from artifacts.source import SourceError
from cli import log, outcome
from cli.size import Size
from cli.state import SHOWN, default_state_folder
from devices import host
from metal_agent.ledger import Ledger, budget_bytes
from metal_agent.ownership import HAND_OVER, own
from metal_agent.start import StartError
from standalone import desired, manifests, single, view
from standalone.ask import AskError, ask
from standalone.machine import Machine, Options, Wishes
from standalone.manifests import ManifestError, Wanted

PORT: Final = 8080


@click.command("up")
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--model", "sources", multiple=True, help="Serve this alone: hf://, http(s):// or a path. Repeatable.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Port on 127.0.0.1.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help=f"What is kept: weights, logs, records. Default: {SHOWN}."
)
@click.option("--memory-budget", type=Size(), help="Memory that models may use in all, such as 12GiB.")
@click.option("--ask", "question", help="Ask the first service this, print its answer, and stop.")
def command(
    files: tuple[Path, ...],
    *,
    sources: tuple[str, ...],
    port: int,
    state_dir: Path | None,
    memory_budget: int | None,
    question: str | None,
) -> None:
    """Serve the Models and InferenceServices of FILES on this machine, without a cluster.

    FILES are those for `kubectl apply`, or folders of them, and are held to the same rules. All services answer at one
    OpenAI endpoint on 127.0.0.1, by the name in `model`. Ctrl-C lets running requests end and stops everything; a
    second one waits for nothing. An edited file is served after that and another start. A download token is taken from
    HF_TOKEN, a mirror of the hub from HF_ENDPOINT.

    `pomona agent` on the same machine takes over what runs and joins it to a cluster: nothing is loaded again.

    \b
    Examples:
      pomona up --model hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona up --model ~/models/tiny.gguf --ask 'Who are you?'
      pomona up model.yaml service.yaml --port 9000
    """
    folder = (state_dir or default_state_folder()).absolute()
    try:
        if not files and not sources:
            raise click.UsageError("nothing to serve: give FILES, or --model SOURCE")
        wanted = manifests.load(files) if files else Wanted()
        with own(folder, standalone=True):
            with _usable(folder):
                log.to_file(folder / "up.log")
            served = asyncio.run(_up(wanted, sources, question, folder=folder, port=port, budget=memory_budget))
    except ManifestError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        sys.exit(2)
    except (StartError, SourceError, AskError) as error:
        raise click.ClickException(str(error)) from error
    except ArtifactError as error:
        raise click.ClickException(error.message) from error
    sys.exit(0 if served else 1)


async def _up(
    wanted: Wanted, sources: tuple[str, ...], question: str | None, *, folder: Path, port: int, budget: int | None
) -> bool:
    """Serve until a signal, or until the question is answered; whether it went as it should."""
    wishes = Wishes()
    _listen(wishes)
    known = await asyncio.to_thread(host.read)
    allowed_bytes = budget_bytes(known, budget)
    if allowed_bytes is None:
        raise StartError("the memory of this machine cannot be found out: give --memory-budget, such as 12GiB")
    options = Options(folder, port, outcome.endpoint(), outcome.token())
    for source in sources:
        await single.add(wanted, source, options)
    for note in (*wanted.skipped, *desired.notes(wanted.services.values())):
        print(note, file=sys.stderr)
    async with aiohttp.ClientSession() as session:
        with _usable(folder):
            machine = Machine(wanted, options, session, Ledger(allowed_bytes, memory_bytes=known.memory_bytes), wishes)
        console = Console(stderr=question is not None)
        on_terminal = console.is_terminal and question is None
        shown = view.live(machine, console, _hint) if on_terminal else view.lines(machine, console.file)
        showing = asyncio.create_task(shown)
        asking = asyncio.create_task(_ask(machine, question)) if question is not None else None
        try:
            await machine.run()
        finally:
            if asking and not asking.done():
                asking.cancel()
            showing.cancel()
            await asyncio.wait({each for each in (asking, showing) if each})
        if wishes.hand_over.is_set():
            console.print("handed over to `pomona agent`: everything goes on there", markup=False)
        return asking is None or (not asking.cancelled() and asking.result())


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Tell what of the state folder cannot be used: `sudo` leaves files that nobody else may read."""
    try:
        yield
    except OSError as error:
        raise StartError(f"cannot use what is in --state-dir {folder}: {error}") from error


def _listen(wishes: Wishes) -> None:
    """Hear Ctrl-C, a terminal that is closed, and an agent that takes over."""

    def end() -> None:
        if wishes.stop.is_set():
            wishes.hurry.set()
        wishes.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(HAND_OVER, wishes.hand_over.set)


def _hint(wishes: Wishes) -> str:
    """Say what Ctrl-C does now."""
    if wishes.stop.is_set():
        return "ending: running requests are waited for; Ctrl-C again breaks them off"
    return "Ctrl-C ends it; an edited file is served after another start"


async def _ask(machine: Machine, question: str) -> bool:
    """Ask the first service and end; whether there was an answer."""
    try:
        url, model = await machine.reachable(next(iter(machine.wanted.services)))
        await ask(url, model, question, lambda text: print(text, end="", flush=True))
        print()
    except AskError as error:
        print(f"pomona up: {error}", file=sys.stderr)
        return False
    finally:
        machine.wishes.stop.set()
    return True
