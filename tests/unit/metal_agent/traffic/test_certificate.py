"""The agent reports problems of the owner's certificate before it starts."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from cli.main import main
from cli.options import default_state_folder
from gateway.proxy.config import Tls
from metal_agent.exit_codes import PERMANENT
from metal_agent.options import StartError
from metal_agent.traffic.certificate import check_certificate
from tests.support import certificates
from tests.support.certificates import EXPIRED, HOST


def test_certificate_for_this_address_logs_nothing() -> None:
    with capture_logs() as said:
        check_certificate(HOST, "10.77.100.1")
    assert said == []


def test_certificate_for_another_address_logs_a_warning() -> None:
    with capture_logs() as said:
        check_certificate(HOST, "10.77.100.251")
    assert [(entry["log_level"], entry["address"]) for entry in said] == [("warning", "10.77.100.251")]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.77.100.1"])
def test_expired_certificate_is_refused_for_any_address(address: str) -> None:
    with pytest.raises(StartError, match=r"--tls-certificate \S+/expired.crt .*certificate has expired.*renew it"):
        check_certificate(EXPIRED, address)


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        (Tls("/no/tls.crt", HOST.key), "cannot read --tls-certificate /no/tls.crt: No such file or directory"),
        (Tls(HOST.certificate, "/no/tls.key"), "cannot read --tls-key /no/tls.key: No such file or directory"),
        (Tls(HOST.certificate, EXPIRED.key), "--tls-key .*expired.key .*mismatch"),
        (Tls(HOST.certificate, HOST.certificate), "PEM form.* key its own and without a password"),
        (Tls(HOST.key, HOST.key), "PEM form"),
        (Tls(certificates.__file__, HOST.key), "PEM form"),
    ],
)
def test_unusable_files_are_named_with_the_required_form(tls: Tls, message: str) -> None:
    with pytest.raises(StartError, match=f"(?i){message}"):
        check_certificate(tls, "127.0.0.1")


@pytest.mark.parametrize("option", ["--tls-certificate", "--tls-key"])
def test_one_file_without_the_other_is_refused(option: str, tmp_path: Path, home: Path) -> None:
    result = CliRunner().invoke(main, ["agent", "--name", "studio-1", option, str(tmp_path / "tls.pem")])
    assert result.exit_code == PERMANENT
    assert "give both, or none for plain HTTP" in result.output
    (record,) = default_state_folder().iterdir()
    assert record.is_relative_to(home), "the developer's own agent keeps the reason of its last end there"
