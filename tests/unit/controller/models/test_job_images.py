"""The image of Pomona in the Jobs of a Model: the Secrets with which nodes pull it."""

import pytest

from kube.client import Obj
from tests.support.simulated_model import INSPECTED, SimulatedModel


def pull_secrets(job: Obj) -> list[Obj] | None:
    """Return the pull secrets of the pod of a Job; None if it states none."""
    found: list[Obj] | None = job["spec"]["template"]["spec"].get("imagePullSecrets")
    return found


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), None), (("registry", "mirror"), [{"name": "registry"}, {"name": "mirror"}])],
)
def test_jobs_have_the_pull_secrets_of_the_controller(names: tuple[str, ...], expected: list[Obj] | None) -> None:
    simulated = SimulatedModel()
    simulated.pull_secrets = names
    simulated.add_consumer()
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED)
    simulated.settle()
    jobs = [each for each in simulated.made if each["kind"] == "Job"]
    assert [pull_secrets(each) for each in jobs] == [expected, expected]


def test_another_pull_secret_repeats_no_work_that_goes_on() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.pull_secrets = ("registry",)
    simulated.settle()
    assert len(simulated.made) == 1
