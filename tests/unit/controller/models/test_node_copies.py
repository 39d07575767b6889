"""Decisions about copies of weights on nodes: they are made where a replica fits, kept, replaced and given up."""

from datetime import timedelta
from typing import Any

import pytest

from controller.models.node_copies import MOST_FETCHES
from controller.models.volume import WEIGHTS
from crds.meta import LABEL_SERVICE
from kube.resources import MODELS, NODES, PODS, PVCS
from tests.support.simulated_copies import NAMESPACE, SLOT, SimulatedCopies, simulate_service
from tests.support.simulated_model import INSPECTED

OTHER = "http://models.example/other.gguf"


def make_two_copies(*, names_nodes: bool = True, **cache: Any) -> SimulatedCopies:
    """Return a Model of which two nodes have a copy that pods mount."""
    simulated = SimulatedCopies({"a": 1, "b": 1, "c": 1})
    simulated.names_nodes = names_nodes
    simulated.make_model(**cache)
    simulated.make_service(replicas=2)
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a", "b"]
    for copy in simulated.copies():
        simulated.serve(copy.name, node=copy.node)
    return simulated


def test_without_a_replica_no_copy_is_made() -> None:
    simulated = SimulatedCopies({"a": 1})
    simulated.make_model()
    assert (simulated.claims(), simulated.model().status.phase) == ({}, "Ready")
    assert simulated.condition("Cached").reason == "NoConsumers"
    simulated.make_service(replicas=0)
    assert simulated.claims() == {}
    simulated.make_service(replicas=1, suspend=True)
    assert simulated.claims() == {}


def test_each_replica_gets_a_copy_on_a_node_of_its_own() -> None:
    simulated = simulate_service({"a": 4, "b": 4, "c": 4}, replicas=2)
    (claim,) = simulated.claims().values()
    assert claim["metadata"]["annotations"][WEIGHTS]
    assert claim["spec"]["storageClassName"] == "local"
    (job,) = simulated.pending()
    requested = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert (requested["requests"][SLOT], requested["limits"][SLOT]) == ("1", "1")
    assert simulated.condition("Cached").status == "False"

    simulated.schedule()
    assert len(simulated.claims()) == 2, "the next claim waits until the first one has a node"
    assert len(simulated.pending()) == 2, "both are fetched at the same time"
    simulated.finish()
    (copy,) = simulated.copies()
    assert (copy.node, copy.name, copy.unused_since) == ("a", claim["metadata"]["name"], "")
    assert copy.claim == claim["metadata"]["uid"]
    assert simulated.condition("Cached").message.startswith("copies on node a at /models/")
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a", "b"]
    assert "copies on nodes a, b at " in simulated.condition("Cached").message
    assert len(simulated.claims()) == 2


def test_copies_are_shared_by_services_and_only_the_largest_decides() -> None:
    simulated = SimulatedCopies({"a": 9, "b": 9, "c": 9})
    simulated.make_model()
    simulated.make_service("chat", replicas=2)
    simulated.make_service("other", replicas=1)
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a", "b"]


def test_models_whose_long_names_begin_alike_have_claims_of_their_own() -> None:
    simulated = SimulatedCopies({"a": 9})
    names = [f"{'long-' * 10}{number}" for number in range(2)]  # longer than the part of it that a claim's name has
    for name in names:
        simulated.make_model(name)
        simulated.make_service(f"chat-{name}", model=name)
    assert [len(simulated.claims(name)) for name in names] == [1, 1]


def test_at_most_some_copies_are_made_at_the_same_time() -> None:
    simulated = simulate_service(dict.fromkeys("abcdefg", 1), replicas=7)
    for _ in range(7):
        simulated.schedule()
    assert len(simulated.pending()) == MOST_FETCHES
    simulated.fetch_all()
    assert simulated.nodes_of() == [*"abcdefg"]
    assert "copies on nodes a, b, c and 4 more at /models/" in simulated.condition("Cached").message


def test_replicas_share_the_copies_that_are_there_if_no_other_node_fits() -> None:
    simulated = simulate_service({"a": 2, "b": 0}, replicas=2)
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a"]
    assert simulated.condition("Cached").status == "True"
    assert "no node has a free slot" in simulated.condition("Cached").message
    assert len(simulated.pending()) == 1
    simulated.put(NODES, "c", namespace="")
    simulated.slots["c"] = 1
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a", "c"]


def test_a_copy_that_is_not_wanted_any_more_is_given_up_before_it_is_verified_and_stays_afterwards() -> None:
    simulated = simulate_service({"a": 1, "b": 1}, replicas=2)
    simulated.schedule()
    simulated.finish()
    assert len(simulated.pending()) == 1
    simulated.make_service(replicas=1)
    assert simulated.pending() == []
    assert [*simulated.claims()] == [copy.name for copy in simulated.copies()]
    simulated.make_service(replicas=0)
    (copy,) = simulated.copies()
    assert copy.unused_since == "2026-11-21T12:00:00Z"
    assert simulated.condition("Cached").status == "True"
    simulated.pass_time(hours=1)
    assert simulated.copies() == [copy], "the time of the last use stays"
    simulated.make_service(replicas=1)
    assert simulated.copies()[0].unused_since == ""


def test_replica_that_no_copy_has_room_for_gets_another_copy() -> None:
    simulated = simulate_service({"a": 1, "b": 1, "c": 1})
    simulated.fetch_all()
    (first,) = simulated.copies()
    simulated.put(PODS, "foreign", metadata={"labels": {"slot": "1"}}, spec={"nodeName": "b"}, status={})
    simulated.put(PODS, "taker", metadata={"labels": {"slot": "1"}}, spec={"nodeName": "a"}, status={})
    simulated.serve(first.name)
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a", "c"]
    simulated.fetch_all()
    assert len(simulated.claims()) == 2, "the scheduler has not refused the replica on c"


@pytest.mark.parametrize("end", ["removed", "Failed", "lost"])
def test_replica_that_waits_for_another_one_to_leave_gets_no_other_copy(end: str) -> None:
    simulated = simulate_service({"a": 1, "b": 1})
    simulated.fetch_all()
    (copy,) = simulated.copies()
    simulated.serve(copy.name, pod="old", node="a")
    old = simulated.store.get(PODS, "old", NAMESPACE)
    assert old is not None
    leaving = {**old["metadata"], "deletionTimestamp": (simulated.now + timedelta(seconds=30)).isoformat()}
    simulated.put(PODS, "old", **{**old, "metadata": leaving})
    simulated.serve(copy.name, pod="new")
    assert [*simulated.claims()] == [copy.name]
    assert simulated.step("tiny").again_seconds == 31
    if end == "removed":
        simulated.remove(PODS, "old")
    elif end == "lost":
        simulated.now += timedelta(seconds=31)
    else:
        simulated.put(PODS, "old", **{**old, "metadata": leaving, "status": {"phase": end}})
    simulated.settle()
    assert len(simulated.claims()) == 2, "the node has no room although the pod has left, or never will"


def test_service_that_is_refused_everywhere_decides_what_the_next_copy_asks_for() -> None:
    simulated = SimulatedCopies({"a": 9, "b": 9})
    simulated.make_model()
    simulated.make_service("chat", replicas=1)
    simulated.fetch_all()
    simulated.make_service("picky", replicas=1, nodeSelector={"disk": "fast"})
    (copy,) = simulated.copies()
    simulated.serve(copy.name, service="picky")
    (job,) = simulated.pending()
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}


@pytest.mark.parametrize("has_pod", [True, False])
def test_job_without_a_node_is_made_again_if_the_service_asks_for_something_else(*, has_pod: bool) -> None:
    """A quota or a policy may refuse the pod that the first one asks for."""
    simulated = simulate_service({"a": 0})
    if has_pod:
        simulated.schedule()
    claims = simulated.claims()
    simulated.make_service(replicas=1, nodeSelector={"disk": "fast"})
    simulated.pass_time(minutes=1)
    (job,) = simulated.jobs("fetch")
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}
    assert simulated.claims() == claims


def test_each_change_of_the_service_is_followed_soon() -> None:
    simulated = simulate_service({"a": 0})
    simulated.schedule()
    for disk in map(str, range(8)):
        simulated.make_service(replicas=1, nodeSelector={"disk": disk})
        simulated.pass_time(seconds=20)
        simulated.schedule()
        (job,) = simulated.jobs("fetch")
        assert job["spec"]["template"]["spec"]["nodeSelector"] == {"disk": disk}


def test_copies_for_other_nodes_are_not_made_where_the_pods_to_replace_are() -> None:
    simulated = SimulatedCopies({"small1": 1, "small2": 1, "big1": 1, "big2": 1})
    for node in ("small1", "small2"):
        labels = {LABEL_SERVICE: "chat", "slot": "1"}
        simulated.put(
            PODS, f"chat-{node}", metadata={"labels": labels}, spec={"nodeName": node}, status={"phase": "Running"}
        )
    simulated.make_model()
    simulated.make_service(replicas=2, nodeSelector={"gpu": "big"})
    simulated.fetch_all()
    assert simulated.nodes_of() == ["big1", "big2"]


def test_fetch_that_has_a_node_goes_on_whatever_the_service_asks_for() -> None:
    simulated = simulate_service({"a": 1})
    simulated.schedule()
    jobs = simulated.pending()
    simulated.make_service(replicas=1, nodeSelector={"disk": "fast"})
    assert simulated.pending() == jobs


def test_download_holds_no_devices_once_its_volume_is_there() -> None:
    """They would be outside of the queue and its quotas, for as long as a source likes."""
    simulated = simulate_service({"a": 1})
    simulated.schedule()
    (first,) = simulated.pending()
    assert first["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][SLOT] == "1"
    simulated.bind()
    (second,) = simulated.pending()
    assert second["metadata"]["name"] != first["metadata"]["name"]
    template = second["spec"]["template"]["spec"]
    assert SLOT not in template["containers"][0]["resources"]["requests"]
    assert template["volumes"] == first["spec"]["template"]["spec"]["volumes"]
    assert template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == {
        "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}]
    }
    assert len(simulated.jobs("fetch")) == 1
    simulated.schedule()
    simulated.finish()
    assert simulated.nodes_of() == ["a"]
    assert simulated.jobs("fetch")[0]["metadata"]["name"] == second["metadata"]["name"], "kept as a record"


def test_download_that_ends_before_its_volume_is_seen_is_not_made_again() -> None:
    simulated = simulate_service({"a": 1})
    simulated.schedule()
    (job,) = simulated.pending()
    simulated.end(job, 0, {"sizeBytes": 1})
    simulated.bind()
    assert simulated.nodes_of() == ["a"]
    assert [fetch["metadata"]["name"] for fetch in simulated.jobs("fetch")] == [job["metadata"]["name"]]


def test_fetch_that_is_tried_again_asks_for_its_node_only() -> None:
    """The volume is there. A replica that finds no room on it gets another copy, but an attempt would wait for ever."""
    simulated = simulate_service({"a": 1})
    simulated.schedule()
    (job,) = simulated.pending()
    simulated.end(job, 1, {"reason": "SourceUnreachable", "message": "no route"})
    simulated.settle()
    assert simulated.condition("Cached").reason == "SourceUnreachable"
    simulated.pass_time(minutes=1)
    (again,) = simulated.pending()
    template = again["spec"]["template"]["spec"]
    assert SLOT not in template["containers"][0]["resources"]["requests"]
    terms = template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}]


def test_failed_fetch_is_reported_with_the_way_out() -> None:
    simulated = simulate_service({"a": 1})
    simulated.schedule()
    simulated.end(simulated.pending()[0], 2, {"reason": "ChecksumMismatch", "message": "sha256 differs"})
    simulated.settle()
    assert simulated.model().status.phase == "Failed"
    assert simulated.condition("Cached").reason == "ChecksumMismatch"
    assert "edit the Model" in simulated.condition("Cached").message


def test_failed_further_copy_leaves_the_first_one_in_use() -> None:
    simulated = simulate_service({"a": 1, "b": 1}, replicas=2)
    simulated.schedule()
    simulated.finish()
    simulated.schedule()
    simulated.end(simulated.pending()[0], 2, {"reason": "SourceNotFound", "message": "gone"})
    simulated.settle()
    assert (simulated.model().status.phase, simulated.condition("Cached").status) == ("Ready", "True")
    assert "for another copy: gone; edit the Model" in simulated.condition("Cached").message


def test_class_that_binds_at_once_is_refused_with_the_way_out() -> None:
    simulated = SimulatedCopies({"a": 1})
    simulated.binds_immediately = True
    simulated.make_model()
    simulated.make_service(replicas=1)
    assert (simulated.claims(), simulated.model().status.phase) == ({}, "Failed")
    assert simulated.condition("Cached").reason == "StorageClassUnsuitable"
    assert "WaitForFirstConsumer" in simulated.condition("Cached").message


def test_size_below_that_of_the_weights_is_refused() -> None:
    simulated = simulate_service({"a": 1}, size="10Mi")
    assert (simulated.claims(), simulated.condition("Cached").reason) == ({}, "VolumeTooSmall")


def test_deleted_node_takes_its_copy_with_it() -> None:
    simulated = make_two_copies()
    gone = simulated.copies()[0]
    simulated.remove(NODES, "a")
    simulated.settle()
    assert simulated.nodes_of() == ["b"]
    assert gone.name in simulated.claims(), "a pod mounts it"
    simulated.remove(PODS, f"chat-{gone.name}")
    simulated.fetch_all()
    assert simulated.nodes_of() == ["b", "c"]
    assert gone.name not in simulated.claims()


def test_fetch_on_a_deleted_node_is_given_up() -> None:
    simulated = simulate_service({"a": 1, "b": 1})
    simulated.schedule()
    simulated.remove(NODES, "a")
    simulated.settle()
    simulated.fetch_all()
    assert simulated.nodes_of() == ["b"]
    assert len(simulated.claims()) == 1


def test_while_no_node_is_known_nothing_is_concluded() -> None:
    simulated = make_two_copies()
    for node in "abc":
        simulated.remove(NODES, node)
    simulated.settle()
    assert simulated.nodes_of() == ["a", "b"]


def test_claim_that_somebody_deleted_is_no_copy() -> None:
    simulated = make_two_copies()
    lost = simulated.copies()[0]
    found = simulated.claims()[lost.name]
    leaving = {**found["metadata"], "deletionTimestamp": "2026-11-21T12:00:00Z"}
    simulated.put(PVCS, lost.name, **{**found, "metadata": leaving})
    simulated.settle()
    assert simulated.nodes_of() == ["b"]
    (other,) = (
        name for name, claim in simulated.claims().items() if name not in {lost.name, simulated.copies()[0].name}
    )
    assert other != lost.name, "the name may hold other weights while its volume is leaving"


def test_status_that_was_lost_is_found_again_without_another_claim() -> None:
    simulated = make_two_copies()
    copies, claims = simulated.copies(), simulated.claims()
    model = simulated.store.get(MODELS, "tiny", NAMESPACE)
    assert model is not None
    simulated.put(MODELS, "tiny", **{**model, "status": {**model["status"], "copies": []}})
    simulated.settle()
    simulated.fetch_all()
    assert (simulated.copies(), simulated.claims()) == (copies, claims)


def test_deployment_without_a_pod_keeps_its_copy_in_use() -> None:
    simulated = make_two_copies()
    first, second = simulated.copies()
    for copy in (first, second):
        simulated.remove(PODS, f"chat-{copy.name}")
    simulated.deploy(first.name)
    simulated.make_service(replicas=0)
    assert [bool(copy.unused_since) for copy in simulated.copies()] == [False, True]


def change_weights(simulated: SimulatedCopies) -> None:
    """Give the source another revision, which an inspection has found."""
    simulated.edit_model(refreshPolicy="OnChange")
    simulated.pass_time(hours=25)
    (check,) = simulated.jobs("inspect")
    simulated.end(check, 0, INSPECTED | {"revision": '"etag-2"'})
    simulated.settle()


def test_other_revision_is_fetched_beside_each_copy_that_pods_mount_though_its_devices_are_in_use() -> None:
    simulated = make_two_copies()
    earlier = simulated.copies()
    change_weights(simulated)
    assert simulated.copies() == earlier, "pods serve from them meanwhile"
    assert simulated.condition("Cached").status == "True"
    assert simulated.condition("VolumeChanging").reason == "VolumeReplaced"
    assert len(simulated.pending()) == 2
    simulated.schedule()
    simulated.finish()
    copies = simulated.copies()
    assert [copy.node for copy in copies] == ["a", "b"]
    assert not {copy.path for copy in copies} & {copy.path for copy in earlier}
    assert {copy.name for copy in earlier} < set(simulated.claims()), "pods mount them"
    for copy in copies:
        simulated.serve(copy.name)
    assert len(simulated.claims()) == 4, "the earlier pods are about to leave"
    for copy in copies:
        simulated.serve(copy.name, node=copy.node)
    for copy in earlier:
        simulated.remove(PODS, f"chat-{copy.name}")
    simulated.settle()
    assert set(simulated.claims()) == {copy.name for copy in copies}
    assert all(condition.type != "VolumeChanging" for condition in simulated.model().status.conditions)


def test_earlier_copy_stays_until_its_own_node_has_the_successor() -> None:
    simulated = make_two_copies()
    earlier = simulated.copies()
    change_weights(simulated)
    first, second = simulated.pending()
    simulated.schedule()
    simulated.end(first, 0, {"sizeBytes": 1})
    simulated.settle()
    assert simulated.nodes_of() == ["a", "b"]
    assert len([copy for copy in simulated.copies() if copy in earlier]) == 1
    assert simulated.pending() == [second]


@pytest.mark.parametrize("names_nodes", [True, False], ids=["made for the node", "made before"])
def test_edited_source_drops_the_earlier_copies_from_the_status(*, names_nodes: bool) -> None:
    simulated = make_two_copies(names_nodes=names_nodes)
    earlier = {copy.name for copy in simulated.copies()}
    simulated.edit_model(source=OTHER)
    assert len(simulated.copies()) == 2, "until the inspection shows whether the weights differ"
    simulated.end(simulated.jobs("inspect")[-1], 0, INSPECTED | {"file": "other.gguf"})
    simulated.settle()
    assert simulated.copies() == []
    assert simulated.condition("Cached").status == "False"
    assert earlier < set(simulated.claims())
    simulated.put(NODES, "c", namespace="")
    simulated.slots["c"] = 0
    simulated.fetch_all()
    assert simulated.nodes_of() == ["a", "b"], "though the devices of both are in use"
    for name in earlier:
        simulated.remove(PODS, f"chat-{name}")
    simulated.settle()
    assert not earlier & set(simulated.claims())


@pytest.mark.parametrize("cache", [{"size": "2Gi"}, {"storageClassName": "other"}], ids=["size", "class"])
def test_larger_size_and_another_class_get_a_successor_on_each_node(cache: dict[str, str]) -> None:
    simulated = make_two_copies(size="1Gi")
    earlier = simulated.copies()
    simulated.edit_model(cache={"scope": "node", "storageClassName": "local", "size": "1Gi"} | cache)
    simulated.end(simulated.jobs("inspect")[-1], 0, INSPECTED)
    simulated.settle()
    assert simulated.copies() == earlier
    simulated.schedule()
    simulated.finish()
    assert simulated.nodes_of() == ["a", "b"]
    assert not {copy.name for copy in simulated.copies()} & {copy.name for copy in earlier}
    for copy in earlier:
        simulated.remove(PODS, f"chat-{copy.name}")
    simulated.settle()
    assert len(simulated.claims()) == 2


def test_names_of_claims_fit_into_a_label() -> None:
    simulated = SimulatedCopies({"a": 1})
    long = "a" * 40 + "." + "b" * 30
    simulated.make_model(long)
    simulated.make_service(model=long, replicas=1)
    (name,) = simulated.claims(long)
    assert len(name) <= 63
    assert "--" not in name
    assert ".-" not in name
