"""The image of Pomona in the Jobs of a Model: the Secrets with which nodes pull it."""

from datetime import timedelta

import pytest

from controller.models.jobs import FIRST_RETRY_SECONDS
from kube.client import Obj
from tests.support.simulated_model import SimulatedModel, pod


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
    simulated.begin_fetch()
    jobs = [each for each in simulated.made if each["kind"] == "Job"]
    assert [pull_secrets(each) for each in jobs] == [expected, expected]


def refuse_image(simulated: SimulatedModel, verb: str, reason: str = "ImagePullBackOff") -> None:
    """Report that the node of the Job cannot pull its image."""
    said = 'Back-off pulling image "registry.example/pomona:1": 401 Unauthorized'
    simulated.pods[simulated.job(verb)["metadata"]["uid"]] = [pod({"waiting": {"reason": reason, "message": said}})]
    simulated.settle()


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_image_that_cannot_be_pulled_is_reported_with_the_option_for_a_login(reason: str) -> None:
    simulated = SimulatedModel()
    simulated.settle()
    refuse_image(simulated, "inspect", reason)
    ready, job = simulated.condition("Ready"), simulated.job("inspect")["metadata"]["name"]
    assert ready.reason == reason
    assert ready.message == (
        f'Job {job} is waiting: Back-off pulling image "registry.example/pomona:1": 401 Unauthorized; if the registry '
        "needs a login, an administrator starts `pomona controller` with --image-pull-secret NAME and creates Secret "
        f"NAME with it in namespace team; after another --image, make another Job: kubectl -n team delete job {job}"
    )


def test_pull_secret_that_may_be_missing_is_named_with_its_namespace() -> None:
    simulated = SimulatedModel()
    simulated.pull_secrets = ("registry", "mirror")
    simulated.begin_fetch()
    refuse_image(simulated, "fetch")
    cached = simulated.condition("Cached")
    assert cached.reason == "ImagePullBackOff"
    way_out = "an administrator creates Secret registry or mirror with it in namespace team; after another --image"
    assert f"401 Unauthorized; if the registry needs a login, {way_out}" in cached.message


def test_job_without_the_pull_secret_that_it_needs_is_replaced() -> None:
    simulated = SimulatedModel()
    simulated.begin_fetch()
    refuse_image(simulated, "fetch")
    first = simulated.job("fetch")
    simulated.pull_secrets = ("registry",)
    simulated.settle()
    second = simulated.job("fetch")
    assert (pull_secrets(first), pull_secrets(second)) == (None, [{"name": "registry"}])
    assert first["metadata"]["name"] not in simulated.jobs
    refuse_image(simulated, "fetch")
    simulated.now += timedelta(hours=1)
    simulated.settle()
    assert simulated.job("fetch") == second, "the node asks for the Secret again by itself"


def test_pull_secret_that_a_policy_takes_away_is_asked_for_with_a_pause() -> None:
    simulated = SimulatedModel()
    simulated.pull_secrets = ("registry",)
    simulated.settle()
    for count in range(1, 4):
        assert len(simulated.made) == count
        job = simulated.job("inspect")
        job["metadata"]["creationTimestamp"] = simulated.now.isoformat()
        del job["spec"]["template"]["spec"]["imagePullSecrets"]
        refuse_image(simulated, "inspect")
        assert simulated.condition("Ready").message.endswith("it is retried automatically")
        assert len(simulated.made) == count
        pause = FIRST_RETRY_SECONDS * 2 ** (count - 1)
        assert simulated.settle().again_seconds == pause
        simulated.now += timedelta(seconds=pause)
        simulated.settle()


def test_job_that_only_lacks_a_pull_secret_goes_on() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.pull_secrets = ("registry",)
    states: list[Obj] = [{"waiting": {"reason": "ContainerCreating"}}, {"running": {}}]
    for state in states:
        simulated.pods[simulated.job("inspect")["metadata"]["uid"]] = [pod(state)]
        simulated.settle()
    assert len(simulated.made) == 1
