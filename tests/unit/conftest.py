"""Settings of the unit tests, which reach no server but those of this machine."""

import os

from tests.controlplane.sandbox import FEW_AUTHORITIES

os.environ.update(FEW_AUTHORITIES)
