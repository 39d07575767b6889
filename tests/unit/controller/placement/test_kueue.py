"""The places of pods in Kueue's queues, by what its visibility API answered; and an API that fails, hangs or lies."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.placement.kueue import (
    MOST_SECONDS,
    PENDING,
    READ_SECONDS,
    STALE_SECONDS,
    TIMEOUT_SECONDS,
    KueuePlace,
    KueueQueues,
    KueueStanding,
    parse_pending,
)
from controller.reconcile.indexes import declare_indexes
from controller.reconcile.plan import Leading
from crds.meta import KUEUE_GATE, KUEUE_QUEUE_NAME, LABEL_SERVICE
from kube.client import Obj
from kube.errors import ApiError, Forbidden, NotFound, Unreachable
from kube.resources import INFERENCE_SERVICES, PODS, VISIBLE_QUEUES, ObjectKey, Resource
from kube.store import Store
from tests.controlplane.process import CHECKOUT
from tests.support import virtual_time
from tests.support.background import running

ANSWERS = Path(__file__).with_name("kueue_answers")


def read_answer(name: str) -> Any:
    """Return an answer of the real Kueue; README.md beside it says how it was recorded."""
    return json.loads((ANSWERS / name).read_text())


def waiting_pod(name: str, queue: str = "models", namespace: str = "team", **metadata: Any) -> Obj:
    """Return a pod of the service of this name that waits for Kueue."""
    labels = {LABEL_SERVICE: name, KUEUE_QUEUE_NAME: queue}
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", "labels": labels, **metadata},
        "spec": {"schedulingGates": [{"name": KUEUE_GATE}]},
    }


def pending(*names: str, ahead: int = 0) -> Obj:
    """Return an answer in which the pods of these services wait, in this order."""
    return {
        "items": [
            {
                "metadata": {
                    "name": f"pod-{name}",
                    "ownerReferences": [{"kind": "Pod", "name": name, "uid": f"uid-{name}"}],
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                },
                "priority": 0,
                "positionInLocalQueue": position,
                "positionInClusterQueue": position + ahead,
            }
            for position, name in enumerate(names)
        ]
    }


class VisibilityApi:
    """An API server with Kueue's behind it."""

    def __init__(self, answer: Callable[[], Obj]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str | None]] = []
        self.asked_at: list[float] = []
        self.hangs = False

    async def get_subresource(self, resource: Resource, name: str, namespace: str | None, subresource: str) -> Obj:
        assert (resource, subresource) == (VISIBLE_QUEUES, PENDING)
        self.asked.append((name, namespace))
        self.asked_at.append(asyncio.get_running_loop().time())
        if self.hangs:
            await asyncio.Event().wait()
        return self.answer()


class Cluster:
    """A store with pods, and the leader's queue."""

    def __init__(self, *pods: Obj, answer: Callable[[], Obj] = pending) -> None:
        self.store, self.enqueued, self.queues = Store(), list[str](), KueueQueues()
        declare_indexes(self.store)
        for pod in pods:
            self.store.put(PODS, pod)
        self.api = VisibilityApi(answer)
        self.leading = Leading(self.api, self.store, None, self.enqueue)  # type: ignore[arg-type] # what is used of them

    def enqueue(self, resource: Resource, key: ObjectKey) -> None:
        assert resource == INFERENCE_SERVICES
        self.enqueued.append(key.name)

    async def read(self) -> bool:
        return await self.queues.read_all(self.leading)

    def standing(self, service: str) -> KueueStanding:
        pods = [pod for pod in self.store.list(PODS) if pod["metadata"]["labels"][LABEL_SERVICE] == service]
        kueue_standing = self.queues.find_standing("team", pods)
        assert kueue_standing is not None
        return kueue_standing


def refuse(error: Exception) -> Callable[[], Obj]:
    def answer() -> Obj:
        raise error

    return answer


def test_positions_begin_with_one_and_pods_of_other_local_queues_count_as_ahead() -> None:
    cluster = Cluster(waiting_pod("chat"), waiting_pod("code"), answer=lambda: pending("chat", "code", ahead=3))
    assert not virtual_time.run(cluster.read())
    assert cluster.standing("code").place == KueuePlace(2, 4, "2026-01-01T00:00:00Z", "pod-code")
    assert cluster.standing("code").message == (
        "waiting in LocalQueue models of Kueue at position 2 of 2, with 4 ahead in its ClusterQueue: for the reason "
        "see `kubectl describe workload -n team pod-code`"
    )


def test_example_of_the_document_is_what_a_service_shows() -> None:
    document = (CHECKOUT / "docs" / "queue-kueue.md").read_text()
    place = KueuePlace(1, 0, "2026-01-01T00:00:00Z", "pod-code-58f7d7db84-pxs5l-0c255")
    standing = KueueStanding("team", "models", place, 1, "")
    assert f"{{.status.queue.message}}'\n{standing.message}\n" in document


def test_a_service_stands_where_its_first_pod_does() -> None:
    second = waiting_pod("chat-2") | {}
    second["metadata"]["labels"][LABEL_SERVICE] = "chat"
    cluster = Cluster(waiting_pod("chat"), second, answer=lambda: pending("other", "chat-2", "chat"))
    virtual_time.run(cluster.read())
    assert cluster.standing("chat").place == KueuePlace(2, 1, "2026-01-01T00:00:00Z", "pod-chat-2")


def test_a_pod_that_was_admitted_or_is_deleted_has_no_standing() -> None:
    admitted, deleted = (
        waiting_pod("chat") | {"spec": {}},
        waiting_pod("code", deletionTimestamp="2026-01-01T00:00:00Z"),
    )
    assert KueueQueues().find_standing("team", [admitted, deleted]) is None


def test_nothing_is_read_while_no_pod_waits() -> None:
    cluster = Cluster(waiting_pod("chat") | {"spec": {"nodeName": "n"}})
    assert not virtual_time.run(cluster.read())
    assert cluster.api.asked == []


def test_a_queue_is_read_once_for_all_its_services() -> None:
    pods = [waiting_pod(f"chat-{number}", queue=f"queue-{number % 2}") for number in range(20)]
    cluster = Cluster(*pods)
    virtual_time.run(cluster.read())
    assert cluster.api.asked == [("queue-0", "team"), ("queue-1", "team")]


def test_only_services_that_moved_are_enqueued() -> None:
    async def follow() -> None:
        cluster = Cluster(waiting_pod("chat"), waiting_pod("code"), answer=lambda: pending("chat", "code"))
        await cluster.read()
        assert sorted(cluster.enqueued) == ["chat", "code"]
        await cluster.read()
        assert len(cluster.enqueued) == 2
        cluster.api.answer = lambda: pending("code", "chat")
        await cluster.read()
        assert len(cluster.enqueued) == 4

    virtual_time.run(follow())


@pytest.mark.parametrize(
    "answer",
    [
        refuse(Unreachable("no connection")),
        refuse(Forbidden("get pendingworkloads", status=403)),
        refuse(ApiError("get pendingworkloads", status=503)),
        dict,
        lambda: {"items": [{"metadata": {}, "positionInLocalQueue": -1, "positionInClusterQueue": 0}]},
        lambda: {"items": "nonsense"},
    ],
)
def test_an_api_that_fails_leaves_the_last_places_for_a_while_and_the_other_queues_unread(
    answer: Callable[[], Obj],
) -> None:
    async def follow() -> None:
        cluster = Cluster(waiting_pod("chat"), waiting_pod("code", queue="other"), answer=lambda: pending("chat"))
        await cluster.read()
        cluster.api.answer, cluster.api.asked = answer, []
        assert await cluster.read()
        assert (len(cluster.api.asked), cluster.standing("chat").problem) == (1, "")
        await asyncio.sleep(STALE_SECONDS + 1)
        cluster.enqueued.clear()
        assert await cluster.read()
        assert cluster.standing("chat").place is None
        assert "does not answer" in cluster.standing("chat").message
        assert sorted(cluster.enqueued) == ["chat", "code"]

    virtual_time.run(follow())


def test_an_api_that_hangs_is_left_after_five_seconds_and_asked_less_and_less_often() -> None:
    async def follow() -> None:
        cluster = Cluster(waiting_pod("chat"), waiting_pod("code", queue="other"))
        cluster.api.hangs = True
        async with running(cluster.queues.run(cluster.leading)):
            await asyncio.sleep(600)
        pauses = [
            later - earlier for earlier, later in zip(cluster.api.asked_at, cluster.api.asked_at[1:], strict=False)
        ]
        assert pauses[0] <= TIMEOUT_SECONDS + READ_SECONDS * 1.2
        assert all(pause >= MOST_SECONDS * 0.8 for pause in pauses[4:])

    virtual_time.run(follow())


def test_a_local_queue_that_kueue_does_not_know_is_named_and_the_others_are_read() -> None:
    def answer() -> Obj:
        if cluster.api.asked[-1][0] == "absent":
            raise NotFound("get pendingworkloads", status=404)
        return pending("chat")

    cluster = Cluster(waiting_pod("lost", queue="absent"), waiting_pod("chat"), answer=answer)
    assert not virtual_time.run(cluster.read())
    assert cluster.standing("chat").place is not None
    assert "no LocalQueue absent in namespace team" in cluster.standing("lost").message


def test_a_pod_that_kueue_does_not_list_is_said_to_be_so() -> None:
    cluster = Cluster(waiting_pod("chat"))
    virtual_time.run(cluster.read())
    assert "kubectl get workloads -n team" in cluster.standing("chat").message


def test_before_the_first_answer_the_place_is_unknown() -> None:
    assert "has not been asked yet" in Cluster(waiting_pod("chat")).standing("chat").message


def test_answers_about_queues_in_which_nothing_waits_are_forgotten() -> None:
    async def follow() -> None:
        cluster = Cluster(waiting_pod("chat"), answer=lambda: pending("chat"))
        await cluster.read()
        cluster.store.put(PODS, waiting_pod("chat", resourceVersion="2") | {"spec": {}})
        await cluster.read()
        cluster.store.put(PODS, waiting_pod("chat", resourceVersion="3"))
        assert cluster.standing("chat").place is None

    virtual_time.run(follow())


def test_an_answer_without_positions_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="positionInClusterQueue"):
        parse_pending({"items": [{"metadata": {}}]})


def test_recorded_answer_has_the_pod_of_the_higher_priority_first() -> None:
    places = parse_pending(read_answer("two_pending.json"))
    waiting = read_answer("waiting_pod.json")
    assert [place.position for place in places.values()] == [1, 2]
    place = places[waiting["metadata"]["uid"]]
    assert (place.position, place.ahead) == (2, 1)
    assert place.workload.startswith("pod-second-")
    assert parse_pending(read_answer("second_of_two.json")) == {waiting["metadata"]["uid"]: place}


def test_recorded_pod_waits_in_the_queue_of_its_label() -> None:
    pod = read_answer("waiting_pod.json")
    pod["metadata"]["labels"][LABEL_SERVICE] = "second"
    cluster = Cluster(pod, answer=lambda: read_answer("two_pending.json"))
    virtual_time.run(cluster.read())
    standing = cluster.standing("second")
    assert standing.place is not None
    assert (standing.queue, standing.place.position, standing.length) == ("models", 2, 2)
