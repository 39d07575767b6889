"""`make image`: build Pomona's image with a builder that is found here and works."""

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BUILDERS = ("podman", "buildah", "docker", "nerdctl")
"""Tools that build a Containerfile, by preference: those first that need no daemon."""
PROBE_SECONDS = 30
INSTALL = "install podman or buildah (apt-get install buildah, dnf install podman, brew install podman)"


class NoBuilderError(Exception):
    """No tool on PATH can build an image; the message says why not and the way out."""


def find_builder() -> str:
    """Return the path of the first builder that works. Raises NoBuilderError."""
    builders = [path for name in BUILDERS if (path := shutil.which(name))]
    complaints = []
    for path in builders:
        try:
            probe = subprocess.run([path, "info"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            complaints.append(f"{path} info: {error}")
            continue
        if probe.returncode == 0:
            return path
        said = probe.stderr.strip().splitlines() or ["no reason given"]
        complaints.append(f"{path} info: exit code {probe.returncode}: {said[-1]}")
    if not builders:
        raise NoBuilderError(f"none of {', '.join(BUILDERS)} is on PATH: {INSTALL}")
    raise NoBuilderError("\n".join([*complaints, f"no builder here can build: start its daemon, or {INSTALL}"]))


def default_image() -> str:
    """Return the image that `pomona controller` of this checkout uses by default."""
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    return f"ghcr.io/pomona-dev/pomona:{version}"


def main() -> None:
    """Build the image that the command line names."""
    parser = argparse.ArgumentParser(prog="make image", description=__doc__)
    parser.add_argument("--image", help="name and tag of the image. Default: that of `pomona controller --image`.")
    parser.add_argument("--base", help="image with Python to take interpreter and libraries from")
    options = parser.parse_args()
    image = options.image or default_image()
    try:
        builder = find_builder()
    except NoBuilderError as error:
        sys.exit(f"make image: {error}")
    base = [f"--build-arg=BASE={options.base}"] if options.base else []
    command = [builder, "build", "--file=Containerfile", f"--tag={image}", *base, "."]
    print(f"building {image}: {' '.join(command)}", file=sys.stderr, flush=True)
    if code := subprocess.run(command, cwd=CHECKOUT, check=False).returncode:
        sys.exit(f"make image: {builder} ended with exit code {code}: its last lines have the reason")
    name = Path(builder).name
    print(f"built {image}; push it with: {name} push {image}", file=sys.stderr)


if __name__ == "__main__":
    main()
