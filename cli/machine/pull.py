"""`pomona pull`: fetch weights into the store of this machine ahead."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from artifacts.repositories.address_policy import Networks
from cli.cluster_access import INTERRUPTED_EXIT
from cli.fetch_progress import ReportBytes, show_fetch_progress
from cli.machine.instance import Instance, find_instance, locate_state_folder, run_call
from cli.options import allow_private_sources, state_folder_option

if TYPE_CHECKING:
    from standalone.control.up_status import PullUpdate


@click.command("pull")
@click.argument("source")
@state_folder_option
@allow_private_sources
def command(source: str, state_dir: Path | None, *, allowed_networks: Networks) -> None:
    """Fetch the weights of SOURCE, verify them, and keep them for services of this machine.

    A running `pomona up` does it, with its own private sources; without one, the command itself. An interrupted pull is
    resumed by the next one: Ctrl-C keeps what has come.

    \b
    Examples:
      pomona pull qwen3-8b
      pomona pull unsloth/Qwen3-8B-GGUF:Q4_K_M
      pomona pull https://files.example/model.gguf
    """
    from artifacts.errors import ArtifactError  # noqa: PLC0415 - not needed for --help
    from artifacts.source import SourceError, without_secrets  # noqa: PLC0415 - same
    from standalone.model_names import ModelNameError  # noqa: PLC0415 - same

    name = without_secrets(source)
    instance = find_instance(state_dir)
    if instance:
        instance.say_asked()
    try:
        with show_fetch_progress(name.rpartition("/")[2] or name) as show:
            digest = (
                run_call(_pull_by(instance, source, show))
                if instance
                else asyncio.run(_pull_here(source, locate_state_folder(state_dir), allowed_networks, show))
            )
    except KeyboardInterrupt:
        print("interrupted: pull it again to go on", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT)
    except (SourceError, ModelNameError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except ArtifactError as error:
        raise click.ClickException(error.message) from error
    print(f"{name} is stored: sha256 {digest}")


async def _pull_by(instance: Instance, source: str, show: ReportBytes) -> str:
    """Fetch weights by an instance, and return their digest. Raises click.ClickException."""
    updates: AsyncGenerator[PullUpdate, None] = instance.client.pull(source)
    digest = ""
    async with contextlib.aclosing(updates):
        async for update in updates:
            if update.problem:
                raise click.ClickException(update.problem)
            if update.digest:
                digest = update.digest
            else:
                show(update.bytes, update.total_bytes)
    return digest


async def _pull_here(source: str, folder: Path, allowed_networks: Networks, show: ReportBytes) -> str:
    """Fetch weights into the store of a state folder, and return their digest.

    Raises ModelNameError, SourceError, ArtifactError and OSError.
    """
    from artifacts.foreign_stores import find_foreign_stores  # noqa: PLC0415 - not needed for --help
    from artifacts.repositories.repository import SourceAccess  # noqa: PLC0415 - not needed for --help
    from cli.outcome import read_endpoint, read_hub_token  # noqa: PLC0415 - same
    from devices import host  # noqa: PLC0415 - same
    from metal_agent.memory.ledger import budget_bytes  # noqa: PLC0415 - same
    from metal_agent.weights import HostWeights  # noqa: PLC0415 - same
    from standalone.inspections import ModelInspector  # noqa: PLC0415 - same
    from standalone.model_lookup import open_lookup  # noqa: PLC0415 - same
    from standalone.weights_pull import WeightsPuller  # noqa: PLC0415 - same

    access = SourceAccess(token=read_hub_token(), endpoint=read_endpoint(), allowed_networks=allowed_networks)
    weights = HostWeights(folder / "weights", None, allowed_networks, find_foreign_stores())
    inspector = ModelInspector(folder / "inspections", weights.store, access)
    budget = budget_bytes(host.read(), None) or 0
    return await WeightsPuller(weights, inspector, access, open_lookup(folder, access), budget).pull(source, show)
