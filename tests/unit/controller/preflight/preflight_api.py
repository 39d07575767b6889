"""The Secret of preflight as the API server has it."""

import base64
from datetime import UTC, datetime

from controller.preflight.certificate_keeper import DATA_KEY, DNS_NAME, NAME
from controller.preflight.webhook_certificates import encode_certificates, make_certificate
from kube.client import Obj


def store_certificate() -> Obj:
    """Return the Secret with a certificate of this moment."""
    stored = encode_certificates([make_certificate(datetime.now(UTC), DNS_NAME)])
    return {"metadata": {"name": NAME}, "type": "Opaque", "data": {DATA_KEY: base64.b64encode(stored).decode()}}
