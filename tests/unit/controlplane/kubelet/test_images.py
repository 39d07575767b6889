"""The table of images."""

import shutil
import sys

from runtimes import llama_server, ollama
from runtimes.registry import RUNTIMES
from tests.controlplane.kubelet import images
from tests.support.ollama.program import PROGRAM


def test_tag_and_digest_of_our_images_are_ignored() -> None:
    for reference in (
        "ghcr.io/pomona-dev/pomona",
        "ghcr.io/pomona-dev/pomona:0.1",
        "ghcr.io/pomona-dev/pomona@sha256:00",
    ):
        image = images.find(reference)
        assert image is not None
        assert image.entrypoint == (sys.executable, "-m", "cli.main")


def test_every_image_of_llama_cpp_is_this_machines_llama_server() -> None:
    for reference in llama_server.IMAGES.values():
        image = images.find(reference)
        assert image is not None
        assert list(image.entrypoint) == llama_server.find_command()


def test_engines_that_need_a_gpu_are_stand_ins_by_the_names_of_their_programs() -> None:
    for name in ("vllm", "sglang", "tgi"):
        pod = RUNTIMES[name].pod
        assert pod is not None
        for reference in pod.images.values():
            image = images.find(reference)
            assert image is not None
            assert pod.command or shutil.which(image.entrypoint[0], path=image.environment["PATH"])


def test_every_image_of_ollama_is_the_program_with_a_library() -> None:
    for reference in ollama.IMAGES.values():
        image = images.find(reference)
        assert image is not None
        assert image.entrypoint == (sys.executable, "-m", "tests.support.ollama.container", str(PROGRAM))


def test_an_unknown_image_is_not_found() -> None:
    assert images.find("docker.io/library/nginx:1") is None
    assert images.find("pomona-test.example.com/x") is None


def test_checkout_and_interpreter_are_part_of_the_image() -> None:
    image = images.find("pomona-test")
    assert image is not None
    assert images.CHECKOUT in image.visible
    assert (images.CHECKOUT / "pyproject.toml").exists()
