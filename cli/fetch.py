"""`pomona fetch`: download weights to a folder, in a Job or by hand."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from artifacts.repositories.address_policy import Networks
from artifacts.transfer_rate import PROGRESS_SECONDS, TransferMeter, describe_transfer
from cli import outcome
from cli.options import PATH, allow_private_sources, choose_files, file_root_option, gather_options, result_option
from cli.options import mirrors as mirrors_option
from cli.output import facts_option, print_facts
from crds.size import size_text
from crds.text import escape_controls


class WantedFiles(NamedTuple):
    """The arguments of one call."""

    source: str
    folder: Path | None
    files: tuple[str, ...]
    sha256: str | None
    revision: str | None
    size_bytes: int | None
    file_root: Path | None
    allowed_networks: Networks
    mirrors: tuple[str, ...]


@click.command("fetch")
@gather_options("wanted", WantedFiles)
@click.argument("source")
@click.option(
    "--to",
    "folder",
    type=PATH,
    help="Folder for the files. Required, except for a file:// source, which is verified where it is.",
)
@choose_files
@click.option(
    "--sha256",
    type=outcome.DIGEST,
    help="Expected SHA-256. A download with another SHA-256 is deleted. Default: the SHA-256 that the hub "
    "states, if any.",
)
@click.option("--revision", help="Resolved revision to fetch, as `pomona inspect` prints it.")
@click.option("--size-bytes", type=click.IntRange(min=0), help="Expected size; a file of another size is refused.")
@file_root_option
@allow_private_sources
@mirrors_option
@facts_option("text")
@result_option
def command(*, wanted: WantedFiles, output_format: str, result: Path | None) -> None:
    """Download the files of SOURCE to a folder, verify them, and read their headers.

    An interrupted download is resumed. A file gets its final name only when it is complete.

    SOURCE is hf://ORG/REPO[@REVISION]/FILE.gguf, http(s)://HOST/FILE.gguf or file:///PATH/FILE.gguf; of a split model
    its first part, with which all parts are fetched. hf://ORG/REPO[@REVISION] is a folder of safetensors, or with
    --files a GGUF model; so is oci://REGISTRY/REPOSITORY:TAG, an artifact of a registry. A file that is complete is
    not downloaded again, and a file:// source is not copied. The environment variable HF_TOKEN is the token for the
    hub, POMONA_SOURCE_TOKEN the one for an http(s):// source, or USER:PASSWORD of a registry (or DOCKER_CONFIG is the
    folder of its config.json), and HF_ENDPOINT is the URL of a mirror of the hub.

    s3://BUCKET/KEY.gguf and s3://BUCKET/PREFIX/ take AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
    AWS_REGION, and AWS_ENDPOINT_URL for a service other than AWS; without keys, the bucket must be public.

    Exit code: 0 fetched, 1 failed but a retry may help, 2 failed and a retry does not help.

    \b
    Examples:
      pomona fetch hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf --to ~/models
      HF_TOKEN=$(cat token) pomona fetch hf://acme/private@v2/model.gguf --to /models
      pomona fetch hf://Qwen/Qwen3-8B --to ~/models/Qwen3-8B
      pomona fetch hf://unsloth/Qwen3-8B-GGUF --files '*Q4_K_M*.gguf' --to ~/models
      pomona fetch oci://docker.io/ai/smollm2:360M-Q4_K_M --files '*.gguf' --to ~/models
      pomona fetch https://files.example/model.gguf --to . --sha256 3f6b92...
    """
    facts = outcome.run_or_exit("fetch", _fetch(wanted), result)
    outcome.write_result("fetch", facts, result)
    if output_format != "text":
        print_facts(facts, output_format)
    else:
        digest = f"  sha256 {facts['sha256']}" if facts["sha256"] else ""
        print(f"{facts['path']}  {size_text(facts['sizeBytes'])}{digest}")


async def _fetch(wanted: WantedFiles) -> dict[str, Any]:
    """Fetch the files from the source, or from a mirror if the source fails, and return the facts in their headers.

    Raises ArtifactError: no server has the files, they are not those that were expected, or a header is invalid.
    """
    # Importing aiohttp takes longer than refusing an invalid source.
    from artifacts.errors import ArtifactError  # noqa: PLC0415
    from artifacts.fetch import ExpectedFile, FetchedArtifact  # noqa: PLC0415
    from artifacts.fetch_source import fetch_source  # noqa: PLC0415
    from artifacts.inspect import check_stored  # noqa: PLC0415
    from artifacts.mirrors import parse_mirrors, read_from_any  # noqa: PLC0415
    from artifacts.retry import Patience  # noqa: PLC0415
    from artifacts.source import Source, parse  # noqa: PLC0415

    # 1. Check the arguments.
    source = parse(wanted.source, wanted.files)
    # A download needs a folder, and a file:// source takes none.
    if (wanted.folder is None) != (source.scheme == "file"):
        way_out = "give --to FOLDER" if wanted.folder is None else "it is verified where it is: leave out --to"
        raise ArtifactError("SourceInvalid", f"{source.display}: {way_out}")

    # 2. Fetch the files. `show` gets the bytes so far, and all bytes, or None while their number is unknown.
    with _show_progress(source.file or source.repo or source.display) as show:

        async def read(server: Source, patience: Patience) -> FetchedArtifact:
            """Fetch the files from one server: the source itself or a mirror."""
            access = outcome.build_source_access(server, source, wanted.file_root, wanted.allowed_networks, patience)
            # A mirror has revisions of its own; its bytes are verified by their digest.
            revision = wanted.revision if server is source else None
            expected = ExpectedFile(sha256=wanted.sha256, size_bytes=wanted.size_bytes, revision=revision)
            return await fetch_source(server, wanted.folder or Path(), access, expected, show)

        # The second value is the server that had the files.
        done, _server = await read_from_any(source, parse_mirrors(source, wanted.mirrors, wanted.sha256), read)

    # 3. Read their headers: a server may send something else than it let `pomona inspect` read.
    facts = await asyncio.to_thread(check_stored, source, done.path)
    return {
        "file": "" if done.path.is_dir() else done.path.name,
        "path": str(done.path),
        "sizeBytes": done.size_bytes,
        "sha256": done.sha256,
        "revision": done.revision,
        **outcome.describe_headers(facts),
    }


@contextlib.contextmanager
def _show_progress(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that shows progress on standard error: a bar on a terminal, lines elsewhere.

    It gets the bytes so far, and all bytes, or None while their number is unknown.
    """
    if not sys.stderr.isatty():
        yield _ProgressLines(name, time.monotonic).show
        return
    from rich.console import Console  # noqa: PLC0415  only a terminal pays for it
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    meter = TransferMeter()

    class RateColumn(ProgressColumn):
        """The bytes, the rate and the time left at the time of each drawing, so that a stall shows."""

        def render(self, task: Task) -> Text:  # noqa: ARG002
            """Return the text of the column."""
            return Text(describe_transfer(meter.read(time.monotonic())), no_wrap=True)

    # The bar takes what the texts leave of the width.
    name_column = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
    bar_column = BarColumn(bar_width=None, table_column=Column(ratio=1))
    with Progress(name_column, bar_column, RateColumn(), console=Console(stderr=True), expand=True) as bar:
        # total is None until the server has stated the size.
        task = bar.add_task(escape_controls(name), total=None)

        def show(done: int, total: int | None) -> None:
            """Show how many bytes are there."""
            meter.note(done, total, time.monotonic())
            bar.update(task, completed=done, total=total)

        yield show


class _ProgressLines:
    """Progress as lines of text, one every ten seconds; a shorter download prints none."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._next_line_at = clock() + PROGRESS_SECONDS
        self._meter = TransferMeter()

    def show(self, done: int, total: int | None) -> None:
        """Print how many bytes are there, the rate and the time left, if the last line is old enough."""
        now = self._clock()
        self._meter.note(done, total, now)
        # _next_line_at: the time of the next line, ten seconds after the last one
        if now < self._next_line_at:
            return
        self._next_line_at = now + PROGRESS_SECONDS
        progress = describe_transfer(self._meter.read(now))
        print(escape_controls(f"{self._name}: {progress}"), file=sys.stderr, flush=True)
