"""Certificates of the webhook: always one is served that is trusted, and a new one comes before the old one ends."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from controller.preflight.webhook_certificates import (
    RENEWED_BEFORE_END,
    SETTLE_TIME,
    VALID_FOR,
    WebhookCertificate,
    choose_certificate,
    decode_certificates,
    encode_certificates,
    make_certificate,
    plan_certificates,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


def make(now: datetime) -> WebhookCertificate:
    return WebhookCertificate("certificate", "key", f"{now:%Y%m%d%H%M%S}00", now, now + VALID_FOR)


def test_first_certificate_is_served_at_once() -> None:
    planned = plan_certificates((), NOW, make)
    assert len(planned) == 1
    assert choose_certificate(planned, NOW) == planned[0]


def test_valid_certificate_is_kept() -> None:
    planned = plan_certificates((), NOW, make)
    assert plan_certificates(planned, NOW + 59 * DAY, make) == planned


def test_new_certificate_is_trusted_before_it_is_served() -> None:
    first = plan_certificates((), NOW, make)
    renewed = NOW + VALID_FOR - RENEWED_BEFORE_END + DAY
    both = plan_certificates(first, renewed, make)
    assert both == (*first, make(renewed))
    assert choose_certificate(both, renewed) == first[0]
    assert choose_certificate(both, renewed + SETTLE_TIME) == both[1]
    assert plan_certificates(both, NOW + VALID_FOR, make) == both[1:]


def test_expired_certificate_is_replaced() -> None:
    late = NOW + VALID_FOR
    assert plan_certificates((make(NOW),), late, make) == (make(late),)
    assert choose_certificate((make(NOW),), late) is None


def test_certificate_of_a_clock_that_was_wrong_is_replaced() -> None:
    assert plan_certificates((make(NOW + 900 * DAY),), NOW, make) == (make(NOW),)


@given(st.lists(st.integers(1, 24 * 120), max_size=40))
def test_certificates_never_lapse_and_never_pile_up(pauses: list[int]) -> None:
    stored: tuple[WebhookCertificate, ...] = ()
    now = NOW
    for hours in pauses:
        now += timedelta(hours=hours)
        trusted_before = stored
        stored = plan_certificates(stored, now, make)
        served = choose_certificate(stored, now)
        assert len(stored) <= 2
        assert served is not None
        assert served.expires_at > now
        still = choose_certificate(trusted_before, now)
        assert still is None or still in stored, "what a replica serves that has not read yet is trusted"


def test_damage_reads_as_no_certificate() -> None:
    stored = encode_certificates([make(NOW)])
    assert decode_certificates(stored) == (make(NOW),)
    for damaged in (b"", b"\xff\xfe", b"{}", b"[1]", stored[:-9], stored.replace(b'"2026', b'"../2026')):
        assert decode_certificates(damaged) == ()


def test_certificate_shows_no_key() -> None:
    made = make_certificate(NOW, "a.example.svc")
    assert "PRIVATE KEY" in made.key
    assert made.key not in repr(made)
    assert made.token not in repr((made,))
