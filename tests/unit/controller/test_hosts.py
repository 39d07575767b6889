import base64

from controller import hosts
from controller.hosts import HostFacts, SecretKey, needed_secrets
from controller.lives import Life
from controller.plan import Key, Plan, Snapshot
from crds.meta import HOSTS_NAMESPACE
from kube.client import Obj
from kube.resources import ENDPOINT_SLICES, METAL_HOSTS, METAL_PROCESSES, SECRETS
from tests.serving import NOW, host, process, slice_of, store, told

KEY = Key("", "studio-1")
TOKENS = {"team_chat-token_token": base64.b64encode(b"secret").decode()}


def plan(life: Life, *slices: Obj, observed: Obj | None = None) -> Plan:
    known = store(
        (METAL_HOSTS, observed or host("studio-1")),
        (METAL_PROCESSES, process("a-b-0", host="studio-1")),
        *((ENDPOINT_SLICES, each) for each in slices),
    )
    return hosts.decide(Snapshot(known, NOW, HostFacts(life, TOKENS)), KEY)


def test_a_living_host_is_ready_and_keeps_its_endpoints() -> None:
    done = plan("Alive", slice_of("chat", "studio-1"))
    assert told(done, "Ready")["status"] == "True"
    assert done.delete == ()
    assert done.status is not None
    assert set(done.status) == {"conditions"}, "everything else is the agent's"


def test_an_expired_host_loses_its_own_endpoints_only() -> None:
    foreign = slice_of("chat", "studio-1")
    foreign["metadata"] |= {"name": "other.studio-1", "labels": {"kubernetes.io/service-name": "other"}}
    done = plan("Expired", slice_of("chat", "studio-1"), slice_of("chat", "studio-2"), foreign)
    assert [each.name for each in done.delete] == ["chat.studio-1"]
    ready = told(done, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "LeaseExpired")
    assert "studio-1" in ready["message"]
    assert [event.reason for event in done.events] == ["LeaseExpired"]


def test_what_is_not_known_yet_changes_nothing() -> None:
    ready = told(plan("Unproven", slice_of("chat", "studio-1")), "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "LeaseRenewed")
    new = host("studio-1")
    new["status"]["conditions"] = []
    assert told(plan("Unproven", observed=new), "Ready")["status"] == "Unknown"


def test_the_endpoints_of_a_host_that_is_not_registered_go_when_its_lease_expires() -> None:
    known = store((ENDPOINT_SLICES, slice_of("chat", "studio-1")))
    assert hosts.decide(Snapshot(known, NOW, HostFacts("Unproven", {})), KEY) == Plan()
    done = hosts.decide(Snapshot(known, NOW, HostFacts("Expired", {})), KEY)
    assert [each.name for each in done.delete] == ["chat.studio-1"]
    assert done.status is None


def test_the_secret_of_a_host_is_written_as_a_whole_and_goes_with_it() -> None:
    ((resource, secret),) = plan("Alive").apply
    assert resource == SECRETS
    assert (secret["metadata"]["namespace"], secret["metadata"]["name"]) == (HOSTS_NAMESPACE, "studio-1")
    assert secret["data"] == TOKENS
    assert secret["metadata"]["ownerReferences"][0]["kind"] == "MetalHost"


def test_a_host_needs_the_tokens_of_what_is_bound_to_it() -> None:
    processes = [
        process("a-b-0", host="studio-1", sourceSecret="hub"),
        process("a-b-1", host="studio-1"),
        process("c-d-0", host="studio-2", tokenSecret="other-token"),
        process("e-f-0", tokenSecret="unbound-token"),
    ]
    found = needed_secrets("studio-1", processes)
    assert found == [SecretKey("team", "chat-token"), SecretKey("team", "hub")]
    assert [each.data_key for each in found] == ["team_chat-token_token", "team_hub_token"]
