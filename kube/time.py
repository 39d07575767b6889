"""Times as the API writes them: metav1.Time in whole seconds, MicroTime in microseconds, always UTC."""

from datetime import UTC, datetime


def rfc3339(moment: datetime) -> str:
    """Format a metav1.Time: `2026-11-21T13:10:00Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time(moment: datetime) -> str:
    """Format a metav1.MicroTime: `2026-11-21T13:10:00.000000Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
