"""The refusal that `kubectl port-forward` prints."""

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from tests.controlplane.kubelet import port_forward


async def test_spdy_of_kubectl_is_refused_with_the_address_of_the_pod() -> None:
    async def find_address(namespace: str, pod: str) -> str:
        assert (namespace, pod) == ("team", "chat-1")
        return "10.77.1.10"

    app = web.Application()
    app.router.add_post("/portForward/{namespace}/{pod}", port_forward.refuse_with(find_address))
    async with TestClient(TestServer(app)) as client:
        answer = await client.post("/portForward/team/chat-1", headers={"Upgrade": "SPDY/3.1", "Connection": "Upgrade"})
        assert answer.status == 501
        assert (await answer.json())["message"].endswith("ask the pod at its address 10.77.1.10")
