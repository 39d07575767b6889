"""The state of the connection is the last outcome of a call, and a single refused write is no refusal of the host."""

import pytest
from msgspec import structs

from kube.credentials import Credentials, StaticToken
from kube.errors import Unreachable
from kube.transport import Request
from metal_agent.cluster.api_connection import ApiConnection

LIST = Request("GET", "/apis/inference.pomona.dev/v1alpha1/metalprocesses")
LEASE = Request("PATCH", "/apis/coordination.k8s.io/v1/namespaces/pomona-metal-hosts/leases/studio-1")
SLICE = Request("PATCH", "/apis/discovery.k8s.io/v1/namespaces/team/endpointslices/chat.studio-1")


@pytest.fixture
def connection() -> ApiConnection:
    return ApiConnection(Credentials("https://192.0.2.1", StaticToken(None)))


def test_nothing_is_known_before_the_first_call(connection: ApiConnection) -> None:
    assert connection.status.state == "unreachable"
    assert connection.status.message == "no answer from https://192.0.2.1 yet"


@pytest.mark.parametrize("status", [200, 404, 409, 500])
def test_server_that_answers_is_connected(connection: ApiConnection, status: int) -> None:
    connection.note_answer(LIST, status)
    assert (connection.status.state, connection.status.message) == ("connected", "")


def test_token_that_is_not_accepted_is_refused(connection: ApiConnection) -> None:
    connection.note_answer(LIST, 401)
    assert connection.status.state == "refused"
    assert connection.status.message.endswith("(401): write a new token into the kubeconfig: it is read again")


def test_host_without_a_right_to_its_lease_is_refused(connection: ApiConnection) -> None:
    connection.note_answer(LEASE, 403)
    assert connection.status.state == "refused"
    connection.note_answer(SLICE, 403)
    assert connection.status.state == "refused", "another refusal does not show that the host is accepted"
    connection.note_answer(LEASE, 200)
    assert connection.status.message == ""


def test_refused_write_of_an_accepted_host_changes_nothing(connection: ApiConnection) -> None:
    connection.note_answer(LIST, 200)
    connection.note_answer(SLICE, 403)
    assert connection.status.state == "connected"


def test_time_is_that_of_the_last_change(connection: ApiConnection) -> None:
    connection.note_answer(LIST, 200)
    connection.status = structs.replace(connection.status, since="before")
    connection.note_answer(LIST, 200)
    assert connection.status.since == "before"
    connection.note_failure(Unreachable("GET /version: cut"))
    assert (connection.status.state, connection.status.message) == ("unreachable", "GET /version: cut")
    assert connection.status.since != "before"
