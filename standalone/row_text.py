"""The words for the facts about a service: what the table and the lines of `pomona up` say."""

from artifacts.transfer_rate import TransferProgress, describe_transfer
from crds.size import size_text
from crds.text import countdown_text, escape_controls
from standalone.service_rows import DOWNLOAD_PHASES, ServiceRow


def describe_detail(row: ServiceRow) -> str:
    """Return the progress, the problem or the remark of a service; "" if there is none. It has no control characters.

    The messages are of engines and servers, which could move the cursor of a terminal.
    """
    texts = []
    if row.replicas is not None and row.ready_replicas is not None and row.replicas > 1:
        texts.append(f"{row.ready_replicas} of {row.replicas} replicas are ready")
    if row.message:
        texts.append(" ".join(row.message.split()))
    elif row.phase in DOWNLOAD_PHASES and row.bytes is not None:
        progress = TransferProgress(row.bytes, row.total_bytes, row.bytes_per_second, row.seconds_left)
        texts.append(describe_transfer(progress))
    elif row.phase == "Starting":
        texts.append(_describe_load(row))
    elif row.phase == "Waiting":
        texts.append("waiting for memory that other models use")
    if row.note:
        texts.append(" ".join(row.note.split()))
    if row.unload_seconds is not None:
        texts.append(f"unloads in {countdown_text(row.unload_seconds)}")
    elif row.idle_limit_seconds is not None and row.running is not None:
        texts.append(f"unloads {countdown_text(row.idle_limit_seconds)} after its last request")
    if row.failed_requests:
        texts.append(f"{row.failed_requests:,} of {row.requests:,} requests failed")
    return escape_controls("; ".join(texts))


def _describe_load(row: ServiceRow) -> str:
    """Return how long a load still takes, and how much of the memory is taken."""
    text = "loading"
    if row.seconds_left is not None:
        text += f", about {countdown_text(row.seconds_left)} left" if row.seconds_left else ", longer than usual"
    if row.memory_bytes and row.reserved_bytes:
        text += f", {size_text(row.memory_bytes)} of about {size_text(row.reserved_bytes)}"
    return text


def describe_requests(row: ServiceRow) -> str:
    """Return the number of requests, and how many run and wait."""
    if row.requests is None:
        return ""
    present = [f"{row.running} running"] if row.running else []
    present += [f"{row.waiting} waiting"] if row.waiting else []
    return f"{row.requests:,} ({', '.join(present)})" if present else f"{row.requests:,}"
