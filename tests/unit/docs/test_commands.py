"""Commands, options, make targets, files and manifests in the documents exist and are valid."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from cli.main import main
from crds import validation
from tests.controlplane.process import CHECKOUT
from tests.support.documents import DOCUMENTS, IDS, list_blocks

ENGINES_OWN = "llama-server"
"""Command whose help is that of the engine."""


def typed(text: str) -> Iterator[list[str]]:
    """Yield the words of every `pomona ...` command in a document, in a block or in a sentence."""
    lines = [line for block in list_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:\S*/)?pomona [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in lines:
        if match := re.match(r"\s*(?:\w+=\S+ )*(?:\S*/)?pomona (.*)", line.partition(" #")[0]):
            yield shlex.split(re.split(r"\s(?:>>|\||&)", match[1])[0])


def commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*names, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)


COMMANDS = dict(commands(main))


@pytest.mark.parametrize("names", [command for command in COMMANDS if command != (ENGINES_OWN,)], ids=" ".join)
def test_help_of_every_command_has_an_example_of_it(names: tuple[str, ...]) -> None:
    said = CliRunner().invoke(main, [*names, "--help"], prog_name="pomona")
    assert said.exit_code == 0
    example = said.output.partition("Example")[2]
    assert example, "no example"
    assert " ".join(names).split()[-1] in example, example


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_command_of_a_document_exists_with_its_options(document: Path) -> None:
    for words in typed(document.read_text()):
        command: click.Command = main
        for word in words:
            if not isinstance(command, click.Group) or word.startswith("-"):
                break
            subcommand = command.get_command(click.Context(command), word)
            assert subcommand is not None, f"pomona {' '.join(words)}"
            command = subcommand
        options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - options
        assert not unknown, f"{document.name}: {command.name} has no {unknown}"


def test_commands_are_found_in_blocks_and_sentences() -> None:
    text = "Use `pomona up FILE`.\n```\nX=1 ~/.pomona/bin/pomona agent --name a \\\n  --address b  # macOS\n```\n"
    assert [*typed(text)] == [["agent", "--name", "a", "--address", "b"], ["up", "FILE"]]


def test_end_of_one_block_is_not_the_beginning_of_another() -> None:
    text = "```yaml\na: 1\n```\nThen:\n\n```\npomona up\n```\n- In a list:\n  ```sh\n  ls\n  ```\n```\n```\n"
    assert list_blocks(text, "yaml") == ["a: 1\n"]
    assert list_blocks(text) == ["pomona up\n", ""]
    assert list_blocks(text, "sh") == ["ls\n"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_manifest_of_a_document_is_valid(document: Path) -> None:
    for block in list_blocks(document.read_text(), "yaml"):
        for manifest in yaml.safe_load_all(block):
            if manifest.get("kind") in validation.kinds():
                assert validation.problems(manifest) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_make_target_and_file_of_a_document_exists(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(re.findall(r"`[^`]+`|```.*?```", text, re.DOTALL))
    assert set(re.findall(r"(?:^|`|[;&] )make ([a-z-]+)", code, re.MULTILINE)) <= targets
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (document.parent / link).exists()] == []


def list_anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_link_to_a_section_names_a_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    targets = [((document.parent / path).resolve() if path else document, anchor) for path, anchor in links]
    assert [(path.name, anchor) for path, anchor in targets if anchor not in list_anchors(path)] == []
