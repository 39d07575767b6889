"""`python -m tests.controlplane.prometheus`: build Prometheus and promtool."""

from tests.controlplane.go_build import report_build
from tests.controlplane.prometheus import ensure_prometheus

if __name__ == "__main__":
    report_build(ensure_prometheus)
