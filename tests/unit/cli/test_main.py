"""The `pomona` command: help without heavy imports, examples, and options that refuse bad values with a good one."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import cli
from cli.agent import command as agent
from cli.main import SUBCOMMANDS, main
from cli.options import DURATION, LISTEN_ADDRESS, SIZE
from metal_agent.cluster.host_identity import JoinedHost
from metal_agent.exit_codes import PERMANENT, TEMPORARY
from metal_agent.join.join_code import JoinCode, encode_join_code


def test_help_names_sub_commands_without_importing_them() -> None:
    script = (
        "import sys; from cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'kopf', 'kubernetes', 'msgspec'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    for name, (line, _) in SUBCOMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line[:30])}", done.stdout, re.MULTILINE), done.stdout


def test_command_about_an_agent_imports_no_agent() -> None:
    script = (
        "import sys; from cli.main import main\n"
        "for command in [], ['install'], ['logs'], ['restart'], ['status'], ['stop'], ['uninstall']:\n"
        "    try: main(['agent', *command, '-h'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'kube.client', 'metal_agent.agent', 'metal_agent.supervise.runner', 'prometheus_client'}\n"
        "    heavy &= sys.modules.keys()\n"
        "    if heavy: sys.exit(f'{command} imported {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == 7


def test_agent_imports_nothing_that_it_may_never_need() -> None:
    """Tables, YAML, metrics and certificate authorities take 8 MiB, which an idle agent would keep from models."""
    script = (
        "import sys; from cli.lazy import import_without_collections\n"
        "import_without_collections('cli.agent.command')\n"
        "from kube.public_trust import import_aiohttp_without_trust, read_public_trust\n"
        "assert 'aiohttp' not in sys.modules\n"
        "import_aiohttp_without_trust()\n"
        "import cli.log, metal_agent.run, rich\n"
        "assert rich.__name__, 'a later command has it'\n"
        "from aiohttp.connector import _SSL_CONTEXT_VERIFIED as trust\n"
        "assert (trust.verify_mode, trust.check_hostname) == (read_public_trust().verify_mode, True)\n"
        "assert trust.cert_store_stats()['x509'] == 0 < read_public_trust().cert_store_stats()['x509']\n"
        "heavy = {'rich.console', 'pygments', 'yaml', 'kubernetes', 'prometheus_client', 'importlib.metadata'}\n"
        "heavy &= sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_import_of_a_sub_command_leaves_the_garbage_collector_as_it_was(enabled: bool) -> None:
    script = (
        "import gc, sys; from cli.lazy import import_without_collections\n"
        f"enabled = {enabled}\n"
        "if not enabled: gc.disable()\n"
        "assert import_without_collections('cli.machine.weights').command.name\n"
        "assert gc.isenabled() == enabled\n"
        "assert (gc.get_freeze_count() > 0) == enabled\n"
        "import_without_collections('json.missing')"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30)
    assert "No module named 'json.missing'" in done.stderr.splitlines()[-1], done.stderr


def test_help_of_sub_command_has_example() -> None:
    for path in [[name] for name in SUBCOMMANDS] + [["agent", name] for name in agent.SUBCOMMANDS]:
        result = CliRunner().invoke(main, [*path, "--help"])
        assert result.exit_code == 0, (path, result.output)
        if path != ["llama-server"]:  # shows llama-server's own arguments
            assert re.search(r"^ +(pomona|curl) ", result.output, re.MULTILINE), result.output
        assert "\\b" not in result.output


def list_commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Return each command with its path, groups included."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from list_commands(command, (*path, name))


@pytest.mark.parametrize(
    ("words", "meant"), [(["statsu"], "status"), (["host", "drian"], "drain"), (["agent", "dockter"], "doctor")]
)
def test_similar_command_is_named(words: list[str], meant: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert f"No such command '{words[-1]}'. Did you mean '{meant}'?" in result.output


def test_each_command_that_prints_facts_prints_them_as_json_and_yaml_by_one_option() -> None:
    printing = set()
    for path, command in list_commands(main):
        options = {param.name: param for param in command.params if isinstance(param, click.Option)}
        flags = {flag for option in options.values() for flag in option.opts if not option.hidden}
        # The flag is that of the script of Sympozium, whose output `pomona fit` prints.
        assert "--json" not in flags or path == ("fit",), path
        if "-o" in flags or "--output" in flags:
            output = next(option for option in options.values() if "--output" in option.opts)
            assert output.opts == ["--output", "-o"], path
            assert isinstance(output.type, click.Choice), path
            assert {"json", "yaml"} <= set(output.type.choices), path
            printing.add(" ".join(path))
    assert printing == {
        *("bench", "catalog", "deploy", "fetch", "host list", "hosts", "inspect", "key list", "list", "status"),
        *("agent doctor", "agent status", "weights list", "ps"),
        *("queue", "queue explain", "plan", "plan add", "plan drain", "simulate", "cost"),
    }


def test_agent_that_has_not_joined_ends_for_good_and_says_how_to_join(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["agent", f"--state-dir={tmp_path}"])
    assert result.exit_code == PERMANENT
    assert "run `pomona agent join CODE`, or give --name and --kubeconfig" in result.output


def test_agent_whose_state_folder_is_not_there_is_started_again_as_its_disk_may_come(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["agent", f"--state-dir={tmp_path / 'disk' / 'state'}"])
    assert result.exit_code == TEMPORARY


@pytest.mark.parametrize(("user", "owner", "is_written"), [(0, 501, False), (0, 0, True), (501, 501, True)])
def test_root_leaves_no_bytecode_in_the_environment_of_its_owner(
    monkeypatch: pytest.MonkeyPatch, user: int, owner: int, is_written: bool
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_uid=owner))
    runpy.run_path(str(cli.__file__))
    assert sys.dont_write_bytecode is not is_written


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("12GiB", 12 << 30), ("1.5 Gi", 3 << 29), ("512MiB", 512 << 20), ("1000", 1000)]
)
def test_size_is_read_as_shown(text: str, size_bytes: int) -> None:
    assert SIZE.convert(text, None, None) == size_bytes


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("30d", 2_592_000.0)])
def test_time_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["90", "0s", "-1s", "1w", "٣d", "9" * 400 + "d", ""])
def test_invalid_time_is_refused_with_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a time: give one such as 90s, 10m, 1h or 30d"):
        DURATION.convert(text, None, None)


@pytest.mark.parametrize("text", ["8gigs", "0", "0.1", "-1", "much", ""])
def test_invalid_size_is_refused_with_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size: give a size such as 64Mi, 12GiB"):
        SIZE.convert(text, None, None)


def test_error_that_quotes_others_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's source, a host's answer and a join code are quoted in errors."""

    def refuse(*_: object, **_options: object) -> None:
        raise click.ClickException("chat answered 500: \x1b]52;c;Y3Vy\x07\x9b1A\nno\tmore")

    for module in ("cli.service.chat", "cli.host.membership"):
        monkeypatch.setattr(f"{module}.run_in_cluster", refuse)
    for command in (["chat", "chat", "Who?"], ["host", "list"]):
        result = CliRunner().invoke(main, command)
        assert (result.exit_code, result.stderr) == (
            1,
            "Error: chat answered 500: \\x1b]52;c;Y3Vy\\x07\\x9b1A\nno\tmore\n",
        )


def test_join_code_moves_no_cursor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever sends a code states the name of the host and the server."""
    code = JoinCode("studio\x1b[2J", "https://192.0.2.1/\x9b1A", "t", "s", 1)

    async def join(_code: JoinCode, _folder: Path) -> JoinedHost:
        return JoinedHost(code.host, code.server, "t", "2026-11-24T00:00:00Z")

    monkeypatch.setattr("cli.agent.join.join_cluster", join)
    result = CliRunner().invoke(main, ["agent", "join", encode_join_code(code), "--state-dir", str(tmp_path)])
    assert result.stdout.startswith(r"this machine is host studio\x1b[2J of https://192.0.2.1/\x9b1A ")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] in {"kopf", "controller"}]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "cli.controller", raising=False)
    monkeypatch.setitem(sys.modules, "kopf", None)
    result = CliRunner().invoke(main, ["controller", "--help"])
    assert result.exit_code == 1
    assert (
        "`pomona controller` needs the extra `controller`: pip install '.[controller]' in a checkout of Pomona"
        in result.output
    )


def test_no_dependency_clashes_with_our_folders() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())
    ours = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    installed = packages_distributions()
    clashes = {name: installed[name] for name in ours if set(installed.get(name, [])) - {"pomona"}}
    assert clashes == {}


def test_invalid_label_of_monitors_is_refused_with_option_and_value() -> None:
    result = CliRunner().invoke(main, ["controller", "--monitor-label", "a=b", "--monitor-label", "release"])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "Invalid value for '--monitor-label': 'release' is no label" in said


@pytest.mark.parametrize(
    ("text", "place"),
    [("127.0.0.1:17999", ("127.0.0.1", 17999)), ("[::1]:80", ("::1", 80)), ("off", None)],
)
def test_listen_address_is_address_and_port_or_off(text: str, place: tuple[str, int] | None) -> None:
    assert LISTEN_ADDRESS.convert(text, None, None) == place


@pytest.mark.parametrize("text", ["127.0.0.1", "localhost:80", "127.0.0.1:0", "127.0.0.1:65536", ":80", "on"])
def test_invalid_listen_address_is_refused_with_example(text: str) -> None:
    result = CliRunner().invoke(main, ["agent", "--name", "studio-1", "--metrics-address", text])
    assert result.exit_code == 2
    assert "127.0.0.1:17999" in result.output


def test_vendors_file_with_an_engine_that_does_not_exist_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "vendors.yaml"
    path.write_text("nvidia:\n  images: {quantum: registry.example/quantum:1}\n")
    result = CliRunner().invoke(main, ["controller", "--vendors", str(path)])
    assert result.exit_code == 2
    assert f"{path}: line 2: nvidia: images names quantum, which is no engine in pods" in " ".join(
        result.output.split()
    )
