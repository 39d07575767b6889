"""Decisions about Models without a cluster: Jobs, volumes, retries, conditions and edits."""

import json
from collections.abc import Iterable
from datetime import timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.models.jobs import ANNOTATION_ATTEMPT, LAST_RETRY_SECONDS, LOST_SECONDS
from controller.models.observation import observe_model
from controller.models.served import cache_path, claim_name
from controller.models.volume import SETTLING_SECONDS
from controller.pod_settings import TenantLimits
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.plan import Snapshot
from crds.cache import CacheOptions
from crds.meta import SecretReference, Toleration
from crds.model import ModelHardware
from crds.weights_header import GGUF
from kube.client import Obj
from kube.resources import INFERENCE_SERVICES, JOBS, MODELS, PVCS, ObjectKey
from kube.store import Store
from tests.support.simulated_model import HTTP, INSPECTED, SHA, START, SimulatedModel, make_cached, make_inspected, pod


def arguments(job: Obj) -> list[str]:
    args: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_local_file_needs_no_job() -> None:
    simulated = SimulatedModel(source="file:///models/big.gguf", memory_bytes=5)
    simulated.add_consumer()
    plan = simulated.settle()
    assert simulated.made == []
    assert plan.status is not None
    assert plan.status["phase"] == "Ready"
    assert simulated.condition("Ready").reason == "HostInspects"
    assert simulated.condition("Cached").status == "False"


def test_a_source_that_cannot_be_parsed_fails_without_a_job() -> None:
    simulated = SimulatedModel(source="hf://only-org")
    simulated.settle()
    assert simulated.made == []
    assert simulated.model.status.phase == "Failed"
    assert "edit spec.source" in simulated.condition("Ready").message


def test_result_of_an_inspection_is_written_to_the_status() -> None:
    simulated = make_inspected()
    status = simulated.model.status
    assert (status.phase, status.file, status.revision, status.size) == ("Ready", "tiny.gguf", '"etag-1"', "100.0 MiB")
    assert status.gguf == GGUF(architecture="llama", quantization="F32")
    assert simulated.condition("Ready").reason == "Inspected"
    assert simulated.condition("Cached").reason == "NoConsumers"
    assert len(simulated.made) == 1


def test_a_job_has_no_secret_in_its_spec_and_few_rights() -> None:
    simulated = SimulatedModel(source_secret_ref=SecretReference(name="hub"), sha256=SHA)
    simulated.settle()
    spec = simulated.job("inspect")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"][:2] == ["inspect", HTTP]
    assert SHA in container["args"]
    assert {"name": "HF_ENDPOINT", "value": "http://mirror.example"} in container["env"]
    assert [
        variable["valueFrom"]["secretKeyRef"]["name"] for variable in container["env"] if "valueFrom" in variable
    ] == ["hub"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]


def test_fetch_runs_at_the_node_of_the_first_consumer_and_writes_the_path_of_pods() -> None:
    simulated = make_inspected(sha256=SHA)
    simulated.add_consumer(node_selector={"disk": "fast"})
    simulated.add_consumer(node_selector={"disk": "slow"})
    simulated.settle()
    job = simulated.job("fetch")
    directory, _, file = cache_path(simulated.model).rpartition("/")
    assert file == "tiny.gguf"
    assert arguments(job)[arguments(job).index("--to") + 1] == f"/models/{directory}"
    assert arguments(job)[arguments(job).index("--sha256") + 1] == SHA
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}
    assert simulated.claim is not None
    assert simulated.claim["metadata"]["name"] == claim_name(simulated.model)
    assert simulated.claim["spec"]["resources"]["requests"]["storage"] == "126Mi"
    assert simulated.model.status.phase == "Downloading"


def test_fetch_runs_at_a_node_whose_processor_can_run_the_image() -> None:
    for spec, selected in (
        ({"runtime": "vllm"}, {"kubernetes.io/arch": "amd64"}),
        ({"runtime": "vllm", "image": "registry.example/vllm:arm64"}, {}),
        ({}, {}),
    ):
        simulated = make_inspected(sha256=SHA)
        simulated.add_consumer(**spec)
        simulated.settle()
        assert simulated.job("fetch")["spec"]["template"]["spec"]["nodeSelector"] == selected


def test_jobs_get_the_mirrors_and_run_again_when_these_are_edited() -> None:
    mirror = "http://mirror.example/copy.gguf"
    simulated = SimulatedModel(sha256=SHA)
    simulated.settle()
    simulated.end("inspect", 2, {"reason": "SourceNotFound", "message": "gone"})
    simulated.settle()
    simulated.edit(mirrors=[mirror])
    simulated.settle()
    assert arguments(simulated.job("inspect"))[:4] == ["inspect", HTTP, "--mirror", mirror]
    simulated.end("inspect", 0, INSPECTED)
    simulated.add_consumer()
    simulated.settle()
    assert arguments(simulated.job("fetch"))[:4] == ["fetch", HTTP, "--mirror", mirror]


def test_fetch_tolerates_the_taints_of_its_consumers_nodes() -> None:
    simulated = make_inspected(hardware=ModelHardware(accelerator="nvidia"))
    simulated.add_consumer(tolerations=[Toleration(key="team", operator="Exists")])
    simulated.settle()
    keys = [toleration["key"] for toleration in simulated.job("fetch")["spec"]["template"]["spec"]["tolerations"]]
    assert keys == ["nvidia.com/gpu", "team"]


@pytest.mark.parametrize(
    "refused",
    [
        Toleration(key="node-role.kubernetes.io/control-plane", operator="Exists"),
        Toleration(operator="Exists"),
    ],
    ids=["control plane", "all"],
)
def test_fetch_tolerates_no_taint_that_tenants_may_not_tolerate(refused: Toleration) -> None:
    simulated = make_inspected()
    simulated.limits = TenantLimits()
    simulated.add_consumer(tolerations=[refused, Toleration(key="team", operator="Exists")])
    simulated.settle()
    tolerations = simulated.job("fetch")["spec"]["template"]["spec"]["tolerations"]
    assert [toleration["key"] for toleration in tolerations] == ["team"]


def test_fetch_is_started_for_a_volume_that_waits_for_its_first_pod() -> None:
    simulated = make_inspected()
    simulated.claim_phase = "Pending"
    simulated.add_consumer()
    assert simulated.settle().again_seconds == SETTLING_SECONDS
    assert simulated.condition("Cached").reason == "Fetching"
    assert len(simulated.jobs) == 1
    simulated.now += timedelta(seconds=SETTLING_SECONDS)
    simulated.settle()
    assert simulated.job("fetch")


def test_volume_has_the_users_settings() -> None:
    simulated = make_inspected(cache=CacheOptions(access_mode="ReadWriteMany", storage_class_name="nfs", size="7Gi"))
    simulated.add_consumer()
    simulated.settle()
    assert simulated.claim is not None
    assert simulated.claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "7Gi"}},
    }


def test_cached_weights_stay_cached_without_job_and_consumers() -> None:
    simulated = make_cached()
    assert simulated.model.status.phase == "Ready"
    made = len(simulated.made)
    simulated.jobs.clear()
    simulated.pods.clear()
    simulated.consumers.clear()
    simulated.settle()
    assert simulated.condition("Cached").reason == "Fetched"
    assert len(simulated.made) == made


def test_a_lost_volume_is_created_and_filled_again() -> None:
    simulated = make_cached()
    simulated.lose_claim()
    simulated.settle()
    assert simulated.claim is not None
    assert simulated.condition("Cached").reason == "Fetching"
    simulated.end("fetch", 0, {})
    simulated.settle()
    assert simulated.condition("Cached").status == "True"


def test_recreated_volume_is_filled_even_if_the_status_is_cached() -> None:
    simulated = make_cached()
    said = simulated.model.status
    simulated.lose_claim()
    simulated.step()
    assert simulated.claim is not None
    # The controller died, or the answer was lost, before the status was written.
    simulated.model = msgspec.structs.replace(simulated.model, status=said)
    simulated.settle()
    assert simulated.condition("Cached").reason == "Fetching"
    assert simulated.job("fetch")


def test_unreadable_service_blocks_no_model() -> None:
    store = Store()
    declare_indexes(store)
    for name, spec in {"odd": {"hardware": {"accelerator": "of-tomorrow"}}, "plain": {}}.items():
        metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"}
        store.put(INFERENCE_SERVICES, {"metadata": metadata, "spec": {"modelRef": "tiny", **spec}})
    model = observe_model(Snapshot(store, START), ObjectKey("team", "tiny"), SimulatedModel().model)
    assert model.consumer is not None
    assert model.consumer.metadata.name == "plain"


def test_edit_that_keeps_the_weights_fetches_nothing() -> None:
    simulated = make_cached()
    made = len(simulated.made)
    simulated.edit(memory_bytes=7)
    simulated.settle()
    assert simulated.condition("Ready").observed_generation == 2
    assert simulated.condition("Cached").status == "True"
    assert len(simulated.made) == made


SMALL: Obj = {"tensorBytes": 1, "vocabularySize": 1, "embeddingSize": 1, "attentionSize": 1, "headCount": 1}
SMALL |= {"feedForwardSize": 1, "layers": [{"count": 1}]}


@pytest.mark.parametrize("fetched", [SMALL | {"tensorBytes": 40 << 30}, None])
def test_fetched_weights_count_and_not_what_the_server_let_inspect(fetched: Obj | None) -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.end("inspect", 0, INSPECTED | {"layout": SMALL})
    simulated.add_consumer()
    simulated.settle()
    assert msgspec.to_builtins(simulated.model.status.layout) == SMALL
    args = arguments(simulated.job("fetch"))
    assert args[args.index("--size-bytes") + 1] == str(INSPECTED["sizeBytes"])

    simulated.end("fetch", 0, {"sizeBytes": INSPECTED["sizeBytes"], "gguf": {"architecture": "x"}, "layout": fetched})
    simulated.settle()
    simulated.edit(memory_bytes=7)
    simulated.settle()
    assert simulated.condition("Cached").status == "True"
    assert simulated.condition("Ready").observed_generation == 2
    status = simulated.model.status
    assert (msgspec.to_builtins(status.layout) if status.layout else None) == fetched, "also after another inspection"
    assert status.gguf == GGUF(architecture="x")


def test_edited_source_is_inspected_again_and_old_jobs_are_pruned() -> None:
    simulated = make_cached()
    simulated.edit(source="http://models.example/other.gguf")
    simulated.step()
    assert simulated.condition("Ready").reason == "Inspecting"
    assert simulated.condition("Cached").status == "True", "the old weights are there until the new ones are known"
    simulated.end("inspect", 0, INSPECTED | {"file": "other.gguf"})
    simulated.settle()
    assert simulated.condition("Cached").reason == "Fetching"
    assert len(simulated.jobs) == 2


def test_permanent_failure_is_not_retried_until_an_edit() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.end("inspect", 2, {"reason": "SourceNotFound", "message": "no such file."})
    simulated.settle()
    assert simulated.model.status.phase == "Failed"
    assert simulated.condition("Ready").reason == "SourceNotFound"
    assert "kubectl -n team delete job tiny-inspect-" in simulated.condition("Ready").message
    simulated.now += timedelta(days=1)
    assert simulated.settle().again_seconds is None
    assert len(simulated.made) == 1
    simulated.edit(sha256=SHA)
    simulated.settle()
    assert len(simulated.made) == 2
    assert len(simulated.jobs) == 1


def test_deletion_of_the_failed_job_causes_a_retry() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.end("inspect", 2, {"reason": "SourceNotFound", "message": "no such file"})
    simulated.settle()
    simulated.jobs.clear()
    simulated.settle()
    assert len(simulated.jobs) == 1
    assert simulated.model.status.phase == "Pending"


def test_transient_failure_is_retried_for_ever_with_a_growing_pause() -> None:
    simulated = SimulatedModel()
    pauses = []
    for attempt in range(12):
        simulated.settle()
        assert simulated.job("inspect")["metadata"]["annotations"][ANNOTATION_ATTEMPT] == str(attempt)
        simulated.end("inspect", 1, {"reason": "SourceUnreachable", "message": "timed out"})
        again = simulated.settle().again_seconds
        assert again is not None
        assert simulated.condition("Ready").reason == "SourceUnreachable"
        pauses.append(again)
        simulated.now += timedelta(seconds=again)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 10
    assert pauses[-1] == LAST_RETRY_SECONDS


def test_next_attempt_waits_as_long_as_the_server_of_the_weights_asks() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    said = {"reason": "SourceUnreachable", "message": "HTTP 429", "retryable": True, "retryAfterSeconds": 3000}
    simulated.end("inspect", 1, said)
    assert simulated.settle().again_seconds == pytest.approx(3000, abs=1)


def test_lost_result_of_a_job_is_fetched_by_another_job() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.mark("inspect", "Complete")
    assert simulated.settle().again_seconds == LOST_SECONDS
    assert len(simulated.made) == 1, "its pod may be on its way"
    simulated.now += timedelta(seconds=LOST_SECONDS)
    simulated.settle()
    simulated.now += timedelta(seconds=LOST_SECONDS)
    simulated.settle()
    assert len(simulated.made) == 2


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"waiting": {"reason": "ContainerCreating"}}, "Inspecting"),
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "ImagePullBackOff"),
        ({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}, "SecretNotFound"),
    ],
)
def test_reason_why_a_job_does_not_start_is_reported(state: Obj, reason: str) -> None:
    simulated = SimulatedModel(source_secret_ref=SecretReference(name="hub"))
    simulated.settle()
    simulated.pods[simulated.job("inspect")["metadata"]["uid"]] = [pod(state)]
    simulated.settle()
    assert simulated.condition("Ready").reason == reason
    assert state["waiting"].get("message", "") in simulated.condition("Ready").message
    assert simulated.model.status.phase == "Pending"


def test_unschedulable_fetch_is_reported() -> None:
    simulated = make_inspected()
    simulated.add_consumer()
    simulated.settle()
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    uid = simulated.job("fetch")["metadata"]["uid"]
    simulated.pods[uid] = [{"metadata": {"creationTimestamp": ""}, "status": {"conditions": [unscheduled]}}]
    simulated.settle()
    assert (simulated.condition("Cached").reason, simulated.model.status.phase) == ("Unschedulable", "Downloading")


def test_a_wrong_checksum_fails_the_model_and_not_its_inspection() -> None:
    simulated = make_inspected(sha256=SHA)
    simulated.add_consumer()
    simulated.settle()
    simulated.end("fetch", 2, {"reason": "ChecksumMismatch", "message": f"is not {SHA}"})
    simulated.settle()
    assert simulated.model.status.phase == "Failed"
    assert simulated.condition("Ready").status == "True"
    assert simulated.condition("Cached").reason == "ChecksumMismatch"


def test_reason_of_a_killed_container_is_reported() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.end("inspect", 137, "")
    killed = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": simulated.now.isoformat()}
    simulated.pods[simulated.job("inspect")["metadata"]["uid"]] = [pod({"terminated": killed})]
    simulated.settle()
    assert simulated.condition("Ready").reason == "OOMKilled"
    assert "137" in simulated.condition("Ready").message


def test_hanging_inspection_is_ended_and_reported() -> None:
    simulated = SimulatedModel()
    simulated.settle()
    assert simulated.job("inspect")["spec"]["activeDeadlineSeconds"] > 0
    simulated.mark(
        "inspect", "Failed", reason="DeadlineExceeded", message="Job was active longer than specified deadline"
    )
    simulated.settle()
    assert simulated.condition("Ready").reason == "DeadlineExceeded"


def test_fetch_has_no_deadline() -> None:
    simulated = make_inspected()
    simulated.add_consumer()
    simulated.settle()
    assert "activeDeadlineSeconds" not in simulated.job("fetch")["spec"]


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize(
    "answer",
    [
        *("", "Traceback: boom", '{"sizeBytes": "many"}'),
        *(json.dumps(INSPECTED | odd) for odd in ({"revision": "x" * 257}, {"sizeBytes": 1 << 63})),
    ],
    ids=["nothing", "no JSON", "words", "revision beyond a status", "size beyond a status"],
)
def test_unreadable_result_is_no_inspection(answer: str, exit_code: int) -> None:
    simulated = SimulatedModel()
    simulated.settle()
    simulated.end("inspect", exit_code, answer)
    simulated.settle()
    assert simulated.condition("Ready").status == "False"
    assert simulated.condition("Ready").reason


ENDS = st.sampled_from(["inspect", "fetch"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), ENDS, st.sampled_from([0, 1, 2])),
        st.tuples(st.just("lose"), ENDS, st.just(0)),
        st.tuples(st.just("edit"), st.sampled_from([HTTP, "http://models.example/b.gguf"]), st.just(0)),
        st.tuples(st.just("consume"), st.just(""), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 400)),
        st.tuples(st.just("claim"), st.just(""), st.just(0)),
        st.tuples(st.just("resize"), st.sampled_from(["1Mi", "1Gi", "2Gi"]), st.integers(0, 1)),
    ),
    max_size=12,
)


@given(ACTIONS)
def test_plans_settle_with_few_jobs_after_any_sequence_of_events(actions: Iterable[tuple[str, str, int]]) -> None:
    simulated = SimulatedModel()
    for action, argument, number in actions:
        _happen(simulated, action, argument, number)
        simulated.settle()
        assert len(simulated.jobs) <= 2
        assert {condition.type for condition in simulated.model.status.conditions} <= {
            "Ready",
            "Cached",
            "VolumeChanging",
        }
        assert simulated.condition("Ready").message
    # From any state the Model becomes Ready once nothing fails any more.
    simulated.edit(source="http://models.example/final.gguf", cache=CacheOptions())
    simulated.consumers.clear()
    simulated.begin_fetch()
    simulated.end("fetch", 0, {})
    simulated.settle()
    assert simulated.model.status.phase == "Ready"
    assert simulated.condition("Cached").status == "True"
    assert len(simulated.claims) == 1


def _happen(simulated: SimulatedModel, action: str, argument: str, number: int) -> None:
    running = [name for name, job in simulated.jobs.items() if f"-{argument}-" in name and "status" not in job]
    if action == "end" and running:
        simulated.end(argument, number, INSPECTED if number == 0 else {"reason": "Broken", "message": "it broke"})
    elif action == "lose":
        simulated.jobs = {name: job for name, job in simulated.jobs.items() if f"-{argument}-" not in name}
    elif action == "edit":
        simulated.edit(source=argument)
    elif action == "consume":
        simulated.consumers.clear()
        for _ in range(number):
            simulated.add_consumer()
    elif action == "wait":
        simulated.now += timedelta(seconds=number)
    elif action == "resize":
        simulated.expandable = {"standard"} if number else set()
        simulated.edit(cache=CacheOptions(size=argument))
    elif action == "claim":
        simulated.lose_claim()


def test_jobs_and_claims_of_another_namespace_are_no_children_whatever_owner_they_name() -> None:
    """Whoever knows the uid of a foreign Model could else state the revision and the digest of its weights."""
    store, forged = Store(), {"name": "tiny", "namespace": "thieves", "uid": "a", "resourceVersion": "1"}
    declare_indexes(store)
    for resource in (JOBS, PVCS):
        owner = {
            "apiVersion": MODELS.api_version,
            "kind": "Model",
            "name": "tiny",
            "uid": "model-uid",
            "controller": True,
        }
        store.put(resource, {"metadata": forged | {"ownerReferences": [owner]}})
    model = SimulatedModel().model
    observed = observe_model(Snapshot(store, START), ObjectKey("team", "tiny"), model)
    assert (list(observed.jobs), list(observed.claims.claims)) == ([], [])
