"""Decisions about Models, without a cluster: a small world that does what a plan says, and Jobs that end as told."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.jobs import ANNOTATION_ATTEMPT, LAST_RETRY_SECONDS, LOST_SECONDS
from controller.models import Observed, desired, observe
from controller.plan import OWNER_INDEX, Key, Plan, Snapshot
from controller.status import find
from controller.weights import SETTLING_SECONDS, Settings, cache_path, claim_name
from crds.inferenceservice import InferenceService, InferenceServiceSpec
from crds.meta import Condition, ObjectMeta, SecretReference, Toleration
from crds.model import GGUF, Cache, Model, ModelHardware, ModelSpec
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, JOBS, PVCS
from kube.store import Store

START = datetime(2026, 11, 21, 12, tzinfo=UTC)
HTTP = "http://models.example/tiny.gguf"
SETTINGS = Settings("pomona:test", {"HF_ENDPOINT": "http://mirror.example"})
SHA = "ab" * 32
INSPECTED = {
    "revision": '"etag-1"',
    "file": "tiny.gguf",
    "sizeBytes": 100 * 1024 * 1024,
    "gguf": {"architecture": "llama", "quantization": "F32"},
}


class World:
    """A Model with its children, as a cluster would have them after each executed plan."""

    def __init__(self, **spec: Any) -> None:
        metadata = ObjectMeta(name="tiny", namespace="team", uid="model-uid", generation=1)
        self.model = Model(metadata=metadata, spec=ModelSpec(**({"source": HTTP} | spec)))
        self.now = START
        self.jobs: dict[str, Obj] = {}
        self.pods: dict[str, list[Obj]] = {}
        self.claim: Obj | None = None
        self.claim_phase = "Bound"
        self.consumers: list[InferenceService] = []
        self.made: list[Obj] = []

    def decide(self) -> Plan:
        observed = Observed(
            jobs=list(self.jobs.values()), pods=self.pods, claim=self.claim, consumers=tuple(self.consumers)
        )
        return desired(self.model, observed, SETTINGS, self.now)

    def step(self) -> Plan:
        """Decide once and do what the plan says."""
        plan = self.decide()
        for resource, obj in plan.create:
            stored = json.loads(json.dumps(obj))
            stored["metadata"]["uid"] = f"uid-{len(self.made)}"
            self.made.append(stored)
            if resource == JOBS:
                assert stored["metadata"]["name"] not in self.jobs
                self.jobs[stored["metadata"]["name"]] = stored
            else:
                assert (resource, self.claim) == (PVCS, None)
                stored["metadata"]["creationTimestamp"] = self.now.isoformat()
                self.claim = stored | {"status": {"phase": self.claim_phase}}
        for ref in plan.delete:
            assert self.jobs[ref.name]["metadata"]["uid"] == ref.uid
            del self.jobs[ref.name]
        status = json.loads(json.dumps(plan.status))
        for each in status["conditions"]:
            each.setdefault("lastTransitionTime", "2026-11-21T12:00:00Z")
        self.model = msgspec.convert(msgspec.to_builtins(self.model) | {"status": status}, Model)
        return plan

    def settle(self) -> Plan:
        """Decide until nothing is to be done any more; returns the last plan."""
        for _ in range(5):
            before = self.model
            plan = self.step()
            if not (plan.create or plan.delete) and before == self.model:
                return plan
        raise AssertionError(f"does not settle: {plan}")

    def edit(self, **spec: Any) -> None:
        metadata = msgspec.structs.replace(self.model.metadata, generation=self.model.metadata.generation + 1)
        self.model = msgspec.structs.replace(
            self.model, metadata=metadata, spec=msgspec.structs.replace(self.model.spec, **spec)
        )

    def add_consumer(self, **spec: Any) -> None:
        metadata = ObjectMeta(name=f"chat-{len(self.consumers)}", namespace="team")
        self.consumers.append(InferenceService(metadata=metadata, spec=InferenceServiceSpec(model_ref="tiny", **spec)))

    def job(self, verb: str) -> Obj:
        (found,) = [job for name, job in self.jobs.items() if f"-{verb}-" in name]
        return found

    def end(self, verb: str, exit_code: int, message: object) -> None:
        """End the only Job of this verb and its pod."""
        job = self.job(verb)
        text = message if isinstance(message, str) else json.dumps(message)
        terminated = {"exitCode": exit_code, "message": text, "finishedAt": self.now.isoformat()}
        self.pods[job["metadata"]["uid"]] = [pod({"terminated": terminated})]
        self.mark(verb, "Complete" if exit_code == 0 else "Failed")

    def mark(self, verb: str, kind: str, **said: str) -> None:
        condition = {"type": kind, "status": "True", "lastTransitionTime": self.now.isoformat(), **said}
        self.job(verb)["status"] = {"conditions": [condition]}

    def lose_claim(self) -> None:
        self.claim = None

    def forget_inspection(self) -> None:
        """Have the status of a version that did not write down what it looks for."""
        status = msgspec.structs.replace(self.model.status, inspection=None)
        self.model = msgspec.structs.replace(self.model, status=status)

    def condition(self, kind: str) -> Condition:
        found = find(self.model.status.conditions, kind)
        assert found is not None
        return found


def pod(state: Obj) -> Obj:
    return {
        "metadata": {"creationTimestamp": "2026-11-21T12:00:00Z"},
        "status": {"containerStatuses": [{"state": state}]},
    }


def inspected(**spec: Any) -> World:
    world = World(**spec)
    world.settle()
    world.end("inspect", 0, INSPECTED)
    world.settle()
    return world


def cached(**spec: Any) -> World:
    world = inspected(**spec)
    world.add_consumer()
    world.settle()
    world.end("fetch", 0, {"sizeBytes": 1})
    world.settle()
    return world


def arguments(job: Obj) -> list[str]:
    args: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_a_file_needs_no_job() -> None:
    world = World(source="file:///models/big.gguf", memory_bytes=5)
    world.add_consumer()
    plan = world.settle()
    assert world.made == []
    assert plan.status is not None
    assert plan.status["phase"] == "Ready"
    assert world.condition("Ready").reason == "HostInspects"
    assert world.condition("Cached").status == "False"


def test_a_source_that_cannot_be_parsed_fails_without_a_job() -> None:
    world = World(source="hf://only-org")
    world.settle()
    assert world.made == []
    assert world.model.status.phase == "Failed"
    assert "edit spec.source" in world.condition("Ready").message


def test_an_inspection_becomes_the_status() -> None:
    world = inspected()
    status = world.model.status
    assert (status.phase, status.file, status.revision, status.size) == ("Ready", "tiny.gguf", '"etag-1"', "100.0 MiB")
    assert status.gguf == GGUF(architecture="llama", quantization="F32")
    assert world.condition("Ready").reason == "Inspected"
    assert world.condition("Cached").reason == "NoConsumers"
    assert len(world.made) == 1


def test_a_job_holds_no_secret_and_may_do_little() -> None:
    world = World(source_secret_ref=SecretReference(name="hub"), sha256=SHA)
    world.settle()
    spec = world.job("inspect")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"][:2] == ["inspect", HTTP]
    assert SHA in container["args"]
    assert {"name": "HF_ENDPOINT", "value": "http://mirror.example"} in container["env"]
    assert [each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if "valueFrom" in each] == ["hub"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]


def test_the_fetch_goes_where_the_first_consumer_runs_and_to_the_path_that_pods_read() -> None:
    world = inspected(sha256=SHA)
    world.add_consumer(node_selector={"disk": "fast"})
    world.add_consumer(node_selector={"disk": "slow"})
    world.settle()
    job = world.job("fetch")
    directory, _, file = cache_path(world.model).rpartition("/")
    assert file == "tiny.gguf"
    assert arguments(job)[arguments(job).index("--to") + 1] == f"/models/{directory}"
    assert arguments(job)[arguments(job).index("--sha256") + 1] == SHA
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}
    assert world.claim is not None
    assert world.claim["metadata"]["name"] == claim_name("tiny")
    assert world.claim["spec"]["resources"]["requests"]["storage"] == "126Mi"
    assert world.model.status.phase == "Downloading"


def test_the_fetch_bears_the_taints_of_the_nodes_that_its_consumer_needs() -> None:
    world = inspected(hardware=ModelHardware(accelerator="nvidia"))
    world.add_consumer(tolerations=[Toleration(key="team", operator="Exists")])
    world.settle()
    keys = [each["key"] for each in world.job("fetch")["spec"]["template"]["spec"]["tolerations"]]
    assert keys == ["nvidia.com/gpu", "team"]


def test_a_volume_that_waits_for_its_first_pod_gets_one() -> None:
    world = inspected()
    world.claim_phase = "Pending"
    world.add_consumer()
    assert world.settle().again_seconds == SETTLING_SECONDS
    assert world.condition("Cached").reason == "Fetching"
    assert len(world.jobs) == 1
    world.now += timedelta(seconds=SETTLING_SECONDS)
    world.settle()
    assert world.job("fetch")


def test_the_user_decides_the_volume() -> None:
    world = inspected(cache=Cache(access_mode="ReadWriteMany", storage_class_name="nfs", size="7Gi"))
    world.add_consumer()
    world.settle()
    assert world.claim is not None
    assert world.claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "7Gi"}},
    }


def test_what_is_cached_stays_cached_without_its_job_and_without_consumers() -> None:
    world = cached()
    assert world.model.status.phase == "Ready"
    made = len(world.made)
    world.jobs.clear()
    world.pods.clear()
    world.consumers.clear()
    world.settle()
    assert world.condition("Cached").reason == "Fetched"
    assert len(world.made) == made


def test_a_lost_volume_is_made_and_filled_again() -> None:
    world = cached()
    world.lose_claim()
    world.settle()
    assert world.claim is not None
    assert world.condition("Cached").reason == "Fetching"
    world.end("fetch", 0, {})
    world.settle()
    assert world.condition("Cached").status == "True"


def test_a_volume_made_anew_is_empty_even_if_nobody_wrote_that_down() -> None:
    world = cached()
    said = world.model.status
    world.lose_claim()
    world.step()
    assert world.claim is not None
    # The controller died, or lost the answer, before the status was written.
    world.model = msgspec.structs.replace(world.model, status=said)
    world.settle()
    assert world.condition("Cached").reason == "Fetching"
    assert world.job("fetch")


def test_a_service_that_cannot_be_read_stops_no_model() -> None:
    store = Store()
    for resource in (JOBS, PVCS):
        store.index(resource, OWNER_INDEX, lambda _: [])
    for name, spec in {"odd": {"hardware": {"accelerator": "of-tomorrow"}}, "plain": {}}.items():
        metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"}
        store.put(INFERENCE_SERVICES, {"metadata": metadata, "spec": {"modelRef": "tiny", **spec}})
    found = observe(Snapshot(store, START), Key("team", "tiny"), World().model)
    assert [each.metadata.name for each in found.consumers] == ["plain"]


def test_an_edit_that_concerns_no_weights_fetches_nothing_again() -> None:
    world = cached()
    made = len(world.made)
    world.edit(memory_bytes=7)
    world.settle()
    assert world.condition("Ready").observed_generation == 2
    assert world.condition("Cached").status == "True"
    assert len(world.made) == made


def test_an_edit_of_the_source_starts_anew_and_prunes() -> None:
    world = cached()
    world.edit(source="http://models.example/other.gguf")
    world.step()
    assert world.condition("Ready").reason == "Inspecting"
    assert world.condition("Cached").status == "True", "the old weights are there until the new ones are known"
    world.end("inspect", 0, INSPECTED | {"file": "other.gguf"})
    world.settle()
    assert world.condition("Cached").reason == "Fetching"
    assert len(world.jobs) == 2


def test_a_permanent_failure_is_not_tried_again_until_an_edit() -> None:
    world = World()
    world.settle()
    world.end("inspect", 2, {"reason": "SourceNotFound", "message": "no such file."})
    world.settle()
    assert world.model.status.phase == "Failed"
    assert world.condition("Ready").reason == "SourceNotFound"
    assert "kubectl -n team delete job tiny-inspect-" in world.condition("Ready").message
    world.now += timedelta(days=1)
    assert world.settle().again_seconds is None
    assert len(world.made) == 1
    world.edit(sha256=SHA)
    world.settle()
    assert len(world.made) == 2
    assert len(world.jobs) == 1


def test_deleting_the_failed_job_tries_again() -> None:
    world = World()
    world.settle()
    world.end("inspect", 2, {"reason": "SourceNotFound", "message": "no such file"})
    world.settle()
    world.jobs.clear()
    world.settle()
    assert len(world.jobs) == 1
    assert world.model.status.phase == "Pending"


def test_a_transient_failure_is_tried_again_for_ever_with_a_growing_pause() -> None:
    world = World()
    pauses = []
    for attempt in range(12):
        world.settle()
        assert world.job("inspect")["metadata"]["annotations"][ANNOTATION_ATTEMPT] == str(attempt)
        world.end("inspect", 1, {"reason": "SourceUnreachable", "message": "timed out"})
        again = world.settle().again_seconds
        assert again is not None
        assert world.condition("Ready").reason == "SourceUnreachable"
        pauses.append(again)
        world.now += timedelta(seconds=again)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 10
    assert pauses[-1] == LAST_RETRY_SECONDS


def test_an_answer_that_nobody_read_is_asked_for_again() -> None:
    world = World()
    world.settle()
    world.mark("inspect", "Complete")
    assert world.settle().again_seconds == LOST_SECONDS
    assert len(world.made) == 1, "its pod may be on its way"
    world.now += timedelta(seconds=LOST_SECONDS)
    world.settle()
    world.now += timedelta(seconds=LOST_SECONDS)
    world.settle()
    assert len(world.made) == 2


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"waiting": {"reason": "ContainerCreating"}}, "Inspecting"),
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "ImagePullBackOff"),
        ({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}, "SecretNotFound"),
    ],
)
def test_why_a_job_does_not_start_is_told(state: Obj, reason: str) -> None:
    world = World(source_secret_ref=SecretReference(name="hub"))
    world.settle()
    world.pods[world.job("inspect")["metadata"]["uid"]] = [pod(state)]
    world.settle()
    assert world.condition("Ready").reason == reason
    assert state["waiting"].get("message", "") in world.condition("Ready").message
    assert world.model.status.phase == "Pending"


def test_an_unschedulable_fetch_is_told() -> None:
    world = inspected()
    world.add_consumer()
    world.settle()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    uid = world.job("fetch")["metadata"]["uid"]
    world.pods[uid] = [{"metadata": {"creationTimestamp": ""}, "status": {"conditions": [unscheduled]}}]
    world.settle()
    assert (world.condition("Cached").reason, world.model.status.phase) == ("Unschedulable", "Downloading")


def test_a_wrong_checksum_fails_the_model_and_not_its_inspection() -> None:
    world = inspected(sha256=SHA)
    world.add_consumer()
    world.settle()
    world.end("fetch", 2, {"reason": "ChecksumMismatch", "message": f"is not {SHA}"})
    world.settle()
    assert world.model.status.phase == "Failed"
    assert world.condition("Ready").status == "True"
    assert world.condition("Cached").reason == "ChecksumMismatch"


def test_a_container_that_is_killed_says_what_killed_it() -> None:
    world = World()
    world.settle()
    world.end("inspect", 137, "")
    killed = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": world.now.isoformat()}
    world.pods[world.job("inspect")["metadata"]["uid"]] = [pod({"terminated": killed})]
    world.settle()
    assert world.condition("Ready").reason == "OOMKilled"
    assert "137" in world.condition("Ready").message


def test_an_inspection_that_hangs_ends_and_says_so() -> None:
    world = World()
    world.settle()
    assert world.job("inspect")["spec"]["activeDeadlineSeconds"] > 0
    world.mark("inspect", "Failed", reason="DeadlineExceeded", message="Job was active longer than specified deadline")
    world.settle()
    assert world.condition("Ready").reason == "DeadlineExceeded"


def test_a_fetch_may_take_as_long_as_it_takes() -> None:
    world = inspected()
    world.add_consumer()
    world.settle()
    assert "activeDeadlineSeconds" not in world.job("fetch")["spec"]


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize(
    "answer",
    [
        *("", "Traceback: boom", '{"sizeBytes": "many"}'),
        *(json.dumps(INSPECTED | odd) for odd in ({"revision": "x" * 257}, {"sizeBytes": 1 << 63})),
    ],
    ids=["nothing", "no JSON", "words", "revision beyond a status", "size beyond a status"],
)
def test_an_answer_that_cannot_be_read_is_no_inspection(answer: str, exit_code: int) -> None:
    world = World()
    world.settle()
    world.end("inspect", exit_code, answer)
    world.settle()
    assert world.condition("Ready").status == "False"
    assert world.condition("Ready").reason


ENDS = st.sampled_from(["inspect", "fetch"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), ENDS, st.sampled_from([0, 1, 2])),
        st.tuples(st.just("lose"), ENDS, st.just(0)),
        st.tuples(st.just("edit"), st.sampled_from([HTTP, "http://models.example/b.gguf"]), st.just(0)),
        st.tuples(st.just("consume"), st.just(""), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 400)),
        st.tuples(st.sampled_from(["claim", "update"]), st.just(""), st.just(0)),
    ),
    max_size=12,
)


@given(ACTIONS)
def test_whatever_happens_plans_settle_and_jobs_stay_few(actions: Iterable[tuple[str, str, int]]) -> None:
    world = World()
    for action, argument, number in actions:
        _happen(world, action, argument, number)
        world.settle()
        assert len(world.jobs) <= 2
        assert {each.type for each in world.model.status.conditions} <= {"Ready", "Cached"}
        assert world.condition("Ready").message
    # And from wherever it is, it gets to where it should be once nothing fails any more.
    world.edit(source="http://models.example/final.gguf")
    world.consumers.clear()
    world.add_consumer()
    world.settle()
    world.end("inspect", 0, INSPECTED)
    world.settle()
    world.end("fetch", 0, {})
    world.settle()
    assert world.model.status.phase == "Ready"
    assert world.condition("Cached").status == "True"


def _happen(world: World, action: str, argument: str, number: int) -> None:
    running = [name for name, job in world.jobs.items() if f"-{argument}-" in name and "status" not in job]
    if action == "end" and running:
        world.end(argument, number, INSPECTED if number == 0 else {"reason": "Broken", "message": "it broke"})
    elif action == "lose":
        world.jobs = {name: job for name, job in world.jobs.items() if f"-{argument}-" not in name}
    elif action == "edit":
        world.edit(source=argument)
    elif action == "consume":
        world.consumers.clear()
        for _ in range(number):
            world.add_consumer()
    elif action == "wait":
        world.now += timedelta(seconds=number)
    elif action == "claim":
        world.lose_claim()
    elif action == "update":
        world.forget_inspection()
