"""Controllers that are refused, cut off, misinformed, overruled and doubled end in the state of an undisturbed one.

All worlds of one test run at once, the undisturbed one among them: they wait more than they work.
"""

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Final

import pytest

from controller.placement.ledger import LEDGER
from kube.client import Obj
from kube.errors import NotFound
from kube.resources import CONFIG_MAPS, INFERENCE_SERVICES, MODELS, Resource
from kube.store import Store
from kube.transport import Request, Transport
from kube.watch import Selection, reflect
from tests.cluster.crashes.conftest import MakeWorld
from tests.controlplane.plane import ControlPlane, PlaneError
from tests.support.admission_webhook import (
    MUTATING,
    NOBODY_LISTENS,
    VALIDATING,
    RefuseOneIn,
    hang,
    registered,
    rewrite_images,
    rule,
    serving,
    try_deployment,
)
from tests.support.background import running
from tests.support.crash_scenarios import (
    METAL,
    POD,
    Scenario,
    live_in_pods,
    live_on_hosts,
    queue_for_devices,
    ready,
)
from tests.support.crash_world import GIB, MIRROR, CrashWorld
from tests.support.disturbances import DisturbedWatches, RandomFaults
from tests.support.eventually import eventually

pytestmark = pytest.mark.long

ONE_IN: Final = 8
"""One of so many calls and events is disturbed."""
REFUSED_ONE_IN: Final = 3

Disturbed = Callable[[MakeWorld, Scenario, CrashWorld], Coroutine[None, None, None]]
"""`await disturbed(make_world, scenario, undisturbed)` runs the scenario in a disturbed world."""


def is_admission(request: Request) -> bool:
    """Decide whether the queue gives a pod a node, or writes down its place."""
    return request.method == "PATCH" and "/pods/" in request.path


async def disturb_two_leaders(make_world: MakeWorld, scenario: Scenario, undisturbed: CrashWorld) -> None:
    """Two controllers work at once throughout, which is longer than any change of leaders takes."""
    seed = secrets.randbelow(1_000_000)
    watches: list[DisturbedWatches] = []
    faults = RandomFaults(seed, ONE_IN)

    def disturb(transport: Transport) -> DisturbedWatches:
        watches.append(DisturbedWatches(transport, seed, ONE_IN))
        return watches[0]

    try:
        async with make_world(undisturbed, disturb) as world:
            # A pod whose admission fails lets the next one go first, which is another state, and a good one.
            world.transport.plan = lambda request: None if is_admission(request) else faults(request)
            async with world.running(controllers=2):
                await scenario(world)
    except BaseException as error:
        error.add_note(f"two leaders, seed {seed}")
        raise
    assert faults.injected > 10, seed
    assert watches[0].injected > 10, seed


async def lose_ledgers(world: CrashWorld, chance: random.Random, lost: Counter[str]) -> None:
    """Delete each ledger that has claims, or fill it with garbage, and count both."""
    store, claimed = Store(), asyncio.Event()

    def note_claims(_resource: Resource, _old: Obj | None, new: Obj | None) -> None:
        if new is not None and '"claims":{"' in new["data"]["ledger.json"]:
            claimed.set()

    store.subscribe(note_claims)
    garbage = {"op": "add", "path": "/data", "value": {"ledger.json": '{"claims":'}}
    of_world = CONFIG_MAPS, LEDGER, world.namespace
    async with running(
        reflect(world.client, store, Selection(CONFIG_MAPS, world.namespace, field_selector=f"metadata.name={LEDGER}"))
    ):
        while True:
            await claimed.wait()
            claimed.clear()
            way = chance.choice(["delete", "fill"])
            lose = world.client.delete(*of_world) if way == "delete" else world.client.patch_json(*of_world, [garbage])
            with contextlib.suppress(NotFound):  # the claims were those of a ledger that is lost already
                await lose
                lost[way] += 1


async def disturb_two_leaders_and_their_ledger(
    make_world: MakeWorld, scenario: Scenario, undisturbed: CrashWorld
) -> None:
    """Two controllers work at once, and each ledger by which one of them admits is lost at once."""
    seed, lost = secrets.randbelow(1_000_000), Counter[str]()
    chance = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    try:
        async with (
            make_world(undisturbed) as world,
            running(lose_ledgers(world, chance, lost)),
            world.running(controllers=2),
        ):
            await scenario(world)
    except BaseException as error:
        error.add_note(f"two leaders that lose their ledger, seed {seed}, lost: {lost}")
        raise
    assert lost.total() >= 4, lost


async def refuse_every_third_write(make_world: MakeWorld, scenario: Scenario, undisturbed: CrashWorld) -> None:
    policy = RefuseOneIn(REFUSED_ONE_IN)
    async with make_world(undisturbed) as world, serving(policy) as url:
        rules = [
            rule("services", "secrets", "deployments", "jobs", "inferenceservices/status"),
            # A refused binding is tried on another host, which is another state, and a good one.
            rule("metalprocesses", operations=["CREATE"]),
        ]
        async with world.running(), registered(world.client, VALIDATING, world.namespace, url, *rules):
            await scenario(world)
    assert policy.asked >= 2 * REFUSED_ONE_IN


async def rewrite_all_images(make_world: MakeWorld, scenario: Scenario, undisturbed: CrashWorld) -> None:
    async with make_world(undisturbed) as world, serving(rewrite_images(MIRROR)) as url:

        async def is_asked() -> bool:
            tried = await try_deployment(world.plane, world.namespace)
            return str(tried["spec"]["template"]["spec"]["containers"][0]["image"]).startswith(MIRROR)

        async with registered(world.client, MUTATING, world.namespace, url, rule("deployments", "jobs")):
            await eventually(is_asked)
            async with world.running():
                await scenario(world)
        # The controller must not write again and again what the policy overrules each time.
        assert len(world.writes()) <= 2 * len(undisturbed.writes())


async def compare(make_world: MakeWorld, scenario: Scenario, *disturbed: Disturbed) -> None:
    """Run a scenario without a disturbance, and beside it in disturbed worlds."""
    async with asyncio.TaskGroup() as group, make_world(None) as undisturbed:
        for disturbance in disturbed:
            group.create_task(disturbance(make_world, scenario, undisturbed))
        async with undisturbed.running():
            await scenario(undisturbed)


@pytest.mark.parametrize(
    ("scenario", "disturbed"),
    [
        pytest.param(
            live_in_pods,
            (disturb_two_leaders, refuse_every_third_write, rewrite_all_images),
            id="live_in_pods",
        ),
        pytest.param(
            live_on_hosts,
            (disturb_two_leaders, refuse_every_third_write),
            id="live_on_hosts",
        ),
        pytest.param(
            queue_for_devices,
            (disturb_two_leaders, disturb_two_leaders_and_their_ledger, refuse_every_third_write),
            id="queue_for_devices",
        ),
    ],
)
async def test_disturbed_controllers_reach_the_state_of_an_undisturbed_one(
    make_world: MakeWorld, scenario: Scenario, disturbed: Sequence[Disturbed]
) -> None:
    await compare(make_world, scenario, *disturbed)


async def refuses_deployments(plane: ControlPlane, namespace: str) -> bool:
    """Decide whether the API server asks the dead webhook by now."""
    try:
        await try_deployment(plane, namespace)
    except PlaneError as error:
        return "failed calling webhook" in str(error)
    return False


async def start_two_services(world: CrashWorld) -> None:
    """Create a service in a pod and one on a host."""
    await world.make(MODELS, "tiny", source="http://models.example/tiny.gguf", memoryBytes=GIB)
    await world.host()
    await world.make(INFERENCE_SERVICES, "chat", modelRef="tiny", hardware=POD, contextLength=512)
    await world.make(INFERENCE_SERVICES, "late", modelRef="tiny", hardware=METAL)


async def reach_two_services(world: CrashWorld) -> None:
    """Wait until both serve."""
    await world.checkpoint("both serve", lambda state: ready(state, deployments=1, processes=1))


async def serve_both(world: CrashWorld) -> None:
    await start_two_services(world)
    await reach_two_services(world)


async def disturb_by_dead_webhook(
    url: str, make_world: MakeWorld, _scenario: Scenario, undisturbed: CrashWorld
) -> None:
    async with make_world(undisturbed) as world, world.running():

        async def is_told() -> bool:
            late = await world.client.get(INFERENCE_SERVICES, "late", world.namespace)
            chat = await world.client.get(INFERENCE_SERVICES, "chat", world.namespace)
            return late["status"]["phase"] == "Ready" and "webhook" in str(chat["status"]["conditions"])

        async with registered(world.client, VALIDATING, world.namespace, url, rule("deployments"), timeout_seconds=1):
            await eventually(lambda: refuses_deployments(world.plane, world.namespace))
            await start_two_services(world)
            await eventually(is_told)
        await reach_two_services(world)


async def test_dead_webhook_of_deployments_stops_no_service_on_hosts(make_world: MakeWorld) -> None:
    async with serving(hang) as silent:
        dead = [partial(disturb_by_dead_webhook, url) for url in (silent, NOBODY_LISTENS)]
        await compare(make_world, serve_both, *dead)
