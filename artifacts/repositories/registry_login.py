"""Logins for registries: which one a registry gets, and where its password may go.

A registry that wants a token names the server that issues it (the realm). A password is sent there only if that server
is the registry itself, or belongs to it as far as names can tell; the scope is ours, so that no registry can ask for
more than reading the repository of the source. A login of a Docker configuration goes to its own registry only.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from yarl import URL

from artifacts.errors import ArtifactError
from artifacts.repositories.address_policy import find_stated_address
from artifacts.source import TOKEN_VARIABLE

SECRET_VARIABLE: Final = "POMONA_SOURCE_SECRET"  # noqa: S105 - a name
"""Environment variable with the folder in which a Job has the keys of its Secret as files."""
CONFIG_VARIABLE: Final = "DOCKER_CONFIG"
"""Environment variable with the folder of a user's config.json, as Docker's own clients take it."""
DOCKER_HUB: Final = "docker.io"
DOCKER_CONFIG_KEY: Final = ".dockerconfigjson"
USERNAME_KEY: Final = "username"
PASSWORD_KEY: Final = "password"  # noqa: S105 - a key
TOKEN_KEY: Final = "token"  # noqa: S105 - a key
SECRET_KEYS: Final = (DOCKER_CONFIG_KEY, USERNAME_KEY, PASSWORD_KEY, TOKEN_KEY)
_HUB_NAMES: Final = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_HUB_API: Final = "registry-1.docker.io"
_SHARED_ENDINGS: Final = frozenset({"ac", "co", "com", "edu", "gov", "net", "org"})
"""Second-level names under which countries register, so that two names below one have nothing in common."""
_PARAMETER: Final = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+))', re.ASCII)
_SCHEME: Final = re.compile(r"(?:^|,)\s*(?P<scheme>bearer|basic)(?=\s|$)", re.ASCII | re.IGNORECASE)


class RegistryLogin(NamedTuple):
    """A user's password, or a bearer token that the registry takes as it is (then `user` is empty)."""

    user: str
    secret: str

    @property
    def basic(self) -> str:
        """The Authorization header with user and password."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


class TokenChallenge(NamedTuple):
    """The server that issues tokens for a registry."""

    realm: URL
    service: str


class _Entry(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    registrytoken: str = ""


class _DockerConfig(msgspec.Struct):
    auths: dict[str, _Entry] = {}


def parse_login(text: str) -> RegistryLogin:
    """Return the login in the text of a token: USER:PASSWORD, or a bearer token, which has no colon."""
    user, colon, password = text.strip().partition(":")
    return RegistryLogin(user, password) if colon else RegistryLogin("", user)


def format_login(login: RegistryLogin) -> str:
    """Return the text that `parse_login` reads."""
    return f"{login.user}:{login.secret}" if login.user else login.secret


def find_login(repo: str, data: Mapping[str, bytes]) -> str | None:
    """Return the login for REGISTRY/REPOSITORY from the keys of a Secret, or None if the Secret has none.

    A login is one text: USER:PASSWORD, or a bearer token.

    Raises:
        ArtifactError: SourceUnauthorized; a key cannot be read, or the Docker configuration has no such registry.
    """
    # A Docker configuration has logins of several registries.
    if DOCKER_CONFIG_KEY in data:
        login = _find_in_config(repo, data[DOCKER_CONFIG_KEY])
        if login is None:
            registry = repo.partition("/")[0]
            raise ArtifactError(
                "SourceUnauthorized",
                f"{repo}: the Docker configuration has no user with a password for {registry}: make it with kubectl "
                f"create secret docker-registry NAME --docker-server={registry} --docker-username=USER "
                "--docker-password=PASSWORD",
            )
        return format_login(login)

    # Else the Secret has at most one login: user and password, or a token.
    try:
        texts = {key: data[key].decode().strip() for key in (USERNAME_KEY, PASSWORD_KEY, TOKEN_KEY) if key in data}
    except UnicodeDecodeError as error:
        raise ArtifactError("SourceUnauthorized", f"{repo}: the login is not UTF-8: write it again") from error
    if texts.get(USERNAME_KEY) and texts.get(PASSWORD_KEY):
        return format_login(RegistryLogin(texts[USERNAME_KEY], texts[PASSWORD_KEY]))
    return texts.get(TOKEN_KEY) or None


def read_environment(repo: str, environment: Mapping[str, str]) -> str | None:
    """Return the login for REGISTRY/REPOSITORY that the environment of a command gives, or None.

    A login is one text: USER:PASSWORD, or a bearer token. The first of these that is set is used: the files of a Job's
    Secret, the token variable, Docker's configuration.

    Raises:
        ArtifactError: SourceUnauthorized; the login cannot be read.
    """
    try:
        # The files of a Secret that is mounted in a Job, of those keys that it has.
        if secret := environment.get(SECRET_VARIABLE):
            files = [(key, Path(secret) / key) for key in SECRET_KEYS]
            return find_login(repo, {key: path.read_bytes() for key, path in files if path.is_file()})
        # A login in the variable itself.
        if token := environment.get(TOKEN_VARIABLE):
            return token
        # The folder with the configuration of Docker.
        if folder := environment.get(CONFIG_VARIABLE):
            login = _find_in_config(repo, (Path(folder) / "config.json").read_bytes())
            return format_login(login) if login else None
    except OSError as error:
        raise ArtifactError("SourceUnauthorized", f"{repo}: the login cannot be read: {error}") from error
    return None


def _find_in_config(repo: str, text: bytes) -> RegistryLogin | None:
    """Return the login for a repository from the text of a Docker configuration.

    None: it has no entry for the repository or its registry, or none with a complete login. Raises ArtifactError.
    """
    try:
        config = msgspec.json.decode(text, type=_DockerConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The error could quote the password.
        raise ArtifactError(
            "SourceUnauthorized",
            f"{repo}: the Docker configuration in {DOCKER_CONFIG_KEY} is not valid: make it with kubectl create secret "
            "docker-registry",
        ) from None

    wanted = _config_name(repo)
    # As kubelets choose: the entry with the longest matching path, so that of the repository before that of its
    # registry. A path matches if the repository is the same or below it.
    matching = [name for name in config.auths if f"{wanted}/".startswith(f"{_config_name(name)}/")]
    for name in sorted(matching, key=lambda entry: len(_config_name(entry)), reverse=True):
        if login := _read_entry(config.auths[name]):
            return login
    return None


def _config_name(text: str) -> str:
    """Return REGISTRY or REGISTRY/PATH for a key of `auths`, such as https://index.docker.io/v1/.

    Scheme and version of the API are left out, and each name of Docker Hub becomes docker.io.
    """
    bare = re.sub(r"^https?://", "", text).rstrip("/")
    host, _, path = bare.partition("/")
    path = "" if path in ("v1", "v2") else path
    host = DOCKER_HUB if host in _HUB_NAMES else host
    return f"{host}/{path}" if path else host


def _read_entry(entry: _Entry) -> RegistryLogin | None:
    """Return the login of an entry of `auths`; None if it is incomplete or not valid."""
    if entry.registrytoken:  # a bearer token, which has no user
        return RegistryLogin("", entry.registrytoken)
    user, password = entry.username, entry.password
    if entry.auth:
        try:
            user, _, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
    return RegistryLogin(user, password) if user and password else None


def api_host(registry: str) -> str:
    """Return the host that serves the API of a registry: that of Docker Hub has another name."""
    return _HUB_API if registry in _HUB_NAMES else registry


def wants_basic(challenges: Iterable[str]) -> bool:
    """Return whether a registry takes a user and password itself."""
    return any(scheme.lower() == "basic" for text in challenges for scheme in _SCHEME.findall(text))


def read_challenge(challenges: Iterable[str]) -> TokenChallenge | None:
    """Return the token server, or realm, that the WWW-Authenticate headers of a registry name.

    A header has one or more challenges, each a scheme with parameters: Bearer realm="URL",service="NAME". None: no
    challenge asks for a bearer token, or the first that does names no http(s):// URL.
    """
    for text in challenges:
        for match in _SCHEME.finditer(text):
            if match["scheme"].lower() != "bearer":
                continue

            # _PARAMETER matches NAME="VALUE", in which a backslash escapes the next letter, or NAME=VALUE.
            parameters = {
                key.lower(): re.sub(r"\\(.)", r"\1", quoted) or plain
                for key, quoted, plain in _PARAMETER.findall(text[match.end() :])
            }

            # The realm must be the URL of a web server.
            try:
                realm = URL(parameters.get("realm", ""))
                realm.origin()
            except ValueError:
                return None
            if realm.scheme not in ("http", "https") or not realm.host:
                return None
            return TokenChallenge(realm.with_user(None).with_fragment(None), parameters.get("service", ""))
    return None


def may_get_password(registry: URL, realm: URL) -> bool:
    """Decide whether a password for `registry` may be sent to `realm`, the token server that the registry names.

    It may be sent:
    - to the registry's own origin;
    - over https to the registry's own host;
    - over https, from a registry with https, to a host in the registry's parent domain (auth.docker.io for
      registry-1.docker.io), unless strangers share that domain, as in com or co.uk.

    Docker sends passwords anywhere; then whoever can change one answer of a registry, or of a proxy before it, reads
    them elsewhere.
    """
    if realm.origin() == registry.origin():
        return True
    realm_host, registry_host = (realm.raw_host or "").lower(), (registry.raw_host or "").lower()
    if realm.scheme != "https" or not realm_host:
        return False
    if realm_host == registry_host:
        return True
    if registry.scheme != "https":
        return False

    # The parent of the registry's name must be its own domain, and neither like com nor like co.uk.
    parent_labels = registry_host.split(".")[1:]
    is_shared = len(parent_labels) == 2 and parent_labels[0] in _SHARED_ENDINGS  # noqa: PLR2004
    if find_stated_address(registry_host) is not None or len(parent_labels) <= 1 or is_shared:
        return False
    parent = ".".join(parent_labels)
    return realm_host == parent or realm_host.endswith(f".{parent}")
