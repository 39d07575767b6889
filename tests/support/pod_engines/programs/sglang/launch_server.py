"""`python3 -m sglang.launch_server` of a container, played by the stand-in."""

import sys

from tests.support.pod_engines.stand_in import main

if __name__ == "__main__":
    main("sglang", sys.argv[1:])
