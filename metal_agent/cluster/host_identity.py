"""The identity of a joined host: a token that renews itself, which all connections of the agent share.

The token is in `host-identity.json` of the state folder, for its owner only. A new one is on disk before it is used, so
that an agent that dies between any two lines has a token that is valid. When a token is refused the file is read again:
`pomona agent join` may have written another one meanwhile.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import structs

from artifacts import durable
from crds.meta import HOSTS_NAMESPACE
from devices.host import since_boot_seconds
from kube.backoff import Jitter, backoff_seconds
from kube.client import Client
from kube.credentials import Credentials, build_tls
from kube.errors import ApiError, Unreachable
from kube.kubeconfig import CredentialsError
from kube.service_accounts import GrantedToken, request_token

FILE_NAME: Final = "host-identity.json"
TOKEN_SECONDS: Final = 30 * 86400
"""Requested life of a token; a server may grant less."""
MOST_RENEWAL_SECONDS: Final = 86400.0
_LEAST_RENEWAL_SECONDS: Final = 60.0
_SPREAD: Final = Jitter(0.9, 1.0)
"""Hosts that an update or a power cut started at the same moment do not renew at the same moment for ever."""
_FIRST_RETRY_SECONDS: Final = 2.0
_UNWRITTEN_SECONDS: Final = 600.0
"""Longest time to the next renewal while the latest token is not on disk."""
_CHECK_SECONDS: Final = 60.0
"""Longest pause between two looks at the clock and between two tries: no pause ends while the machine sleeps."""

log = structlog.get_logger()


class JoinedHost(msgspec.Struct, frozen=True, rename="camel"):
    """The content of the file: this host, its cluster, and its token."""

    host: str
    server: str
    token: str
    expires_at: str
    """End of the life of the token by the server's clock, in RFC 3339."""
    authority: str = ""
    """PEM certificates that the server's certificate is checked against; empty: those of the system."""
    tls_server_name: str = ""

    def __repr__(self) -> str:
        return f"JoinedHost(host={self.host!r}, server={self.server!r}, expires_at={self.expires_at!r})"


def read_joined_host(folder: Path) -> JoinedHost | None:
    """Return the identity that `pomona agent join` wrote into the state folder, or None. Raises OSError."""
    return durable.read(folder / FILE_NAME, JoinedHost)


def write_joined_host(folder: Path, joined: JoinedHost) -> None:
    """Write the file. Raises OSError; then the one before is kept."""
    durable.write(folder / FILE_NAME, joined)


def renewal_seconds(lifetime_seconds: float) -> float:
    """Return the age at which a token is renewed at the latest: half of its life, at most a day."""
    return max(_LEAST_RENEWAL_SECONDS, min(lifetime_seconds / 2, MOST_RENEWAL_SECONDS))


def advise_rejoin(host: str) -> str:
    """Return the way out for a host whose identity the API server refuses."""
    return f"get a code by `pomona host join {host}` and give it to `pomona agent join` on this host"


class HostIdentity:
    """A `ClientIdentity` that renews its token.

    Args:
        folder: the state folder.
        joined: the content of its file.
        clock: seconds that also pass while the machine sleeps. The wall clock is not used: it may be wrong by years.
    """

    def __init__(self, folder: Path, joined: JoinedHost, clock: Callable[[], float] = since_boot_seconds) -> None:
        """Use the identity `joined`, as read from `folder`; its token is renewed at once by `keep_renewed`."""
        self._folder = folder
        self._joined = joined
        """The identity with the token in use; newer than the file if that could not be written."""
        self._on_disk = joined
        """The file as this agent last read or wrote it. With other content, `pomona agent join` has run since."""
        self._clock = clock
        # The age of a token on disk is unknown, since the wall clock may have been set: an agent renews when it starts.
        self._due_at = clock()
        """Time of the next renewal: now."""
        self._reported_token = ""
        """The last token whose refusal was logged."""
        self._lock = asyncio.Lock()  # held while the identity changes, by a renewal or a join
        self.renewal_problem = ""
        """Why the last renewal failed; empty if it did not."""

    @property
    def host(self) -> str:
        """Name of the host."""
        return self._joined.host

    @property
    def expires_at(self) -> str:
        """End of the life of the token by the server's clock, in RFC 3339."""
        return self._joined.expires_at

    @property
    def renews_at(self) -> datetime:
        """Time of the next renewal by this machine's clock."""
        return datetime.now(UTC) + timedelta(seconds=max(0.0, self._due_at - self._clock()))

    def credentials(self) -> Credentials:
        """Return the credentials of this host. Raises CredentialsError."""
        joined = self._joined  # host, cluster, and the token in use
        authority = joined.authority.encode() or None
        try:
            tls = build_tls(authority)
        except (OSError, ValueError) as error:
            raise CredentialsError(f"{self._folder / FILE_NAME}: authority: {error}: join again") from error
        return Credentials(joined.server, self, tls, joined.tls_server_name or None, authority=authority)

    async def authorization(self) -> str:
        """Return the header's value."""
        return f"Bearer {self._joined.token}"

    async def refresh(self, refused: str | None) -> bool:
        """Look for another token after a refusal; return True if there is one, so that the call is worth a retry.

        `refused` is the Authorization header that the API server did not accept. If it is still the current one, the
        file is read again: a join may have written another token. Logs the refusal of a token once. Raises
        CredentialsError.
        """
        async with self._lock:
            if await self.authorization() == refused:
                await self._adopt_joined()  # a join may have written another one
        header = await self.authorization()
        # _reported_token: the last one whose refusal was logged.
        if header == refused and self._reported_token != header:
            self._reported_token = header
            log.error("token_refused", host=self.host, expires_at=self.expires_at, advice=advise_rejoin(self.host))
        return header != refused

    async def renew(self, client: Client) -> None:
        """Use a new token, or one that a join wrote meanwhile. Raises ApiError, Unreachable and CredentialsError."""
        granted = await request_token(client, HOSTS_NAMESPACE, self.host, TOKEN_SECONDS)
        async with self._lock:
            if not await self._adopt_joined():  # else the token of the join counts, and the granted one is dropped
                await self._store(granted)
        log.info("token_renewed", host=self.host, expires_at=self.expires_at)

    async def keep_renewed(self, client: Client) -> None:
        """Renew the token for ever, at the start and then before it expires; failures are logged and tried again."""
        failures = 0
        while True:
            wait = self._due_at - self._clock()
            if wait <= 0:
                try:
                    await self.renew(client)
                except (ApiError, Unreachable, CredentialsError) as error:
                    failures, self.renewal_problem = failures + 1, str(error)
                    wait = backoff_seconds(failures, first=_FIRST_RETRY_SECONDS, most=_CHECK_SECONDS)
                    log.warning("token_renewal_failed", host=self.host, error=str(error))
                else:
                    failures, self.renewal_problem = 0, ""
                    continue  # `renew` has set `_due_at` anew
            await asyncio.sleep(min(wait, _CHECK_SECONDS))  # the machine may sleep: look at the clock often

    async def _adopt_joined(self) -> bool:
        """Use the identity that `pomona agent join` has written since, if any; return whether there is one.

        Raises:
            CredentialsError: the file cannot be read, or is that of another host or cluster.
        """
        try:
            written = await asyncio.to_thread(read_joined_host, self._folder)
        except OSError as error:
            raise CredentialsError(f"{self._folder / FILE_NAME}: {error}: make it readable for this user") from error
        # _joined: the identity in use; _on_disk: the file as this agent last read or wrote it
        is_our_own = written in (self._on_disk, self._joined)  # no join has written since
        if written is None or is_our_own:
            return False

        # Only the token, and the end of its life, may differ.
        with_our_token = structs.replace(written, token=self._joined.token, expires_at=self._joined.expires_at)
        if with_our_token != self._joined:  # host, server or authority differ
            raise CredentialsError(
                f"this machine has joined as host {written.host} at {written.server} since this agent started: restart "
                "the agent"
            )

        self._joined, self._on_disk, self._due_at = written, written, self._clock()
        log.info("token_read_again", host=self.host, expires_at=self.expires_at)
        return True

    async def _store(self, granted: GrantedToken) -> None:
        """Write the new token, use it, and set when to renew it: soon, if it cannot be written."""
        renewed = structs.replace(self._joined, token=granted.token, expires_at=granted.expires_at)
        try:
            await asyncio.to_thread(write_joined_host, self._folder, renewed)
        except OSError as error:
            # A full disk must not end an identity that the server has just renewed.
            log.warning("token_not_written", path=str(self._folder / FILE_NAME), error=str(error))
        else:
            self._on_disk = renewed
        self._joined = renewed

        age_seconds = renewal_seconds(granted.lifetime_seconds)  # at which the token is to be renewed
        is_written = self._on_disk is renewed  # False after an OSError above
        if not is_written:  # the older token on disk may expire long before this one
            age_seconds = min(age_seconds, _UNWRITTEN_SECONDS)
        # No back-off: only its jitter, so that hosts do not renew at the same moment.
        self._due_at = self._clock() + backoff_seconds(1, first=age_seconds, most=age_seconds, jitter=_SPREAD)
