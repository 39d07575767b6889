"""`pomona up`: serve models on this machine alone, from the same files as a cluster."""

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import click
from rich.console import Console

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import Networks
from artifacts.source import SourceError
from cli import log, outcome
from cli.options import (
    SIZE,
    Parsed,
    allow_private_sources,
    default_state_folder,
    gather_options,
    state_folder_option,
)
from cli.output import show_raw
from crds.text import escape_controls
from devices import host
from devices.sockets import LOOPBACK
from metal_agent.memory.ledger import Ledger, budget_bytes
from metal_agent.options import StartError
from metal_agent.state_folder import HAND_OVER, own_folder
from standalone import desired, manifests, single
from standalone.added_models import AddedModels, build_added, read_added
from standalone.ask import AskError, ask
from standalone.change_lines import ChangePrinter, LogFormat
from standalone.client_access import ApiKey, ClientAccess, parse_address, parse_host, parse_origin, read_api_keys
from standalone.control.up_control import serve_control
from standalone.live_files import LiveFiles, merge_manifests
from standalone.machine import Machine, StandaloneOptions, UserSignals
from standalone.manifests import ManifestError, Manifests
from standalone.view import print_line, show_table

PORT: Final = 8080
_WORDS: Final = "pomona.up.words"
"""Key of the words of the command line, in the context of the command."""


class _Demand(NamedTuple):
    """The arguments that say what is served, and how that is shown."""

    files: tuple[Path, ...]
    sources: tuple[str, ...]
    question: str | None
    memory_budget: int | None
    log_format: LogFormat


def _build_access(
    listen: str, api_key: tuple[ApiKey, ...] | None, allow_host: tuple[str, ...], allow_origin: tuple[str, ...]
) -> ClientAccess:
    """Return which clients are served. Raises click.UsageError: they would be all that reach this machine."""
    try:
        return ClientAccess(address=listen, keys=api_key or (), hosts=allow_host, origins=allow_origin)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


class UpCommand(click.Command):
    """The command, which keeps its words for the process that it starts in the background."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words, and parse them."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)


@click.command("up", cls=UpCommand)
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--model",
    "sources",
    multiple=True,
    metavar="NAME",
    help="Serve this model without a manifest: a name of `pomona catalog`, ORG/REPO[:QUANTIZATION] of the hub, a "
    "model that Ollama has, a source such as hf:// or https://, or a path. Repeatable.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Port of the endpoint.")
@gather_options(
    "access",
    _build_access,
    click.option(
        "--listen",
        type=Parsed("ADDRESS", parse_address),
        default=LOOPBACK,
        show_default=True,
        help="Address of the endpoint: one of this machine, or 0.0.0.0 (all of IPv4) or :: (all of IPv6). "
        "Other than loopback, it needs --api-key.",
    ),
    click.option(
        "--api-key",
        type=Parsed("FILE", read_api_keys),
        help="Serve clients with a key of this file only, also on this machine. It has a line NAME KEY for each, and "
        "mode 600; the log and metrics have the name.",
    ),
    click.option(
        "--allow-host",
        type=Parsed("NAME", parse_host),
        multiple=True,
        help="Serve clients without a key that call this machine so, such as host.docker.internal. Repeatable.",
    ),
    click.option(
        "--allow-origin",
        type=Parsed("ORIGIN", parse_origin),
        multiple=True,
        help="Let web pages of this origin ask, such as https://chat.example.com; with --api-key also '*'. Repeatable.",
    ),
)
@state_folder_option
@allow_private_sources
@click.option("--memory-budget", type=SIZE, help="Maximum memory for all models together, such as 12GiB.")
@click.option(
    "--start-daemons",
    is_flag=True,
    help="Start Ollama or oMLX for services that need it, if it is installed and does not run. It ends with this one.",
)
@click.option("--background", is_flag=True, help="Go on without this terminal, once the endpoint is open.")
@click.option("--ask", "question", help="Send this question to the first service, print the answer, and stop.")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="text is a table on a terminal, and a line for each change elsewhere; json is a line of JSON for each.",
)
def command(
    files: tuple[Path, ...],
    *,
    sources: tuple[str, ...],
    port: int,
    access: ClientAccess,
    state_dir: Path | None,
    allowed_networks: Networks,
    memory_budget: int | None,
    question: str | None,
    log_format: LogFormat,
    start_daemons: bool,
    background: bool,
) -> None:
    """Serve the Models and InferenceServices of FILES on this machine, without a cluster.

    FILES are manifests as for `kubectl apply`, or folders of them, and are checked by the same rules. One OpenAI
    endpoint serves them all: a request names the InferenceService in `model`. Only programs of this machine reach it,
    unless --listen, --api-key, --allow-host or --allow-origin let others in. Ctrl-C waits for running requests and
    stops everything; press it again to abort them, and to end soon whatever does not stop. A change of FILES takes
    effect at once: what is valid is added, edited or removed, and nothing else notices; with an error, what was served
    before serves on. Models that `pomona run` and clients of Ollama's API have added are served, too, also without
    FILES. It ends by itself, with exit code 1, when none of the services can be served. The environment variable
    HF_TOKEN is the token for the hub, and HF_ENDPOINT is the URL of a mirror of the hub.

    `pomona agent` on the same machine takes over the running engines and joins them to a cluster, without loading
    the models again.

    \b
    Examples:
      pomona up --model qwen3-8b
      pomona up --model unsloth/Qwen3-8B-GGUF:Q4_K_M
      pomona up --model ~/models/tiny.gguf --ask 'Who are you?'
      pomona up models --port 9000 --background
    """
    folder = (state_dir or default_state_folder()).absolute()
    try:
        if question is not None and not files and not sources:
            raise click.UsageError("nobody is asked: give FILES, or --model NAME")
        if background:
            _go_on_in_background(folder, question)
            return
        loaded = manifests.load_manifests(files) if files else Manifests()

        # own_folder keeps a second agent or command from using the folder.
        with own_folder(folder, standalone=True):
            with _report_unusable_files(folder):
                log.to_file(folder / "up.log")
            endpoint, token = outcome.read_endpoint(), outcome.read_hub_token()
            options = StandaloneOptions(folder, port, endpoint, token, allowed_networks, access, start_daemons)
            served = asyncio.run(_serve(loaded, _Demand(files, sources, question, memory_budget, log_format), options))
    except ManifestError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        sys.exit(2)
    except (StartError, SourceError, AskError) as error:
        raise click.ClickException(str(error)) from error
    except ArtifactError as error:
        raise click.ClickException(error.message) from error
    sys.exit(0 if served else 1)


def _go_on_in_background(folder: Path, question: str | None) -> None:
    """Start the same command as a process of its own, and print how to reach it.

    Raises click.ClickException and click.exceptions.Exit: it could not be started, or has ended.
    """
    from cli.machine.background import OUTPUT_LOG, start_in_background  # noqa: PLC0415 - not needed in a terminal
    from cli.machine.service_output import describe_endpoint  # noqa: PLC0415 - same

    if question is not None:
        raise click.UsageError("--ask prints its answer here: leave out --background")
    words = click.get_current_context().meta[_WORDS]
    status = start_in_background([word for word in words if word != "--background"], folder).status
    print(f"`pomona up` runs as process {status.pid}, {describe_endpoint(status)}")
    print(f"its output is in {folder / OUTPUT_LOG}; `pomona list` shows what it serves, `pomona down` ends it")


async def _serve(of_files: Manifests, demand: _Demand, options: StandaloneOptions) -> bool:
    """Serve until a signal or until the question is answered; return whether the command succeeded.

    These tasks run beside each other: the machine, which serves and whose end ends the others; the display of its
    state; and the question, whose answer stops the machine, or else the watch over the files.

    Raises StartError, SourceError and ArtifactError.
    """
    # 1. Decide what is served.
    sources, question = demand.sources, demand.question
    # signals: the requests of the user to stop, to abort, and to hand over to an agent, as events
    signals = UserSignals()
    _handle_signals(signals)

    host_facts = await asyncio.to_thread(host.read)
    allowed_bytes = budget_bytes(host_facts, demand.memory_budget)
    if allowed_bytes is None:
        raise StartError("cannot read the memory of this machine: give --memory-budget, such as 12GiB")

    share_bytes, has_token = of_files.divide(allowed_bytes, further=len(sources)), options.token is not None
    further, chosen = await single.choose_models(sources, of_files, options, share_bytes)
    added = build_added(read_added(options.folder), token=has_token) if question is None else Manifests()
    manifests = merge_manifests(of_files, further, added)
    for note in (*chosen, *manifests.skipped, *desired.list_ignored_fields(manifests.services.values())):
        print(note, file=sys.stderr)
    if not manifests.services:
        print("no model is served yet: `pomona run MODEL` adds one", file=sys.stderr)

    # 2. Serve it, show it, and ask the question.
    async with aiohttp.ClientSession() as session:
        with _report_unusable_files(options.folder):
            machine = Machine(
                manifests, options, session, Ledger(allowed_bytes, memory_bytes=host_facts.memory_bytes), signals
            )
        display, report = _build_display(machine, demand)
        replace = machine.replace_manifests
        files = LiveFiles(demand.files, of_files, further, added, served=manifests, replace=replace, report=report)
        asking = asyncio.create_task(_ask_and_stop(machine, question)) if question is not None else None
        beside = {asyncio.create_task(display)}
        if demand.files and question is None:
            beside.add(asyncio.create_task(files.run()))
        try:
            adder = AddedModels(machine, files, options.folder, token=has_token)
            with serve_control(machine, adder, options.folder):
                await machine.run()
        finally:
            ending = [*beside, asking] if asking else [*beside]
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)
        return _report_end(machine, asking)


def _report_end(machine: Machine, asking: asyncio.Task[bool] | None) -> bool:
    """Report how the machine has ended; return whether the command succeeded.

    `asking` is the question, which has ended; None: there was none. Raises StartError: nothing could be served.
    """
    if not machine.signals.hand_over.is_set():
        for message in machine.describe_left_engines():
            print(message, file=sys.stderr)
    # A question that has ended by itself has printed its own outcome.
    if machine.failure and (asking is None or asking.cancelled()):
        raise StartError(machine.failure)
    if asking is None:
        return True
    return not asking.cancelled() and asking.result()


def _build_display(machine: Machine, demand: _Demand) -> tuple[Coroutine[Any, Any, None], Callable[[str], None]]:
    """Return the work that shows the state of the machine, and a function that prints a line beside it."""
    # With a question, standard output is for the answer: the state goes to standard error.
    is_asked = demand.question is not None
    out = sys.stderr if is_asked else sys.stdout
    console = Console(file=out, highlight=False)
    # A variable such as FORCE_COLOR makes no terminal of a file, and a dumb terminal cannot draw in place.
    if demand.log_format == "text" and not is_asked and out.isatty() and not console.is_dumb_terminal:
        return show_table(machine, console, _hint), functools.partial(print_line, console)
    printer = ChangePrinter(machine, out, demand.log_format)
    return printer.run(), functools.partial(printer.print_event, "files")


@contextlib.contextmanager
def _report_unusable_files(folder: Path) -> Iterator[None]:
    """Report files of the state folder that cannot be used: a run with `sudo` leaves files of another owner."""
    try:
        yield
    except OSError as error:
        raise StartError(f"cannot read or write --state-dir {folder}: {error}") from error


def _handle_signals(signals: UserSignals) -> None:
    """Translate signals of the operating system: to stop (Ctrl-C, a closed terminal) and to hand over to an agent."""

    def end() -> None:
        """Stop after running requests at the first signal, and abort them at the second.

        `signals` holds the requests of the user as events that the machine awaits.
        """
        if signals.stop.is_set():
            signals.abort.set()
        signals.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    # HAND_OVER: the signal of an agent that takes over the running engines
    loop.add_signal_handler(HAND_OVER, signals.hand_over.set)


def _hint(signals: UserSignals) -> str:
    """Return a hint for the user: the effect of Ctrl-C now."""
    if signals.stop.is_set():
        return "stopping: waiting for running requests; press Ctrl-C again to abort them"
    return "press Ctrl-C to stop"


async def _ask_and_stop(machine: Machine, question: str) -> bool:
    """Send the question to the first service and stop; return whether there was an answer."""
    first_service = next(iter(machine.manifests.services))
    try:
        url, model = await machine.wait_until_reachable(first_service)
        keys = machine.exposure.access.keys
        token = keys[0].secret if keys else ""
        await ask(url, model, question, lambda text: print(show_raw(text), end="", flush=True), token)
        print(flush=True)
    except AskError as error:
        print(f"pomona up: {escape_controls(str(error))}", file=sys.stderr)
        return False
    finally:
        # In any case: the command is for one question.
        machine.signals.stop.set()
    return True
