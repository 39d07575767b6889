"""The certificate of the preflight webhook in its Secret, and the trust in it in the webhook's configuration.

Every replica reads the Secret and serves the certificate that is due; the leader renews it, and writes into the
configuration what API servers must know. Both objects come with the chart, and go with it. The leader makes a Secret
again that was deleted, but no configuration: deleting that turns the webhook off. Both are read twice a minute and not
watched, because a right to watch Secrets is one to list them.
"""

import asyncio
import base64
import contextlib
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from controller.preflight.webhook_certificates import (
    WebhookCertificate,
    choose_certificate,
    decode_certificates,
    encode_certificates,
    make_certificate,
    plan_certificates,
)
from controller.reconcile.plan import FIELD_MANAGER, Leading
from crds.meta import CONTROLLER_NAMESPACE
from kube.client import Client, Obj
from kube.errors import ApiError, NotFound, Unreachable
from kube.resources import SECRETS, WEBHOOK_CONFIGURATIONS

NAME: Final = "pomona-preflight"
"""Name of the Service, of the Secret, and of the configuration of the webhook."""
WEBHOOK: Final = "preflight.inference.pomona.dev"
DNS_NAME: Final = f"{NAME}.{CONTROLLER_NAMESPACE}.svc"
"""Name by which API servers ask, and which the certificate must have."""
DATA_KEY: Final = "certificates"
"""Key of the Secret."""
PATH: Final = "/preflight/"
READ_SECONDS: Final = 30.0
"""Pause between two reads of the Secret and of the configuration."""
_PRECONDITIONS: Final = frozenset({"uid", "resourceVersion"})

log = structlog.get_logger()


class CertificateKeeper:
    """The certificate that this replica serves.

    Args:
        clock: returns the time.
    """

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For the listener: it has the certificate that is due, also after a change."""
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.loaded = asyncio.Event()
        """Set once there is a certificate."""
        self._tokens: frozenset[str] = frozenset()
        self._served: WebhookCertificate | None = None
        self._renewed = asyncio.Event()
        self._problems: dict[str, str] = {}
        """The last problem of each task."""

    def knows_path(self, path: str) -> bool:
        """Return whether a path is one at which API servers ask."""
        return path.startswith(PATH) and path.removeprefix(PATH) in self._tokens

    async def follow(self, client: Client) -> None:
        """Serve for ever the certificate that is due."""
        while True:
            self._renewed.clear()
            try:
                stored = _read_certificates(await client.get(SECRETS, NAME, CONTROLLER_NAMESPACE))
            except (ApiError, Unreachable) as error:
                self._report("follow", error)
            else:
                self._serve(stored)
                self._problems.pop("follow", None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_SECONDS):
                    await self._renewed.wait()

    async def renew(self, leading: Leading) -> None:
        """Keep Secret and configuration up to date, for ever."""
        while True:
            try:
                await self._renew_once(leading)
                self._problems.pop("renew", None)
            except (ApiError, Unreachable) as error:
                self._report("renew", error)
            await asyncio.sleep(READ_SECONDS)

    async def _renew_once(self, leading: Leading) -> None:
        secret = await _read_secret(leading.client)
        stored, now = _read_certificates(secret), self._clock()
        planned = plan_certificates([each for each in stored if _is_usable(each)], now, _make)
        if planned != stored:
            metadata = {"name": NAME, "namespace": CONTROLLER_NAMESPACE}
            # Nothing is overwritten that another leader has stored since.
            metadata |= {key: each for key, each in secret.get("metadata", {}).items() if key in _PRECONDITIONS}
            data = {DATA_KEY: base64.b64encode(encode_certificates(planned)).decode()}
            leading.require_leadership()
            body = {"metadata": metadata, "type": "Opaque", "data": data}
            await leading.client.apply(SECRETS, body, field_manager=FIELD_MANAGER)
            log.info("preflight_certificate_renewed", expires=planned[-1].expires_at.isoformat())
            self._renewed.set()
        configuration = await leading.client.get(WEBHOOK_CONFIGURATIONS, NAME)
        if (wanted := plan_configuration(configuration, planned, now)) is not None:
            leading.require_leadership()
            await leading.client.apply(WEBHOOK_CONFIGURATIONS, wanted, field_manager=FIELD_MANAGER)
            log.info("preflight_configured", certificates=len(planned))

    def _serve(self, stored: Sequence[WebhookCertificate]) -> None:
        """Serve the certificate that is due; without a usable one, the last stays."""
        usable = [each for each in stored if each == self._served or _is_usable(each)]
        due = choose_certificate(usable, self._clock())
        if due is None:
            return
        self._tokens = frozenset(each.token for each in usable)
        if due != self._served:
            load_certificate(self.context, due)
            self._served = due
            self.loaded.set()
            log.info("preflight_certificate_served", expires=due.expires_at.isoformat())

    def _report(self, task: str, error: Exception) -> None:
        """Log once why the certificate cannot be kept; everything else of the controller goes on."""
        if str(error) != self._problems.get(task):
            self._problems[task] = str(error)
            log.warning(
                "preflight_certificate_not_kept",
                error=str(error),
                way_out=f"services are written without preflight until Secret {CONTROLLER_NAMESPACE}/{NAME} and "
                f"ValidatingWebhookConfiguration {NAME} are there and the controller may get and patch them: install "
                "the chart with preflight.enabled=true, or turn --preflight-bind-address off; it is tried every "
                f"{READ_SECONDS:.0f} s",
            )


def plan_configuration(configuration: Obj, certificates: Sequence[WebhookCertificate], now: datetime) -> Obj | None:
    """Return what to apply so that API servers trust these certificates; None: they do, or the webhook is not there."""
    bundle = base64.b64encode("".join(each.certificate for each in certificates).encode()).decode()
    due = choose_certificate(certificates, now)
    path = f"{PATH}{due.token}" if due is not None else PATH
    wanted = {"caBundle": bundle, "service": {"path": path}}
    for each in configuration.get("webhooks") or ():
        found = each["clientConfig"]
        if each["name"] == WEBHOOK:
            if found.get("caBundle") == bundle and (found.get("service") or {}).get("path") == path:
                return None
            return {
                "metadata": {"name": NAME, "uid": configuration["metadata"]["uid"]},
                "webhooks": [{"name": WEBHOOK, "clientConfig": wanted}],
            }
    return None


def load_certificate(context: ssl.SSLContext, certificate: WebhookCertificate) -> None:
    """Use a certificate for handshakes from now on. Raises OSError; ssl.SSLError is a subclass.

    The library reads files only, and the key is to be in none: it comes through a pipe.
    """
    with _open_pipe(certificate.certificate) as chain, _open_pipe(certificate.key) as key:
        context.load_cert_chain(chain, key, password="")


@contextlib.contextmanager
def _open_pipe(text: str) -> Iterator[str]:
    """Yield the path of a pipe from which `text` can be read once."""
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as file:
            file.write(text.encode())

    # A text that is longer than the buffer of a pipe is not read in one piece.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield f"/dev/fd/{reading}"
    finally:
        os.close(reading)
        writer.join()


def _is_usable(certificate: WebhookCertificate) -> bool:
    try:
        load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate)
    except (OSError, ValueError):
        return False
    return True


async def _read_secret(client: Client) -> Obj:
    """Return the Secret; empty if it was deleted."""
    try:
        return await client.get(SECRETS, NAME, CONTROLLER_NAMESPACE)
    except NotFound:
        return {}


def _read_certificates(secret: Obj) -> tuple[WebhookCertificate, ...]:
    try:
        return decode_certificates(base64.b64decode((secret.get("data") or {}).get(DATA_KEY, "")))
    except ValueError:
        return ()


def _make(now: datetime) -> WebhookCertificate:
    return make_certificate(now, DNS_NAME)
