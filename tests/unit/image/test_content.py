"""Content of the image: its locks, the files that enter a build, and the settings of its Containerfile."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from controller.models.jobs import USER
from tests.controlplane import pomona_image
from tests.controlplane.process import CHECKOUT

LOCKS = CHECKOUT / "deploy" / "image"


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def test_locks_of_the_image_pin_what_developers_have() -> None:
    everything = pins(CHECKOUT / "requirements.lock")
    image = pins(LOCKS / "requirements.lock")
    assert image.items() <= everything.items()
    shared = pins(LOCKS / "build-requirements.lock").items()
    assert {name: version for name, version in shared if everything.get(name, version) != version} == {}


def test_lock_of_the_image_has_what_base_controller_and_gateway_require_and_no_engine() -> None:
    image = pins(LOCKS / "requirements.lock")
    needed = {
        re.split(r"[^A-Za-z0-9-]", require)[0]
        for require in requires("pomona") or ()
        if "extra" not in require or re.search(r"extra == .(controller|gateway|s3).", require)
    }
    assert needed - {"pomona"} <= image.keys()
    assert not image.keys() & {"xllamacpp", "llama-cpp-python", "mlx", "mlx-lm", "pytest", "pip", "uv"}


def test_each_package_is_locked_by_hashes() -> None:
    for lock in LOCKS.glob("*.lock"):
        blocks = re.split(r"^(?=[a-z0-9-]+==)", lock.read_text(), flags=re.MULTILINE)
        assert [block.partition(" ")[0] for block in blocks if block and "--hash=sha256:" not in block] == []


def test_only_what_the_wheel_is_made_of_enters_a_build() -> None:
    lines = (CHECKOUT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    hatch = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["hatch"]
    packages = set(hatch["build"]["targets"]["wheel"]["packages"])
    assert allowed == packages | {"LICENSE", "README.md", "pyproject.toml", "deploy/image"}
    assert lines[1] == "*"


def test_containerfile_runs_pomona_as_the_user_of_jobs_without_a_shell() -> None:
    text = (CHECKOUT / "Containerfile").read_text()
    configuration = pomona_image.read_configuration(text)
    assert (configuration.entrypoint, configuration.user) == (("pomona",), USER)
    assert configuration.environment["PATH"] == "/opt/pomona/bin"
    commands = [line.removeprefix("RUN ") for line in text.splitlines() if line.startswith("RUN ")]
    assert all(isinstance(json.loads(command), list) for command in commands)


@pytest.mark.parametrize("last", ['ENTRYPOINT ["pomona"]', 'ENTRYPOINT ["pomona"]\nUSER root', "USER 1:1"])
def test_containerfile_without_entry_point_or_numeric_user_is_refused(last: str) -> None:
    with pytest.raises(LookupError, match="ENTRYPOINT"):
        pomona_image.read_configuration(f"FROM base AS one\nUSER 1:1\nFROM scratch\n{last}\n")


def test_root_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    command = [sys.executable, str(LOCKS / "assemble.py"), "dependencies", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"{tmp_path} is not empty" in result.stderr
