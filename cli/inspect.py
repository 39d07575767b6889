"""`pomona inspect`: print the facts in the header of a model, without downloading the weights."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from artifacts.repositories.address_policy import Networks
from artifacts.source import Source, parse
from cli import outcome
from cli.options import allow_private_sources, choose_files, file_root_option, result_option
from cli.options import mirrors as mirrors_option
from cli.output import facts_option, print_facts
from crds.serving import ServingOptions
from crds.size import size_text
from crds.weights_header import Layout


@click.command("inspect")
@click.argument("source")
@choose_files
@click.option(
    "--sha256",
    type=outcome.DIGEST,
    help="Expected SHA-256. It is compared with the SHA-256 that the hub states, if any.",
)
@click.option(
    "--image-volume",
    "is_mounted",
    is_flag=True,
    help="SOURCE is an oci:// image that nodes mount: its files may be in archives, and --files is the path of one.",
)
@file_root_option
@allow_private_sources
@mirrors_option
@facts_option("text")
@result_option
def command(
    source: str,
    *,
    files: tuple[str, ...],
    sha256: str | None,
    is_mounted: bool,
    file_root: Path | None,
    allowed_networks: Networks,
    mirrors: tuple[str, ...],
    output_format: str,
    result: Path | None,
) -> None:
    """Print architecture, quantization, context, and the memory that serving takes, from the header of SOURCE.

    SOURCE is hf://ORG/REPO[@REVISION]/FILE.gguf, http(s)://HOST/FILE.gguf or file:///PATH/FILE.gguf, or a folder of
    safetensors: hf://ORG/REPO[@REVISION], file:///PATH/ or an artifact of a registry, oci://REGISTRY/REPOSITORY:TAG, of
    which --files may choose a GGUF model. Only the headers are downloaded. The environment variable HF_TOKEN is the
    token for the hub, POMONA_SOURCE_TOKEN the one for an http(s):// source, or USER:PASSWORD of a registry (or
    DOCKER_CONFIG is the folder of its config.json), and HF_ENDPOINT is the URL of a mirror of the hub.

    s3://BUCKET/KEY.gguf and s3://BUCKET/PREFIX/ take AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
    AWS_REGION, and AWS_ENDPOINT_URL for a service other than AWS; without keys, the bucket must be public.

    Exit code: 0 inspected, 1 failed but a retry may help, 2 failed and a retry does not help.

    \b
    Examples:
      pomona inspect hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona inspect hf://mlx-community/Qwen3-8B-4bit
      pomona inspect hf://unsloth/Qwen3-8B-GGUF --files '*Q4_K_M*.gguf'
      pomona inspect file://$PWD/model.gguf --file-root . -o json
    """
    inspecting = inspect_source(
        source,
        files,
        sha256,
        file_root=file_root,
        allowed_networks=allowed_networks,
        is_mounted=is_mounted,
        mirrors=mirrors,
    )
    facts = outcome.run("inspect", inspecting, result)
    outcome.write_result("inspect", facts, result)
    if output_format != "text":
        print_facts(facts, output_format)
    elif sys.stdout.isatty():
        _show_table(facts)
    else:
        for name, value in _rows(facts):
            print(f"{name}: {value}")


async def inspect_source(
    text: str,
    files: tuple[str, ...],
    sha256: str | None,
    *,
    file_root: Path | None,
    allowed_networks: Networks,
    is_mounted: bool,
    mirrors: tuple[str, ...],
) -> dict[str, Any]:
    """Return the facts in the headers of a source, as a Job's result has them. Raises ArtifactError."""
    # Importing aiohttp takes longer than refusing an invalid source.
    from artifacts.inspect import inspect_with_mirrors  # noqa: PLC0415
    from artifacts.repositories.repository import SourceAccess  # noqa: PLC0415
    from artifacts.retry import Patience  # noqa: PLC0415

    source = parse(text, files)

    def access(server: Source, patience: Patience) -> SourceAccess:
        return outcome.build_source_access(server, source, file_root, allowed_networks, patience)

    inspection = await inspect_with_mirrors(source, mirrors, access, sha256=sha256, is_mounted=is_mounted)
    return {
        "file": inspection.file,
        "sizeBytes": inspection.size_bytes,
        "tensorBytes": inspection.tensor_bytes,
        "revision": inspection.revision,
        "sha256": inspection.sha256 or "",
        **outcome.describe_headers(inspection),
    }


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values to print; facts that the file lacks are left out."""
    gguf = facts["gguf"]
    tensors = gguf.get("tensorCount")
    heads, heads_kv = gguf.get("headCount"), gguf.get("headCountKv")
    rows = (
        ("file", facts["file"]),
        ("name", gguf.get("modelName")),
        ("size", size_text(facts["sizeBytes"])),
        ("weights", size_text(facts["tensorBytes"]) + (f" in {tensors} tensors" if tensors else "")),
        ("format", facts["format"]),
        ("parameters", _parameters(facts)),
        ("architecture", gguf.get("architecture")),
        ("quantization", gguf.get("quantization")),
        ("context", f"{gguf['contextLength']:,} tokens" if gguf.get("contextLength") else None),
        ("layers", gguf.get("layerCount")),
        ("heads", f"{heads} ({heads_kv} for keys and values)" if heads else None),
        ("memory", _memory(facts["layout"], "llama.cpp" if facts["format"] == "gguf" else "mlx-lm")),
        ("license", gguf.get("license")),
        ("revision", facts["revision"]),
        ("sha256", facts["sha256"]),
    )
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _parameters(facts: dict[str, Any]) -> str:
    total, active = facts["totalParameters"], facts["activeParameters"]
    return (f"{total:,}" if total else "") + (f", of which a token uses {active:,}" if active else "")


def _memory(layout: dict[str, Any] | None, runtime: str) -> str:
    """Return the memory that serving needs with the default context of a service."""
    from fitness.memory import Workload, estimate  # noqa: PLC0415

    options = ServingOptions()
    needed = estimate(Workload(msgspec.convert(layout, Layout | None), runtime), options)
    if needed is None:
        return "not known: set spec.memoryBytes of its Model"
    return f"{size_text(needed.total_bytes)} with {options.context_length:,} tokens of context: {needed.text()}"


def _show_table(facts: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415  only a terminal pays for it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(facts):
        # Text, not str: a file must not bring markup of its own to the terminal.
        table.add_row(Text(name, style="dim"), Text(value))
    Console().print(table)
