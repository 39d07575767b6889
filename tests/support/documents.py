"""The documents of the repository, and the blocks in them."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.controlplane.process import CHECKOUT

DOCUMENTS = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
IDS = [str(path.relative_to(CHECKOUT)) for path in DOCUMENTS]
_FRAGMENT_HEAD = "apiVersion: inference.pomona.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: chat}}\n"
_BLOCK = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
"""A block with its language; the fence that ends one is never the beginning of another."""


def list_blocks(text: str, language: str = "") -> list[str]:
    """Return the fenced blocks of a language, also those of a list, without their indentation."""
    return [block for step, block in list_steps(text) if step == language]


def list_steps(text: str) -> list[tuple[str, str]]:
    """Return all fenced blocks in their order, each with its language."""
    return [(language, textwrap.dedent(block)) for language, block in _BLOCK.findall(text)]


def split_commands(block: str) -> list[tuple[str, str]]:
    """Return the commands of a block, which follow `$ `, each with what it prints."""
    commands = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        commands.append((command, printed))
    return commands


def list_manifests(path: Path) -> Iterator[str]:
    """Yield the YAML blocks that can be applied; a spec alone is that of a Model if it has a source."""
    for block in list_blocks(path.read_text(), "yaml"):
        if re.search(r"^kind:", block, re.MULTILINE):
            yield block
        elif block.startswith("spec:"):
            kind = "Model" if "source" in yaml.safe_load(block)["spec"] else "InferenceService"
            yield _FRAGMENT_HEAD.format(kind=kind) + block
