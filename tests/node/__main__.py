"""`make test-node`: run pytest with real nodes in a sandbox of root, and remove what is left of them."""

import sys
import time

from tests.controlplane import sandbox
from tests.node.preparation import FOLDER
from tests.node.real_node import remove_cgroups, remove_folder

NODES = FOLDER.parent / "nodes"


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, and return its exit code; 1 if something of the nodes remains."""
    _clean_up()
    try:
        return sandbox.run([sys.executable, "-m", "pytest", *arguments], ())
    finally:
        _clean_up()


def _clean_up() -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            remove_cgroups()
            break
        except OSError:  # the kernel still ends the last processes of a sandbox that was killed
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    remove_folder(NODES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
