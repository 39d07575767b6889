"""Reports without a decision, and the decisions after which they are possible."""

import pytest

from controller.reconcile.executor import Executor
from controller.reconcile.plan import Plan, Reconciler
from kube.resources import INFERENCE_SERVICES, SECRETS
from tests.unit.controller.reconcile.test_executor import KEY, PLANNED, SERVICE, TOKEN, Shell, World


@pytest.mark.parametrize(
    ("plan", "is_passed_on"),
    [
        (Plan(status=PLANNED), True),
        (Plan(status=PLANNED, create=(TOKEN,)), False),
        (Plan(status=PLANNED, apply=(SERVICE,)), False),
    ],
    ids=["status alone", "with a Secret", "with a Service"],
)
async def test_decision_without_other_writes_is_passed_on(plan: Plan, *, is_passed_on: bool) -> None:
    shell, passed_on = Shell(World(), plan), []
    kind = Reconciler(
        resource=INFERENCE_SERVICES,
        decide=lambda _snapshot, _key: plan,
        decided=lambda _snapshot, key, outcome: passed_on.append((key, outcome)),
    )
    executor = Executor(shell.world, shell.store, shell.told, lambda: shell.now, lambda: None)
    await executor.reconcile(kind, KEY)
    assert passed_on == ([(KEY, plan)] if is_passed_on else [])


async def test_report_takes_the_place_of_a_decision() -> None:
    shell, reports = Shell(World(), Plan()), [Plan(status=PLANNED, again_seconds=7.0), None]
    kind = Reconciler(
        resource=INFERENCE_SERVICES,
        decide=lambda _snapshot, _key: Plan(create=(TOKEN,)),
        report=lambda _snapshot, _key: reports.pop(0),
    )
    executor = Executor(shell.world, shell.store, shell.told, lambda: shell.now, lambda: None)
    assert await executor.reconcile(kind, KEY) == 7.0
    assert (shell.world.status["phase"], shell.world.there) == (PLANNED["phase"], {})
    assert await executor.reconcile(kind, KEY) is None
    assert [resource for resource, _name in shell.world.there] == [SECRETS]
