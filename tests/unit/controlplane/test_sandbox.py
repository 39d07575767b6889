"""The advice on a machine that refuses namespaces."""

import pytest

from tests.controlplane.sandbox import SandboxError, advice, check

APPARMOR = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
MAXIMUM = "/proc/sys/user/max_user_namespaces"
CLONE = "/proc/sys/kernel/unprivileged_userns_clone"


@pytest.mark.parametrize(
    ("switches", "command"),
    [
        ({APPARMOR: "1", MAXIMUM: "63000"}, "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        ({APPARMOR: "0", MAXIMUM: "0"}, "sudo sysctl user.max_user_namespaces=15000"),
        ({CLONE: "0", MAXIMUM: "63000"}, "sudo sysctl kernel.unprivileged_userns_clone=1"),
    ],
)
def test_forbidding_setting_is_named_with_its_command(switches: dict[str, str], command: str) -> None:
    line = advice("unshare: unshare failed: No space left on device\n", switches)

    assert "unshare failed: No space left on device" in line
    assert line.endswith(f"allow it with: {command}")


def test_all_forbidding_settings_are_named() -> None:
    assert advice("no", {APPARMOR: "1", MAXIMUM: "0"}).count("sudo sysctl") == 2


def test_container_is_advised_if_no_setting_forbids() -> None:
    line = advice("", {MAXIMUM: "63000"})

    assert "without a word" in line
    assert "--privileged" in line
    assert "\n" not in line


def test_missing_tools_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.platform", "linux")

    with pytest.raises(
        SandboxError, match=r"ip, unshare, nsenter, mount\. .* apt-get install iproute2 mount util-linux"
    ):
        check()


def test_other_operating_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")

    with pytest.raises(SandboxError, match="darwin"):
        check()
