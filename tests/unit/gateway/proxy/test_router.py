"""The services that the router finds by the name of a model."""

import pytest

from gateway.proxy.errors import RequestError
from gateway.proxy.load_balancer import InFlight
from gateway.proxy.router import ModelRouter
from gateway.proxy.service import Service
from tests.unit.gateway.proxy.running_proxy import make_service


def test_table_of_models_is_built_for_a_configuration_and_not_for_a_request() -> None:
    services = {
        name: Service(make_service(name=name), InFlight(lambda _: None)) for name in ("a/chat", "b/chat", "a/code")
    }
    router = ModelRouter()
    router.configure(None, services)
    table = router.services()
    assert sorted(table) == ["a/chat", "b/chat", "code"]
    assert router.find_model("code") is router.find_model("a/code") is services["a/code"]
    with pytest.raises(RequestError):
        router.find_model("chat")
    assert router.services() is table
    del services["b/chat"]
    router.configure(None, services)
    assert router.find_model("chat") is services["a/chat"]
