"""`python -m tests.demo`: fetch the weights while there is a network, then run the demo in a sandbox."""

import argparse
import asyncio
import sys
from pathlib import Path

from tests.controlplane import sandbox
from tests.controlplane.binaries import cache_folder, ensure_binaries
from tests.controlplane.go_build import BuildError
from tests.controlplane.helm import ensure_helm
from tests.demo.shell import DEMO


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument(
        "--model", default="", metavar="SOURCE", help="hf://ORG/REPO/FILE.gguf; default: a generated one"
    )
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    return parser.parse_args()


def main() -> int:
    """Run the demo; return the exit status, which is 0 only if both services answered."""
    options = parse()
    try:
        sandbox.check()
        ensure_binaries()
        ensure_helm()
    except (sandbox.SandboxError, BuildError) as error:
        print(f"make demo: {error}", file=sys.stderr)
        return 1
    weights = asyncio.run(fetch_weights(options.model)) if options.model else write_weights("tiny.gguf")
    larger = write_weights("larger.gguf", width=256, feed_forward=16384)
    endless = write_weights("endless.gguf", loop=True)
    inside = [sys.executable, "-m", DEMO, f"--weights={weights}", f"--larger={larger}", f"--endless={endless}"]
    return sandbox.run([*inside, *(["--keep"] if options.keep else [])])


def write_weights(name: str, width: int = 64, feed_forward: int = 128, *, loop: bool = False) -> Path:
    """Write generated weights into the user's cache, which is visible in the sandbox too."""
    from tests.support.tiny_models.tiny_gguf import write  # noqa: PLC0415 - numpy is only needed to generate

    weights = cache_folder() / "models" / name
    weights.parent.mkdir(parents=True, exist_ok=True)
    write(weights, n_embd=width, n_ff=feed_forward, loop=loop, n_ctx=65536 if loop else 4096)
    return weights


async def fetch_weights(source: str) -> Path:
    """Fetch real weights into the user's cache, with a progress bar; the sandbox has no access to the internet."""
    folder = cache_folder() / "models"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", "fetch", source, "--to", str(folder)
    )
    if await process.wait() != 0:
        sys.exit(1)
    return folder / source.rsplit("/", 1)[-1]


if __name__ == "__main__":
    sys.exit(main())
