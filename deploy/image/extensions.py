"""The extension modules of Pomona's image: mypyc compiles the busiest modules of the gateway's data plane.

A short request then takes little more than half the time of the processor. The modules' texts stay beside them, and
are what runs everywhere else, on Macs and in a checkout. mypyc drops the arguments of a class statement, which
`msgspec.Struct` needs, and an interpreted class cannot extend a compiled one: so structs are in modules of their own,
and `tests/unit/image/test_extensions.py` holds both. `python -m tests.compiled` runs the tests of the gateway on them.

`assemble.py` runs this program in a folder with Pomona's packages, by a Python with mypyc and a C compiler:
`extensions.py PYTHON CONFIGURATION DESTINATION`, where PYTHON has the libraries that the modules import.
"""

import sys
import tempfile

from mypyc.build import mypycify
from setuptools import setup

COMPILED = (
    *("gateway/http/awaited_exchange.py", "gateway/http/connection_table.py", "gateway/http/exchange.py"),
    *("gateway/http/headers.py", "gateway/http/joined_writes.py", "gateway/http/request_head.py"),
    *("gateway/http/server_connection.py", "gateway/http/upstream_connection.py", "gateway/http/upstream_pool.py"),
    *("gateway/proxy/attempts.py", "gateway/proxy/backend_health.py", "gateway/proxy/handler.py"),
    *("gateway/proxy/inference_head.py", "gateway/proxy/inference_request.py", "gateway/proxy/keep_alive.py"),
    *("gateway/proxy/metrics.py", "gateway/proxy/request_body.py", "gateway/proxy/request_form.py"),
    *("gateway/proxy/ollama_request.py", "gateway/proxy/request_queue.py", "gateway/proxy/router.py"),
    *("gateway/proxy/served_routes.py", "gateway/proxy/service.py", "gateway/proxy/upstream_request.py"),
    *("gateway/cluster/admission.py", "gateway/cluster/endpoint_choice.py", "gateway/cluster/endpoint_health.py"),
    *("gateway/cluster/keys.py", "gateway/cluster/rate_headers.py", "gateway/cluster/retry_budget.py"),
    *("gateway/cluster/routed_service.py", "gateway/cluster/token_estimate.py"),
)


def main() -> None:
    """Compile the modules."""
    python, configuration, destination = sys.argv[1:]
    options = [f"--python-executable={python}", f"--config-file={configuration}"]
    # Some libraries have no types of their own: developers have these from packages that no image needs.
    options += ["--follow-imports=silent", "--ignore-missing-imports"]
    with tempfile.TemporaryDirectory() as folder:
        extensions = mypycify([*options, f"--cache-dir={folder}/cache", *COMPILED], target_dir=f"{folder}/c")
        command = ["build_ext", f"--build-lib={destination}", f"--build-temp={folder}/objects"]
        setup(name="extensions", packages=[], ext_modules=extensions, script_args=["--quiet", *command])


if __name__ == "__main__":
    main()
