"""`python -m tests.controlplane.helm`: build Helm; with `--manifests` write deploy/install from the chart."""

import asyncio
import sys

from tests.controlplane.go_build import report_build
from tests.controlplane.helm import PACKAGES, ensure_helm
from tests.controlplane.helm.manifests import render_manifests

if __name__ == "__main__":
    if "--manifests" in sys.argv:
        for path, text in asyncio.run(render_manifests()).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    else:
        report_build(lambda: dict.fromkeys(PACKAGES, ensure_helm()))
