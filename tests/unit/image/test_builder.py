"""`make image`: the choice of a builder, and the messages when none can build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controlplane.process import CHECKOUT

BUILD = CHECKOUT / "deploy" / "image" / "build.py"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    return folder


def add_tool(folder: Path, name: str, *, info: str, build: str = 'echo "$@"') -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\ncase $1 in info) {info};; *) {build};; esac\n")
    tool.chmod(0o755)


def make_image(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(folder)}
    command = [sys.executable, str(BUILD), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_first_builder_that_works_builds_the_image(tools: Path) -> None:
    add_tool(tools, "docker", info="exit 0")
    add_tool(tools, "buildah", info="exit 0")
    result = make_image(tools, "--image", "registry.test/pomona:1", "--base", "base@sha256:0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [
        *("build", "--file=Containerfile", "--tag=registry.test/pomona:1", "--build-arg=BASE=base@sha256:0", "."),
    ]
    assert "buildah push registry.test/pomona:1" in result.stderr


def test_default_image_is_the_one_of_the_controller(tools: Path) -> None:
    add_tool(tools, "podman", info="exit 0")
    result = make_image(tools)
    assert "--tag=ghcr.io/pomona-dev/pomona:0.1.0" in result.stdout


def test_builder_that_cannot_build_is_passed_over(tools: Path) -> None:
    add_tool(tools, "podman", info="exit 125")
    add_tool(tools, "docker", info="exit 0")
    assert make_image(tools).returncode == 0


def test_no_builder_is_said_with_the_way_out(tools: Path) -> None:
    result = make_image(tools)
    assert result.returncode == 1
    assert "none of podman, buildah, docker, nerdctl is on PATH: install podman or buildah" in result.stderr


def test_client_without_a_daemon_is_said_with_its_own_words(tools: Path) -> None:
    add_tool(tools, "docker", info='echo "Cannot connect to the Docker daemon" >&2; exit 1')
    result = make_image(tools)
    assert result.returncode == 1
    assert "docker info: exit code 1: Cannot connect to the Docker daemon" in result.stderr
    assert "start its daemon, or install podman or buildah" in result.stderr


def test_failed_build_fails_make(tools: Path) -> None:
    add_tool(tools, "podman", info="exit 0", build="exit 3")
    result = make_image(tools)
    assert result.returncode == 1
    assert "podman ended with exit code 3" in result.stderr
