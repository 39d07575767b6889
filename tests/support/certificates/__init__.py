"""Certificates for hosts in tests, made once with openssl and good until 2126.

`ca.crt` (`openssl req -x509 -days 36500`, with keyUsage keyCertSign; its key is gone) signed the others (`openssl ca
-startdate -enddate`): `host`, for 127.0.0.1 and 10.77.100.1 to 10.77.100.250, where tests have their hosts, and
`expired`, for 127.0.0.1, good for a day of 2020. `front_proxy`, which signed itself (`openssl ca -selfsign`, with
extendedKeyUsage clientAuth), is that of the API server as a client of API servers behind it. `library`, which signed
itself (`openssl req -x509 -days 36500`), is for registry.ollama.ai and content.registry.ollama.ai.
"""

from pathlib import Path

from gateway.proxy.config import Tls

_FOLDER = Path(__file__).parent

CA = _FOLDER / "ca.crt"
HOST = Tls(str(_FOLDER / "host.crt"), str(_FOLDER / "host.key"))
EXPIRED = Tls(str(_FOLDER / "expired.crt"), str(_FOLDER / "expired.key"))
FRONT_PROXY = Tls(str(_FOLDER / "front_proxy.crt"), str(_FOLDER / "front_proxy.key"))
LIBRARY = Tls(str(_FOLDER / "library.crt"), str(_FOLDER / "library.key"))
