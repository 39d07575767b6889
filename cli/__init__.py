"""The `pomona` command: one module for each sub-command."""

import os
import sys
from pathlib import Path

# Root in the environment of somebody else, as by `sudo ~/.local/bin/pomona agent install`: the owner could not replace
# the bytecode that root would leave there, and so not upgrade.
if os.geteuid() == 0 and Path(__file__).stat().st_uid != 0:
    sys.dont_write_bytecode = True
