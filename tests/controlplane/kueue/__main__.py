"""`python -m tests.controlplane.kueue`: build Kueue."""

from tests.controlplane.go_build import report_build
from tests.controlplane.kueue import ensure_kueue

if __name__ == "__main__":
    report_build(ensure_kueue)
