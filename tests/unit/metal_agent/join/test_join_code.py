"""A join code survives what mails and terminals do to text, and no damage to it goes unnoticed."""

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_agent.join.join_code import (
    PREFIX,
    JoinCode,
    JoinCodeError,
    decode_join_code,
    encode_join_code,
    split_certificates,
)
from tests.support.certificates import CA

CODES = st.builds(
    JoinCode,
    host=st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True),
    server=st.from_regex(r"https://[a-z0-9.]{1,40}(:[0-9]{1,5})?", fullmatch=True),
    token=st.text(alphabet="abcXYZ019-_.", max_size=1200),
    signature=st.text(alphabet="abcXYZ019-_", max_size=342),
    expires_at=st.integers(0, 2**40),
    authority=st.lists(st.binary(max_size=900), max_size=3).map(tuple),
    tls_server_name=st.text(max_size=20),
)
TYPICAL = JoinCode(
    "studio-1", "https://192.0.2.10:6443", "h." + "p" * 486 + "." + "s" * 342, "t" * 342, 1795477192, (CA.read_bytes(),)
)


@given(CODES)
def test_code_is_read_as_it_was_written(code: JoinCode) -> None:
    assert decode_join_code(encode_join_code(code)) == code


@given(CODES, st.data())
def test_blanks_and_line_breaks_of_mails_are_ignored(code: JoinCode, data: st.DataObject) -> None:
    text = encode_join_code(code)
    for _ in range(3):
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + data.draw(st.sampled_from([" ", "\n", "\r\n", "\t"])) + text[place:]
    assert decode_join_code(text) == code


@given(CODES, st.data())
def test_code_that_is_cut_off_is_refused(code: JoinCode, data: st.DataObject) -> None:
    text = encode_join_code(code)
    with pytest.raises(JoinCodeError, match=r"cut off or damaged|no join code"):
        decode_join_code(text[: data.draw(st.integers(0, len(text) - 1))])


@given(CODES, st.data())
def test_code_with_another_character_is_refused(code: JoinCode, data: st.DataObject) -> None:
    text = encode_join_code(code)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters().filter(lambda letter: letter != text[place]))
    try:
        # The last character has bits that mean nothing.
        assert decode_join_code(text[:place] + other + text[place + 1 :]) == code
    except JoinCodeError:
        pass
    else:
        assert place == len(text) - 1 or other.isspace()


def test_other_alphabet_of_base64_is_refused() -> None:
    text = encode_join_code(TYPICAL)
    assert "-" in text.removeprefix(PREFIX)
    with pytest.raises(JoinCodeError, match="damaged"):
        decode_join_code(PREFIX + text.removeprefix(PREFIX).replace("-", "+"))


@given(st.one_of(st.text(), st.binary().map(lambda data: PREFIX + data.hex()), st.text().map(PREFIX.__add__)))
def test_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(JoinCodeError):
        decode_join_code(text)


def test_code_of_another_format_says_so() -> None:
    with pytest.raises(JoinCodeError, match=r"has format 1, .* reads format 2: use the same version"):
        decode_join_code("pomona-join-1.abc")


def test_code_can_be_given_as_an_argument_and_shows_no_secret() -> None:
    assert len(encode_join_code(TYPICAL)) < 8192
    assert "ttt" not in repr(TYPICAL)
    assert "ppp" not in repr(TYPICAL)


def test_certificate_authorities_of_a_bundle_are_carried_over() -> None:
    pem = CA.read_text()
    bundle = split_certificates(f"# one\n{pem}\n# two\n{pem}".encode())
    assert bundle == (ssl.PEM_cert_to_DER_cert(pem),) * 2
    read = JoinCode("a", "https://b", "", "", 0, bundle).authority_pem
    assert split_certificates(read.encode()) == bundle
    with pytest.raises(ValueError, match="no certificate"):
        split_certificates(Path(__file__).read_bytes())
