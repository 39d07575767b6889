"""The manifests in deploy/install: the chart with its default values, for those who install without Helm."""

import re
from collections import defaultdict
from pathlib import Path

from tests.controlplane.helm import CHART, run_helm
from tests.controlplane.process import CHECKOUT

FOLDER = CHECKOUT / "deploy" / "install"
HEADER = "# Rendered from deploy/chart by `make manifests`. Do not edit.\n"
CRDS = "crds.yaml"
"""Template of the CRDs: deploy/kustomization.yaml names the chart's files instead."""
HELMS_OWN = re.compile(r"^ +(helm\.sh/chart: pomona-\S+|app\.kubernetes\.io/managed-by: Helm)\n", re.MULTILINE)
"""Labels that only a release of Helm has."""


async def render_manifests() -> dict[Path, str]:
    """Return the text of each manifest by its path. Raises HelmError."""
    rendered = await run_helm("template", "pomona", str(CHART))
    documents: defaultdict[str, list[str]] = defaultdict(list)
    for document in re.split(r"^---\n", rendered, flags=re.MULTILINE):
        if source := re.match(r"# Source: pomona/templates/(\S+)\n", document):
            text = HELMS_OWN.sub("", document[source.end() :]).strip("\n")
            documents[source[1]].append(re.sub(r"\n\n+", "\n", text) + "\n")
    return {FOLDER / name: HEADER + "---\n".join(texts) for name, texts in documents.items() if name != CRDS}
