"""Placement by speed, as a user sees it: `auto` takes the faster of two device classes, and says why."""

from collections.abc import Awaitable, Callable
from typing import Final

from kube.resources import INFERENCE_SERVICES
from kube.store import Store
from tests.controlplane.plane import ControlPlane
from tests.controlplane.process import CHECKOUT

SERVICE: Final = "fastest"
COMMANDS: Final = (
    "{.status.placement.place}: {.status.placement.reason}",
    (
        "{range .status.speeds[?(@.source)]}"
        '{.deviceClass} {.tokensPerSecond} tokens/s, {.low} to {.high} ({.source}){"\\n"}{end}'
    ),
)
"""Questions of a user about the service, in kubectl's JSONPath."""
WaitUntil = Callable[[Callable[[], bool]], Awaitable[object]]
"""Waits until a condition on the store is true."""


async def show_placement(plane: ControlPlane, store: Store, wait_until: WaitUntil, namespace: str = "default") -> None:
    """Apply the service, print why it is where it is, and give its device back."""
    apply = "apply -f examples/placement/fastest.yaml"
    print(f"\n$ kubectl {apply}")
    print((await plane.kubectl(*apply.replace("examples/", f"{CHECKOUT}/examples/").split())).strip())
    await wait_until(lambda: bool(_read_status(store, namespace).get("placement")) and _is_ready(store, namespace))
    for path in COMMANDS:
        print(f"$ kubectl get isvc {SERVICE} -o jsonpath='{path}'")
        print((await plane.kubectl("get", "isvc", SERVICE, f"--output=jsonpath={path}")).strip())
    await plane.kubectl("scale", "isvc", SERVICE, "--replicas=0")
    await wait_until(lambda: _read_status(store, namespace).get("phase") == "Suspended")


def _read_status(store: Store, namespace: str) -> dict[str, object]:
    status: dict[str, object] = (store.get(INFERENCE_SERVICES, SERVICE, namespace) or {}).get("status", {})
    return status


def _is_ready(store: Store, namespace: str) -> bool:
    return _read_status(store, namespace).get("phase") == "Ready"
