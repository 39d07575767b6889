"""`pomona agent upgrade` in an environment of its own, under a real systemd: engines go on, and a bad version goes."""

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
    uv = folder / "bin" / "uv"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--reinstall", "--python", folder, wheel],
        check=True,
    )
    return folder


async def test_good_version_is_taken_and_bad_one_undone(
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

    def upgrade(source: Path) -> subprocess.CompletedProcess[str]:
        # Inside there is no network, and the dependencies are installed.
        return systemd.run("env", "UV_OFFLINE=1", pomona, "agent", "upgrade", "--from", str(source))

    unit = Path("/etc/systemd/system", UNIT)
    written = systemd.run("cat", str(unit)).stdout
    assert systemd.run("sed", "-i", "/^After=dbus/d", str(unit)).returncode == 0
    good = upgrade(wheel)
    assert good.returncode == 0, good.stderr
    assert f"{unit} is written anew" in good.stdout
    assert systemd.run("cat", str(unit)).stdout == written
    await host.ready()
    second = (await host.client.status()).pid
    assert second != first
    assert host.engines() == engines

    refused = upgrade(tmp_path / "none")
    assert refused.returncode == 1
    assert "the agent was not restarted" in refused.stderr
    assert not (environment / ".upgrade").exists()
    script = (environment / "bin" / "pomona").read_text()
    assert script.startswith(f"#!{environment}/bin/python"), script
    assert (await host.client.status()).pid == second

    bad = tmp_path / "bad" / wheel.name
    bad.parent.mkdir()
    with ZipFile(wheel) as source, ZipFile(bad, "w") as changed:
        for name in source.namelist():
            changed.writestr(name, b"raise RuntimeError('bad')" if name == "metal_agent/run.py" else source.read(name))
    failed = upgrade(bad)
    assert failed.returncode == 1
    assert "is restored, and runs as process" in failed.stderr, failed.stderr
    await host.ready()
    assert host.engines() == engines
    assert systemd.run(pomona, "agent", "stop").returncode == 0


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
