"""The clients of a real `pomona up`: with keys, from containers, other machines and web pages."""

import asyncio
import re
from pathlib import Path

import aiohttp
import openai
import psutil
import pytest

from gateway.proxy.control_client import ProxyClient
from tests.support.eventually import eventually
from tests.support.tiny_models import tiny_gguf
from tests.support.up_command import CALL, Start, ask

PHONE, LAPTOP = "key-of-the-phone-1", "key-of-the-laptop-2"
PAGE = "https://chat.example"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# of the family\nphone {PHONE}\nlaptop {LAPTOP}\n")
    path.chmod(0o600)
    return path


async def ask_with(url: str, key: str, **headers: str) -> str:
    """Ask by OpenAI's library; return the answer, or the code of the error."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, default_headers=headers) as client:
        try:
            answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
        except openai.APIStatusError as error:
            return str(error.code)
        return answer.choices[0].message.content or ""


async def get_status(url: str, **headers: str) -> int:
    async with (
        aiohttp.ClientSession(timeout=CALL, headers=headers) as session,
        session.get(f"{url}/v1/models") as response,
    ):
        return response.status


def list_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine beside loopback; there may be none."""
    addresses = [address for card in psutil.net_if_addrs().values() for address in card]
    return [address.address for address in addresses if address.family.name == "AF_INET"]


async def test_clients_with_a_key_are_served_at_every_address(start: Start, weights: Path, keys: Path) -> None:
    up = start("--model", str(weights), "--listen", "0.0.0.0", "--api-key", str(keys))
    url = await up.url()
    await up.says("tiny: Ready")
    port = url.rpartition(":")[2]
    assert f"OpenAI endpoint: {url}/v1 and port {port} of every IPv4 address here, with a key" in up.said
    for address in {*list_addresses(), "127.0.0.1", "127.0.0.2"}:
        assert await ask_with(f"http://{address}:{port}", PHONE) == tiny_gguf.SENTENCE
        assert await ask_with(f"http://{address}:{port}", "wrong") == "invalid_api_key"
    assert (await ask(url, "tiny"))[0] == 401

    metrics = (await ProxyClient(up.state / "proxy" / "control.sock").metrics()).decode()
    assert re.search(
        r'pomona_proxy_key_requests_total\{key="phone",namespace="default",service="tiny"\} \d+\.0', metrics
    )

    def read_state() -> str:
        kept = "".join(path.read_text(errors="replace") for path in up.state.rglob("*") if path.is_file())
        return kept if '"key":"phone"' in kept else ""

    assert PHONE not in await eventually(read_state) + up.said + metrics
    shown = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any(PHONE in line for line in shown)


async def test_killed_up_is_followed_by_one_with_other_clients(start: Start, weights: Path, keys: Path) -> None:
    """The proxy is adopted, and serves by the earlier options meanwhile."""
    first = start("--model", str(weights), "--api-key", str(keys), "--allow-origin=*")
    url = await first.url()
    await first.says("tiny: Ready")
    port = int(url.rpartition(":")[2])
    await first.process.kill()
    assert await ask_with(url, PHONE) == tiny_gguf.SENTENCE
    assert (await ask(url, "tiny"))[0] == 401

    # The key of the laptop alone, at every address.
    await asyncio.to_thread(keys.write_text, f"laptop {LAPTOP}\n")
    second = start("--model", str(weights), "--api-key", str(keys), "--listen=0.0.0.0", port=port)
    second.process.log.write_text("")
    assert await second.url() == url
    await second.says("tiny: Ready")
    assert await ask_with(url, LAPTOP) == tiny_gguf.SENTENCE
    assert await ask_with(f"http://127.0.0.2:{port}", LAPTOP) == tiny_gguf.SENTENCE
    assert await ask_with(url, PHONE) == "invalid_api_key"
    await second.process.kill()

    # No key, at loopback again.
    third = start("--model", str(weights), "--allow-host=host.docker.internal", f"--allow-origin={PAGE}", port=port)
    third.process.log.write_text("")
    assert await third.url() == url
    await third.says("tiny: Ready")
    assert await ask_with(url, "any", Host=f"host.docker.internal:{port}", Origin=PAGE) == tiny_gguf.SENTENCE
    assert await get_status(url, Host="other.docker.internal") == 403
    with pytest.raises(aiohttp.ClientConnectorError):
        await get_status(f"http://127.0.0.2:{port}")


async def test_question_is_asked_with_a_key(start: Start, weights: Path, keys: Path) -> None:
    up = start("--model", str(weights), "--listen=::1", "--api-key", str(keys), "--ask", "Who are you?")
    up.process.start()
    assert await up.ends() == 0, up.said
    assert tiny_gguf.SENTENCE in up.said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--listen=0.0.0.0",), "--listen 0.0.0.0: other machines reach it: give keys by --api-key FILE; write a line"),
        (("--allow-origin=*",), "--allow-origin '*': any web page could ask: give keys by --api-key FILE"),
        (("--api-key=sk-secret",), "Invalid value for '--api-key': cannot read this file"),
        (("--listen=studio.local",), "Invalid value for '--listen': 'studio.local' is not an address"),
        (("--allow-host=http://a",), "Invalid value for '--allow-host': 'http://a' is not the name of a host"),
        (("--allow-origin=chat.example",), "Invalid value for '--allow-origin': 'chat.example' is not an origin"),
    ],
)
async def test_clients_that_cannot_be_served_are_refused_before_anything_starts(
    start: Start, weights: Path, arguments: tuple[str, ...], says: str
) -> None:
    up = start("--model", str(weights), *arguments)
    up.process.start()
    assert await up.ends() == 2
    assert says in " ".join(up.said.split())
    assert not up.state.exists()


async def test_address_of_another_machine_is_refused_with_the_way_out(start: Start, weights: Path, keys: Path) -> None:
    up = start("--model", str(weights), "--listen=192.0.2.1", "--api-key", str(keys))
    up.process.start()
    assert await up.ends() == 1
    assert re.search(
        r"no endpoint: Cannot assign .*192\.0\.2\.1.*, or an address of this machine with --listen", up.said
    )
