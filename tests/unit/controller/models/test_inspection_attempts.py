"""Attempts of hosts and Jobs at one inspection: which one follows another, and which one is left to end."""

from datetime import timedelta

import pytest

from controller.models import refresh
from controller.models.inspecting_hosts import InspectingHost
from kube.client import Obj
from tests.support.simulated_model import INSPECTED, SimulatedModel
from tests.unit.controller.models.test_host_models import LIVE, LOST, REPORT, make_host_model


def test_host_that_reports_again_and_again_does_not_keep_the_model() -> None:
    simulated = make_host_model("studio-1", "studio-2")
    for _ in range(15):
        simulated.report(phase="Failed", reason="SourceUnreachable", message="x")
        simulated.settle()
        if simulated.inspection["spec"]["hostName"] == "studio-2":
            return
        simulated.now += timedelta(seconds=60)
    raise AssertionError("the first host still has the Model")


@pytest.mark.parametrize("image", ["", "pomona:test"])
def test_attempt_goes_on_while_its_host_is_neither_live_nor_lost(image: str) -> None:
    simulated = make_host_model(image=image)
    simulated.report(phase="Fetching")
    simulated.settle()
    simulated.hosts = {"studio-1": InspectingHost(is_live=False)}
    simulated.settle()
    assert (len(simulated.made), simulated.jobs, list(simulated.processes)) == (
        1,
        {},
        [simulated.made[0]["metadata"]["name"]],
    )
    assert simulated.condition("Ready").reason == "Inspecting"


def test_host_that_comes_and_goes_stops_no_job() -> None:
    simulated = make_host_model(image="pomona:test")
    for _ in range(5):
        simulated.hosts = {"studio-1": LOST}
        simulated.now += timedelta(seconds=10)
        simulated.settle()
        assert simulated.job("inspect")
        simulated.hosts = {"studio-1": LIVE}
        simulated.settle()
    assert [each["kind"] for each in simulated.made] == ["MetalProcess", "Job"]
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    assert simulated.model.status.revision == '"etag-1"'


def test_word_of_one_host_ends_no_check_of_a_moving_source() -> None:
    simulated = make_host_model("studio-1", "studio-2", refresh_policy="OnChange")
    simulated.report(phase="Stopped", inspection=REPORT)
    simulated.settle()
    simulated.now += timedelta(seconds=refresh.wait_seconds(simulated.model, simulated.now))
    simulated.settle()
    simulated.report(phase="Rejected", reason="SourceNotFound", message="404")
    simulated.settle()
    assert simulated.condition("Refreshed").reason == "SourceNotFound"
    simulated.now += timedelta(seconds=5)
    simulated.settle()
    assert simulated.inspection["spec"]["hostName"] == "studio-2"
    simulated.report(phase="Stopped", inspection=REPORT | {"revision": '"etag-2"'})
    simulated.settle()
    assert simulated.model.status.revision == '"etag-2"'


@pytest.mark.parametrize("status", [{}, {"phase": "Failed", "reason": "SourceUnreachable", "message": "x"}])
@pytest.mark.parametrize("minutes", [-10, 10])
def test_clock_of_the_api_server_neither_skips_nor_prolongs_an_attempt(status: Obj, minutes: int) -> None:
    simulated = make_host_model("studio-1", "studio-2")
    simulated.report(**status)
    metadata = simulated.inspection["metadata"]
    of_server = simulated.now + timedelta(minutes=minutes)
    metadata["creationTimestamp"] = of_server.isoformat()
    metadata["managedFields"] = [{"subresource": "status", "time": of_server.isoformat()}]
    again = simulated.settle().again_seconds
    assert again is not None
    assert 0 < again <= 60
    assert len(simulated.made) == 1


def test_next_attempt_waits_as_long_as_the_server_of_the_weights_asks() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    said = {"reason": "SourceUnreachable", "message": "HTTP 429", "retryable": True, "retryAfterSeconds": 3000}
    simulated.end("inspect", 1, said)
    assert simulated.settle().again_seconds == pytest.approx(3000, abs=1)
