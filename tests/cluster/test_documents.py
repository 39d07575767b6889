"""What the documents tell a user to apply, the API server takes; what they tell him to type, exists."""

import re
from pathlib import Path

import pytest

from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT

README = (CHECKOUT / "README.md").read_text()
MANIFESTS = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=[re.findall(r"kind: (\w+)", each)[0] for each in MANIFESTS])
async def test_manifest_of_the_readme_is_accepted(plane: ControlPlane, tmp_path: Path, manifest: str) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text(manifest)
    assert "(server dry run)" in await plane.kubectl("apply", "--dry-run=server", f"--filename={path}")


async def test_examples_are_accepted(plane: ControlPlane) -> None:
    said = await plane.kubectl("apply", "--dry-run=server", f"--filename={CHECKOUT / 'examples'}")
    assert len(said.splitlines()) == 3


async def test_a_host_joins_under_a_name_of_its_own(plane: ControlPlane, tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text((CHECKOUT / "deploy" / "metal-host.yaml").read_text().replace("studio-1", "office-7"))
    said = await plane.kubectl("apply", "--server-side", "--dry-run=server", f"--filename={path}")
    assert len(re.findall("office-7", said)) == 4, said
    assert "studio-1" not in said


@pytest.mark.parametrize("field", ["isvc.spec.contextLength", "mdl.spec.source", "mh.status.availableBytes", "mp.spec"])
async def test_kubectl_explain_is_the_manual(plane: ControlPlane, field: str) -> None:
    said = await plane.kubectl("explain", field)
    assert "DESCRIPTION" in said
    assert "<empty>" not in said


def test_every_make_target_of_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (CHECKOUT / document).read_text()
        named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`[^`]+`|```.*?```", text, re.DOTALL))))
        assert named <= targets, document
