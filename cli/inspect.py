"""`pomona inspect`: print the facts in the header of a model, without downloading the weights."""

import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from artifacts.repositories.address_policy import Networks
from artifacts.source import Source, parse
from cli import outcome
from cli.options import allow_private_sources, choose_files, file_root_option, gather_options, result_option
from cli.options import mirrors as mirrors_option
from cli.output import dim, facts_option, print_facts, terminal_width, wrap_text
from crds.serving import ServingOptions
from crds.size import size_text
from crds.weights_header import Layout

_LABEL_WIDTH: Final = 14


class InspectedSource(NamedTuple):
    """A source, and how its headers are read."""

    source: str
    files: tuple[str, ...] = ()
    allowed_networks: Networks = ()
    sha256: str | None = None
    file_root: Path | None = None
    is_mounted: bool = False
    """It is an image that nodes mount."""
    mirrors: tuple[str, ...] = ()


@click.command("inspect")
@gather_options("wanted", InspectedSource)
@click.argument("source")
@choose_files
@click.option("--sha256", type=outcome.DIGEST, help="Expected SHA-256, compared with that of the hub if it states one.")
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
def command(*, wanted: InspectedSource, output_format: str, result: Path | None) -> None:
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
    facts = outcome.run_or_exit("inspect", inspect_source(wanted), result)
    outcome.write_result("inspect", facts, result)
    if output_format != "text":
        print_facts(facts, output_format)
        return

    for name, value in _build_rows(facts):
        # On a terminal in columns; else one line for each fact, for programs.
        if sys.stdout.isatty():
            first, *rest = wrap_text(value, terminal_width(), " " * _LABEL_WIDTH) or [""]
            print("\n".join([dim(f"{name:{_LABEL_WIDTH}}") + first.lstrip(), *rest]))
        else:
            print(f"{name}: {value}")


async def inspect_source(wanted: InspectedSource) -> dict[str, Any]:
    """Return the facts in the headers of a source, as a Job's result has them. Raises ArtifactError."""
    # Importing aiohttp takes longer than refusing an invalid source.
    from artifacts.inspect import inspect_with_mirrors  # noqa: PLC0415
    from artifacts.repositories.repository import SourceAccess  # noqa: PLC0415
    from artifacts.retry import Patience  # noqa: PLC0415

    source = parse(wanted.source, wanted.files)

    # The inspection calls this for each server that it asks.
    def access(server: Source, patience: Patience) -> SourceAccess:
        """Return the settings to read one server: the source itself or a mirror."""
        return outcome.build_source_access(server, source, wanted.file_root, wanted.allowed_networks, patience)

    inspection = await inspect_with_mirrors(
        source, wanted.mirrors, access, sha256=wanted.sha256, is_mounted=wanted.is_mounted
    )
    return {
        "file": inspection.file,
        "sizeBytes": inspection.size_bytes,
        "tensorBytes": inspection.tensor_bytes,
        "revision": inspection.revision,
        "sha256": inspection.sha256,
        **outcome.describe_headers(inspection),
    }


def _build_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows to print, each a name and its value; facts that the file lacks are left out."""
    gguf = facts["gguf"]  # the facts for users, also of formats other than GGUF
    tensors = gguf.get("tensorCount")
    heads, heads_kv = gguf.get("headCount"), gguf.get("headCountKv")
    rows = (
        ("file", facts["file"]),
        ("name", gguf.get("modelName")),
        ("size", size_text(facts["sizeBytes"])),
        ("weights", size_text(facts["tensorBytes"]) + (f" in {tensors} tensors" if tensors else "")),
        ("format", facts["format"]),
        ("parameters", _describe_parameters(facts)),
        ("architecture", gguf.get("architecture")),
        ("quantization", gguf.get("quantization")),
        ("context", f"{gguf['contextLength']:,} tokens" if gguf.get("contextLength") else None),
        ("layers", gguf.get("layerCount")),
        ("heads", f"{heads} ({heads_kv} for keys and values)" if heads else None),
        ("memory", _describe_memory(facts["layout"], "llama.cpp" if facts["format"] == "gguf" else "mlx-lm")),
        ("license", gguf.get("license")),
        ("revision", facts["revision"]),
        ("sha256", facts["sha256"]),
    )
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def _describe_parameters(facts: dict[str, Any]) -> str:
    total, active = facts["totalParameters"], facts["activeParameters"]
    return (f"{total:,}" if total else "") + (f", of which a token uses {active:,}" if active else "")


def _describe_memory(layout: dict[str, Any] | None, runtime: str) -> str:
    """Return the memory that serving needs with the default context of a service, in words; also if it is unknown."""
    from fitness.memory import Workload, estimate  # noqa: PLC0415

    options = ServingOptions(parallel=1)  # the least that is chosen
    needed = estimate(Workload(msgspec.convert(layout, Layout | None), runtime), options)
    if needed is None:
        return "not known: set spec.memoryBytes of its Model"
    return f"{size_text(needed.total_bytes)} with {options.context_tokens:,} tokens of context: {needed.text()}"
