"""The extender's estimate follows the measurements that count in the namespace of the pod."""

import msgspec
import pytest

from crds.model import Model
from devices.vendors import VENDORS
from extender.score import ScoreWeights
from extender.speed_table import SpeedTable
from extender.subject import estimate_served_speed
from fitness.performance import MeasuredPerformance
from fitness.performance_store import PerformanceTable, RecordKey, build_config_map, encode_record
from tests.support.api_objects import model
from tests.unit.extender.extender_objects import H100_LABELS, L4_LABELS, SERVED, facts, measure, subject


@pytest.mark.parametrize(
    ("namespace", "is_slower"), [("", True), ("pomona-system", True), ("team", True), ("other", False)]
)
def test_correction_counts_in_its_own_namespace(namespace: str, is_slower: bool) -> None:
    table = SpeedTable(VENDORS, ScoreWeights(), estimate_served_speed, PerformanceTable())
    table.set_node("l4", facts(L4_LABELS))
    table.set_node("h100", facts(H100_LABELS))
    asked = subject()._replace(namespace="team")
    before = table.find_board(asked, SERVED).pieces["l4"]
    record = MeasuredPerformance(
        tokens_per_second=10, estimated_tokens_per_second=30, accelerator="nvidia", runtime="llama.cpp"
    )
    for number in range(20):
        data = {
            RecordKey("nvidia-l4x1", namespace).encode(): encode_record(record),
            RecordKey("nvidia-h100-80gb-hbm3x1", namespace).encode(): encode_record(
                msgspec.structs.replace(record, tokens_per_second=30)
            ),
        }
        measure(table, build_config_map(f"{number:08x}", data))
    assert (table.find_board(asked, SERVED).pieces["l4"] != before) == is_slower


def test_model_whose_active_share_is_stated_later_is_estimated_anew() -> None:
    layout = model()["status"]["layout"] | {"expertOutputs": 8}
    unknown = model(status={"layout": layout})
    stated = model(status={"layout": layout}, totalParameters=1000, activeParameters=100)
    table = SpeedTable(VENDORS, ScoreWeights(), estimate_served_speed, PerformanceTable())
    table.set_node("l4", facts(L4_LABELS))
    table.set_node("h100", facts(H100_LABELS))
    are_alike = []
    for number, manifest in enumerate((unknown, stated)):
        board = table.find_board(subject(), SERVED._replace(model=msgspec.convert(manifest, Model)))
        are_alike.append(board.pieces["l4"].replace(b"l4", b"h100") == board.pieces["h100"])
        table.set_node(f"other-{number}", facts(L4_LABELS))
    assert are_alike == [True, False], "nodes of unknown speed are alike"
