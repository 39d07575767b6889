"""The options of `pomona up` about its clients: what they say, and what is refused before anything starts."""

from pathlib import Path

import pytest

from crds.gatewaykey import digest_key
from gateway.proxy.config import RouterKey
from standalone.client_access import (
    ApiKey,
    ClientAccess,
    parse_address,
    parse_api_keys,
    parse_host,
    parse_origin,
    read_api_keys,
)

SECRET = "0123456789abcdef"
KEY = ApiKey("phone", SECRET)


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("[::1]", "::1"), ("192.168.1.5", "192.168.1.5"), ("FE80::1", "fe80::1")],
)
def test_address_is_one_of_a_machine(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "localhost", "*", "127.0.0.1:8080", "fe80::1%eth0", "1.2.3"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an address: give one of this machine, or 0\.0\.0\.0"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Host.Docker.internal", "host.docker.internal"),
        ("my_host", "my_host"),
        ("192.168.65.254", "192.168.65.254"),
        ("FE80:0::1", "[fe80::1]"),
        ("[::2]", "[::2]"),
    ],
)
def test_host_is_as_clients_send_it(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "*", "a:80", "http://a", "a/b", "a b", ".a", "a\n", "\u00e4", "*.local"])
def test_other_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="without a port, such as"):
        parse_host(text)


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://Chat.example/", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://localhost:80", "http://localhost"),
        ("https://localhost:80", "https://localhost:80"),
        ("tauri://localhost", "tauri://localhost"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("*", "*"),
    ],
)
def test_origin_is_as_browsers_send_it(text: str, origin: str) -> None:
    assert parse_origin(text) == origin


@pytest.mark.parametrize(
    "text", ["", "null", "chat.example", "https://a/b", "https://*.a", "https://a,https://b", "https://a\n"]
)
def test_other_origins_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="without a path, such as"):
        parse_origin(text)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.5"])
def test_address_beyond_this_machine_needs_a_key(address: str) -> None:
    with pytest.raises(ValueError, match=rf"^--listen {address}: .* --api-key FILE; write a line NAME KEY"):
        ClientAccess(address=address)
    assert ClientAccess(address=address, keys=(KEY,)).keys


def test_pages_of_every_origin_need_a_key() -> None:
    with pytest.raises(ValueError, match=r"^--allow-origin '\*': any web page could ask: give keys"):
        ClientAccess(origins=("*",))


def test_proxy_gets_digests_of_the_keys() -> None:
    access = ClientAccess(address="0.0.0.0", keys=(KEY,), hosts=("a",), origins=("*",))
    listener = access.build_listener(80)
    assert (listener.address, listener.port) == ("0.0.0.0", 80)
    assert listener.keys == (RouterKey("phone", digest_key(SECRET)),)
    assert (listener.allowed_hosts, listener.allowed_origins) == (("a",), ("*",))
    assert SECRET not in f"{access}{listener}"


@pytest.mark.parametrize(
    ("access", "described"),
    [
        (ClientAccess(), "http://127.0.0.1:80/v1"),
        (ClientAccess(address="::1"), "http://[::1]:80/v1"),
        (ClientAccess(keys=(KEY,)), "http://127.0.0.1:80/v1, with a key"),
        (ClientAccess(address="192.168.1.5", keys=(KEY,)), "http://192.168.1.5:80/v1, with a key"),
        (
            ClientAccess(address="0.0.0.0", keys=(KEY,)),
            "http://127.0.0.1:80/v1 and port 80 of every IPv4 address here, with a key",
        ),
        (
            ClientAccess(address="::", keys=(KEY,)),
            "http://[::1]:80/v1 and port 80 of every IPv6 address here, with a key",
        ),
    ],
)
def test_endpoint_is_described_for_its_clients(access: ClientAccess, described: str) -> None:
    assert access.describe(80) == described


# Files of keys


def test_file_has_lines_with_a_name_and_a_key() -> None:
    text = f"# of the family\n\nphone {SECRET}\n  laptop.2\tsk-=:{SECRET}  \r\n"
    assert parse_api_keys(text, "keys") == (KEY, ApiKey("laptop.2", f"sk-=:{SECRET}"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# none\n", "^keys has no key: write a line NAME KEY"),
        (f"#\n{SECRET}{SECRET}\n", "^keys:2: this is not a name and a key: write a line NAME KEY"),
        (f"phone {SECRET} x", "^keys:1: this is not a name and a key"),
        (f"my/phone {SECRET}", "^keys:1: the name has other characters"),
        (f"{'a' * 64} {SECRET}", "^keys:1: the name has other characters"),
        (f"phone {SECRET}\u00e9", "^keys:1: the key has other characters"),
        (f"phone {'k' * 513}", "^keys:1: the key has other characters"),
        ("phone 123456789012345", "^keys:1: the key has less than 16 characters"),
        (f"phone {SECRET}\n#\nphone x{SECRET}", "^keys:3: the name is that of line 1: each has its own"),
        (f"phone {SECRET}\nlaptop {SECRET}", "^keys:2: the key is that of line 1: each has its own"),
        ("".join(f"n{number} {SECRET}{number}\n" for number in range(1001)), "^keys has 1001 keys, more than 1000"),
    ],
)
def test_line_that_is_no_key_is_named_and_not_quoted(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        parse_api_keys(text, "keys")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_file_that_others_may_use_is_refused_with_the_way_out(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(f"phone {SECRET}\n")
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"^{path} has mode {mode:04o}, .*: chmod 600 {path}$"):
        read_api_keys(str(path))
    path.chmod(0o600)
    assert read_api_keys(str(path)) == (KEY,)


def test_large_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("#" * ((1 << 20) + 1))
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is larger than 1 MiB"):
        read_api_keys(str(path))


@pytest.mark.parametrize("key", ["sk-secret", "k" * 300])
def test_key_in_place_of_a_file_is_refused_and_not_quoted(key: str) -> None:
    with pytest.raises(ValueError, match="give a file of keys, and no key, which other users would see") as refused:
        read_api_keys(key)
    assert key not in str(refused.value)
