"""`pomona fetch`: download weights to a folder, in a Job or by hand."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import click

from artifacts.repositories.address_policy import Networks
from cli import outcome
from cli.fetch_progress import show_fetch_progress
from cli.options import PATH, allow_private_sources, choose_files, file_root_option, gather_options, result_option
from cli.options import mirrors as mirrors_option
from cli.output import facts_option, print_facts
from crds.size import size_text


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
    with show_fetch_progress(source.file or source.repo or source.display) as show:

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
