"""Where this system keeps what an application must remember: weights, logs, records of engines."""

import os
import sys
from pathlib import Path
from typing import Final

SHOWN: Final = "~/Library/Application Support/Pomona" if sys.platform == "darwin" else "~/.local/state/pomona"
"""For help, which is the same for everybody."""


def default_state_folder() -> Path:
    """Return where this system keeps what an application must remember."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Pomona"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pomona"
