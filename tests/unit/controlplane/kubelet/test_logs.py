"""Promises of the documentation about termination messages, and the choice of a log file."""

from pathlib import Path

from tests.controlplane.kubelet.logs import LogFolder, tail, termination_message


def message(tmp_path: Path, written: bytes, output: bytes, *, policy: str, failed: bool) -> str:
    (tmp_path / "message").write_bytes(written)
    (tmp_path / "log").write_bytes(output)
    return termination_message(tmp_path / "message", tmp_path / "log", policy=policy, failed=failed)


def test_message_is_the_content_of_the_file_up_to_4096_bytes(tmp_path: Path) -> None:
    assert message(tmp_path, b"x" * 5000, b"log", policy="File", failed=True) == "x" * 4096


def test_the_log_is_the_fallback_only_on_error_and_without_a_message(tmp_path: Path) -> None:
    fallback = "FallbackToLogsOnError"
    assert message(tmp_path, b"", b"boom\n", policy=fallback, failed=True) == "boom\n"
    assert message(tmp_path, b"", b"boom\n", policy=fallback, failed=False) == ""
    assert message(tmp_path, b"own", b"boom\n", policy=fallback, failed=True) == "own"
    assert message(tmp_path, b"", b"boom\n", policy="File", failed=True) == ""


def test_the_fallback_ends_at_2048_bytes_or_80_lines(tmp_path: Path) -> None:
    fallback = "FallbackToLogsOnError"
    assert len(message(tmp_path, b"", b"y" * 9000, policy=fallback, failed=True)) == 2048
    lines = b"".join(b"%d\n" % number for number in range(100))
    assert message(tmp_path, b"", lines, policy=fallback, failed=True).splitlines() == [str(n) for n in range(20, 100)]


def test_invalid_utf_8_is_replaced(tmp_path: Path) -> None:
    assert message(tmp_path, b"\xff\xfe", b"", policy="File", failed=False) == "\ufffd\ufffd"
    assert tail(tmp_path / "absent") == ""


def test_latest_and_previous_log_are_found(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path)
    for count in (0, 1, 10):
        folder.path("n", "p", "uid", "c", count).write_text(str(count))
    latest, previous = folder.latest("n", "p", "c"), folder.latest("n", "p", "c", previous=True)
    assert latest is not None
    assert previous is not None
    assert (latest.read_text(), previous.read_text()) == ("10", "1")
    assert folder.latest("n", "other", "c") is None
