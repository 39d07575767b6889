"""Options of `pomona controller`, as they reach the controller."""

import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import cli.controller
from cli import log
from cli.main import main
from controller.controller_options import ControllerOptions
from controller.http_endpoints import BindAddress, ControllerHealth
from controller.metrics import ControllerMetrics
from controller.placement.replacement import ReplacementRules
from controller.pod_settings import PodSettings

WITHOUT_SERVERS = ("--metrics-bind-address=0", "--health-probe-bind-address=0")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ControllerOptions]]:
    """Keep the options of each controller that would be started."""
    kept: list[ControllerOptions] = []

    async def keep(
        kubeconfig: Path | None, options: ControllerOptions, metrics: ControllerMetrics, health: ControllerHealth
    ) -> None:
        del kubeconfig, metrics, health
        kept.append(options)

    monkeypatch.setattr(cli.controller, "_run", keep)
    monkeypatch.setattr(log, "configure", lambda **_: None)
    before = gc.get_threshold()
    yield kept
    gc.set_threshold(*before)


def start(*options: str) -> Result:
    return CliRunner().invoke(main, ["controller", *WITHOUT_SERVERS, *options])


def list_pull_secrets(started: list[ControllerOptions], *names: str) -> tuple[str, ...]:
    done = start(*(f"--image-pull-secret={name}" for name in names))
    assert done.exit_code == 0, done.output
    (options,) = started
    return options.pods.image_pull_secrets


def test_controller_has_no_pull_secret_unless_one_is_given(started: list[ControllerOptions]) -> None:
    assert list_pull_secrets(started) == PodSettings().image_pull_secrets == ()


def test_pull_secrets_are_kept_in_their_order_and_once(started: list[ControllerOptions]) -> None:
    assert list_pull_secrets(started, "registry", "a.mirror-1", "registry") == ("registry", "a.mirror-1")


def test_speeds_are_measured_and_exported_only_if_that_is_asked_for(started: list[ControllerOptions]) -> None:
    assert start().exit_code == start("--benchmarks", "--flexinfer-export").exit_code == 0
    assert [(options.benchmarks, options.flexinfer_export) for options in started] == [
        (False, False),
        (True, True),
    ]


@pytest.mark.parametrize("name", ["", "Registry", "team/registry", "a..b", "-a", "a\n", "a" * 254])
def test_pull_secret_that_is_no_name_is_refused_with_an_example(started: list[ControllerOptions], name: str) -> None:
    done = start("--image-pull-secret", name)
    assert (done.exit_code, started) == (2, [])
    assert "is not a name of a Secret: give one such as pomona-registry" in " ".join(done.output.split())


def test_controller_of_some_namespaces_serves_these_without_hosts(started: list[ControllerOptions]) -> None:
    assert start("--namespace=team-b", "--namespace=team-a", "--namespace=team-b").exit_code == 0
    assert start().exit_code == 0
    some, whole = started
    assert (some.namespaces, some.pods.limits.hosts) == (("team-b", "team-a"), False)
    assert (whole.namespaces, whole.pods.limits.hosts) == ((), True)


def test_queue_is_the_mode_of_the_whole_cluster_unless_another_one_is_stated(started: list[ControllerOptions]) -> None:
    for arguments in ((), ("--scheduling-mode=Native",), ("--scheduling-mode=Queue",), ("--namespace=team",)):
        assert start(*arguments).exit_code == 0
    assert [options.pods.scheduling_mode for options in started] == [
        "Queue",
        "Native",
        "Queue",
        "Native",
    ]
    refused = start("--namespace=team", "--scheduling-mode=Queue")
    assert (refused.exit_code, len(started)) == (2, 4)
    assert "Queue needs the whole cluster" in refused.output


def test_preflight_is_off_unless_it_has_an_address_and_the_whole_cluster(started: list[ControllerOptions]) -> None:
    for arguments in ((), ("--preflight-bind-address=:9443", "--preflight-certificate=/tls")):
        assert start(*arguments).exit_code == 0
    assert [options.preflight for options in started] == [None, BindAddress("", 9443)]
    assert started[1].preflight_folder == Path("/tls")
    refused = start("--namespace=team", "--preflight-bind-address=:9443")
    assert (refused.exit_code, len(started)) == (2, 2)
    assert "the preflight webhook needs the whole cluster" in refused.output


@pytest.mark.parametrize("name", ["", "Team", "team.a", "team-a,team-b", "-a", "a\n", "a" * 64])
def test_namespace_that_is_no_name_is_refused_with_an_example(started: list[ControllerOptions], name: str) -> None:
    done = start("--namespace", name)
    assert (done.exit_code, started) == (2, [])
    assert "is not a name of a namespace: give one such as team-a" in " ".join(done.output.split())


@pytest.mark.usefixtures("started")
def test_watches_of_many_namespaces_may_be_open_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        done = start()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (done.exit_code, raised) == (0, 10240 if hard == resource.RLIM_INFINITY else min(hard, 10240)), done.output


def test_slow_replicas_are_replaced_only_if_that_is_asked_for(started: list[ControllerOptions]) -> None:
    limits = ("--degrade-threshold=0.5", "--degrade-check-interval=10s", "--degrade-cool-down=1h")
    for arguments in ((), limits, ("--replace-degraded",), ("--replace-degraded", *limits)):
        assert start(*arguments).exit_code == 0
    assert [options.replacement for options in started] == [
        ReplacementRules(),
        ReplacementRules(0.5, 10, 3600),
        ReplacementRules(is_on=True),
        ReplacementRules(0.5, 10, 3600, is_on=True),
    ]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--degrade-check-interval=11m", "660s is not between 1s and 600s: give a time such as 30s"),
        ("--degrade-check-interval=soon", "'soon' is not a time: give one such as 90s"),
        ("--degrade-threshold=1", "1.0 is not in the range 0.05<=x<=0.95"),
    ],
)
def test_rules_of_replacements_are_refused_with_a_way_out(
    started: list[ControllerOptions], option: str, error: str
) -> None:
    done = start("--replace-degraded", option)
    assert (done.exit_code, started) == (2, [])
    assert error in " ".join(done.output.replace("\u2502", " ").split())


def test_gateway_is_of_the_whole_cluster(started: list[ControllerOptions]) -> None:
    assert start().exit_code == start("--gateway").exit_code == 0
    assert [options.gateway for options in started] == [False, True]
    done = start("--gateway", "--namespace=team-a")
    assert (done.exit_code, len(started)) == (2, 2)
    assert "the gateway serves the whole cluster: leave it out, or leave --namespace out" in " ".join(
        done.output.split()
    )
