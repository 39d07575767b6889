"""Logins of registries: which registry gets which, and where a password is never sent."""

import base64
import json

import pytest
from yarl import URL

from artifacts.errors import ArtifactError
from artifacts.repositories.registry_login import (
    RegistryLogin,
    api_host,
    find_login,
    may_get_password,
    parse_login,
    read_challenge,
    wants_basic,
)

PASSWORD = "pa:ss"


def _config(**auths: object) -> dict[str, bytes]:
    return {".dockerconfigjson": json.dumps({"auths": auths}).encode()}


def _entry(user: str, password: str = PASSWORD) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    ("registry", "realm", "allowed"),
    [
        ("https://registry-1.docker.io/v2/", "https://auth.docker.io/token", True),
        ("https://ghcr.io/v2/", "https://ghcr.io/token", True),
        ("https://registry.gitlab.com/v2/", "https://gitlab.com/jwt/auth", True),
        ("https://git.example.com:5050/v2/", "https://git.example.com/jwt/auth", True),
        ("http://127.0.0.1:5000/v2/", "http://127.0.0.1:5000/token", True),
        ("http://127.0.0.1:5000/v2/", "http://127.0.0.1:5001/token", False),
        ("https://10.0.0.1/v2/", "https://20.0.0.1/token", False),
        ("https://registry.example.com/v2/", "http://registry.example.com/token", False),
        ("https://registry.example.com/v2/", "https://evil.example/token", False),
        ("https://registry.example.com/v2/", "https://evilexample.com/token", False),
        ("https://example.com/v2/", "https://evil.com/token", False),
        ("https://example.co.uk/v2/", "https://evil.co.uk/token", False),
        ("https://registry.example.co.uk/v2/", "https://auth.example.co.uk/token", True),
        ("http://registry.example.com/v2/", "https://auth.example.com/token", False),
        ("https://localhost/v2/", "https://evil.localhost/token", False),
    ],
)
def test_password_goes_to_the_registrys_own_site_only(registry: str, realm: str, allowed: bool) -> None:
    assert may_get_password(URL(registry), URL(realm)) is allowed


@pytest.mark.parametrize(
    ("header", "realm", "service"),
    [
        ('Bearer realm="https://a.example/t",service="s",scope="x:y:push"', "https://a.example/t", "s"),
        ('bearer service="s, t" , realm="https://a.example/t?x=1"', "https://a.example/t?x=1", "s, t"),
        ('Basic realm="r", Bearer realm="https://a.example/t"', "https://a.example/t", ""),
        ('Bearer realm="https://user:pass@a.example/t"', "https://a.example/t", ""),
        (r'Bearer realm="https://a.example/t",service="a\"b"', "https://a.example/t", 'a"b'),
    ],
)
def test_challenge_names_the_server_of_tokens(header: str, realm: str, service: str) -> None:
    challenge = read_challenge([header])
    assert challenge is not None
    assert (str(challenge.realm), challenge.service) == (realm, service)


@pytest.mark.parametrize(
    "header",
    ["", "Basic realm=x", "Bearer", 'Bearer realm=""', 'Bearer realm="file:///etc/passwd"', 'Bearer realm="http://["'],
)
def test_challenge_without_a_server_is_none(header: str) -> None:
    assert read_challenge([header]) is None


def test_basic_is_recognized_beside_others() -> None:
    assert wants_basic(["Negotiate", 'Basic realm="x"'])
    assert wants_basic(['Bearer realm="https://a", basic'])
    assert not wants_basic(['Bearer realm="https://a/basic"', "Basically"])


def test_token_with_a_colon_is_a_user_with_a_password() -> None:
    assert parse_login("robot:pa:ss\n") == RegistryLogin("robot", "pa:ss")
    assert parse_login("eyJ.x.y") == RegistryLogin("", "eyJ.x.y")


@pytest.mark.parametrize(
    ("repo", "user"),
    [
        ("ghcr.io/acme/tiny", "ghcr"),
        ("ghcr.io/acme-other/tiny", "ghcr"),
        ("docker.io/acme/tiny", "hub"),
        ("index.docker.io/acme/tiny", "hub"),
        ("r.example:5000/team/tiny", "team"),
        ("r.example:5000/teams/tiny", "port"),
    ],
)
def test_docker_configuration_gives_a_login_to_its_own_registry(repo: str, user: str) -> None:
    data = _config(
        **{
            "ghcr.io": _entry("ghcr"),
            "https://index.docker.io/v1/": _entry("hub"),
            "https://r.example:5000": _entry("port"),
            "r.example:5000/team": _entry("team"),
        }
    )
    assert find_login(repo, data) == f"{user}:{PASSWORD}"


@pytest.mark.parametrize(
    "data",
    [
        _config(),
        _config(**{"ghcr.io": _entry("ghcr")}),
        _config(**{"r.example": {"auth": "!"}}),
        _config(**{"r.example": {"identitytoken": "x"}}),
        {".dockerconfigjson": b"not json, but password"},
    ],
)
def test_docker_configuration_without_the_registry_is_refused(data: dict[str, bytes]) -> None:
    with pytest.raises(ArtifactError) as caught:
        find_login("r.example/acme/tiny", data)
    assert caught.value.reason == "SourceUnauthorized"
    assert "kubectl create secret docker-registry" in caught.value.message
    assert "but password" not in caught.value.message


def test_other_keys_of_a_secret_are_a_login() -> None:
    assert find_login("r.example/a", {"username": b"u", "password": b"p\n", "token": b"t"}) == "u:p"
    assert find_login("r.example/a", {"token": b"t\n"}) == "t"
    assert find_login("r.example/a", {"password": b"p"}) is None
    with pytest.raises(ArtifactError, match="not UTF-8"):
        find_login("r.example/a", {"token": b"\xff"})


def test_docker_hub_has_an_api_of_another_name() -> None:
    assert api_host("docker.io") == "registry-1.docker.io"
    assert api_host("ghcr.io") == "ghcr.io"
