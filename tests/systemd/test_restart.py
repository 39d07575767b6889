"""`pomona agent restart` onto another version, under a real systemd: engines go on, and a bad version is named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from launchd.service_definition import UNIT
from tests.controlplane.process import CHECKOUT
from tests.hosts.test_agent_service import ServedHost
from tests.systemd.nested_systemd import ADDRESS, NestedSystemd


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv = Path(sys.prefix) / "bin" / "uv"
    subprocess.run([uv, "build", "--quiet", "--wheel", f"--out-dir={folder}", CHECKOUT], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture
def environment(tmp_path: Path, wheel: Path) -> Path:
    """An environment like this one, with Pomona from the wheel instead of the checkout."""
    folder = tmp_path / "environment"
    shutil.copytree(sys.prefix, folder, symlinks=True, copy_function=_link)
    install_version(folder, wheel)
    return folder


def install_version(environment: Path, wheel: Path) -> None:
    uv = environment / "bin" / "uv"
    words = ("pip", "install", "--quiet", "--offline", "--no-deps", "--reinstall", "--python", environment)
    subprocess.run([uv, *words, wheel], check=True)


async def test_engines_go_on_under_another_version_and_one_that_does_not_run_is_named(
    systemd: NestedSystemd, environment: Path, wheel: Path, tmp_path: Path
) -> None:
    host = ServedHost(tmp_path)
    host.assign()
    pomona = str(environment / "bin" / "pomona")
    options = [ADDRESS if word == "127.0.0.1" else word for word in host.options]
    installed = systemd.run(pomona, "agent", "install", "--run-as", "root", *options)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    await host.ready()
    engines, first = host.engines(), (await host.client.status()).pid

    unit = Path("/etc/systemd/system", UNIT)
    written = systemd.run("cat", str(unit)).stdout
    assert systemd.run("sed", "-i", "/^After=dbus/d", str(unit)).returncode == 0
    install_version(environment, wheel)
    good = systemd.run(pomona, "agent", "restart")
    assert good.returncode == 0, good.stderr
    assert systemd.run("cat", str(unit)).stdout == written
    await host.ready()
    assert (await host.client.status()).pid != first
    assert host.engines() == engines

    bad = tmp_path / "bad" / wheel.name
    bad.parent.mkdir()
    with ZipFile(wheel) as source, ZipFile(bad, "w") as changed:
        for name in source.namelist():
            changed.writestr(name, b"raise RuntimeError('bad')" if name == "metal_agent/run.py" else source.read(name))
    install_version(environment, bad)
    failed = systemd.run(pomona, "agent", "restart")
    assert failed.returncode == 1
    assert "the agent ended" in failed.stderr, failed.stderr
    assert host.engines() == engines

    install_version(environment, wheel)
    assert systemd.run(pomona, "agent", "restart").returncode == 0
    await host.ready()
    assert host.engines() == engines
    assert systemd.run(pomona, "agent", "stop").returncode == 0


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
