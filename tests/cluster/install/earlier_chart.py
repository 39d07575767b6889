"""The chart of an earlier version: one value and one field of a CRD fewer, with the previous image and no gateway."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane.helm import CHART

VALUE = "verbose"
FIELD = "averageLatencyMs"
"""Field of the status of an InferenceService."""
KIND = "inference.pomona.dev_inferenceservices.yaml"


def write_earlier_chart(folder: Path) -> Path:
    """Write the chart into a new folder, and return its path."""
    chart = Path(shutil.copytree(CHART, folder / "pomona"))
    values, schema = chart / "values.yaml", chart / "values.schema.json"
    described: dict[str, Any] = json.loads(schema.read_text())
    del described["properties"][VALUE]
    schema.write_text(json.dumps(described))
    stated: dict[str, Any] = yaml.safe_load(values.read_text())
    del stated[VALUE]
    stated["image"]["tag"] = "previous"
    values.write_text(yaml.safe_dump(stated))
    # The previous version has no gateway. Its rights stay, as kubectl has installed them in the cluster of the tests.
    (chart / "templates" / "gateway.yaml").unlink()
    controller = chart / "templates" / "controller.yaml"
    controller.write_text(controller.read_text().replace('- "--gateway"\n', "\n"))
    about = chart / "Chart.yaml"
    about.write_text(about.read_text().replace("version: 0.1.0", "version: 0.0.9", 1))
    kind = chart / "files" / "crds" / KIND
    definition: dict[str, Any] = yaml.safe_load(kind.read_text())
    (version,) = definition["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"][FIELD]
    kind.write_text(yaml.safe_dump(definition))
    return chart
