"""The output of `pomona list`, `ps` and `status` about a running `pomona up`: pure functions of its status."""

from collections.abc import Sequence

from cli.output import duration_text, render_table, wrap_text
from crds.size import size_text
from standalone.control.up_status import UpServiceStatus, UpStatus

_LABEL_WIDTH = 13
_LIST_TITLES = ("NAME", "PHASE", "MEMORY", "REQUESTS", "DETAIL")
_WIDE_TITLES = ("NAME", "PHASE", "MEMORY", "REQUESTS", "MODEL", "CONTEXT", "ENGINE", "SOURCE", "DETAIL")
_LOADED_TITLES = ("NAME", "PHASE", "MEMORY", "REQUESTS", "IDLE", "UNLOADED IN", "CONTEXT", "ENGINE")


def format_services(services: Sequence[UpServiceStatus], width: int | None, *, is_wide: bool) -> str:
    """Return the table of all services, in lines of at most `width` columns; None: nothing is cut."""
    rows = []
    for service in services:
        memory, requests = describe_memory(service), describe_requests(service)
        further = (service.model, str(service.context_length or ""), service.runtime, service.source)
        wide = further if is_wide else ()
        rows.append((service.name, service.phase, memory, requests, *wide, service.detail))
    return render_table(_WIDE_TITLES if is_wide else _LIST_TITLES, rows, width, {0})


def format_loaded(services: Sequence[UpServiceStatus], width: int | None) -> str:
    """Return the table of the services that are loaded."""
    rows = [
        (
            service.name,
            service.phase,
            describe_memory(service),
            describe_requests(service),
            "" if service.idle_seconds is None or service.running else duration_text(service.idle_seconds),
            describe_unload(service),
            str(service.context_length or ""),
            service.runtime,
        )
        for service in services
    ]
    return render_table(_LOADED_TITLES, rows, width, {0})


def format_memory(status: UpStatus) -> str:
    """Return the line about the memory for models, and where clients connect."""
    free = f"{size_text(status.available_bytes)} of {size_text(status.budget_bytes)} of the memory for models are free"
    return f"{status.problem or describe_endpoint(status)}; {free}"


def describe_endpoint(status: UpStatus) -> str:
    """Return the URL for clients of OpenAI's API."""
    return f"endpoint {status.endpoint}/v1" if status.endpoint else "the endpoint is not open yet"


def format_status(service: UpServiceStatus, width: int) -> str:
    """Return all about one service, in lines of at most `width` columns."""
    lines = [
        ("model", service.model),
        ("source", service.source),
        ("memory", describe_memory(service)),
        ("requests", _describe_counts(service)),
        ("loaded", _describe_loads(service)),
        ("context", f"{service.context_length} tokens" if service.context_length else ""),
        ("engine", service.runtime),
    ]
    for engine in service.engines:
        pid = f", process {engine.pid}" if engine.pid else ""
        lines += [("process", f"{engine.phase}{pid}") if engine.phase else ("", ""), ("log", engine.log)]
    shown = [f"{service.name}  {service.phase}", *wrap_text(service.detail, width, "  ", first="  ")]
    for label, value in lines:
        if value:
            shown += wrap_text(value, width, " " * _LABEL_WIDTH, first=f"{label + ':':{_LABEL_WIDTH}}")
    return "\n".join(shown)


def describe_memory(service: UpServiceStatus) -> str:
    """Return the memory that a service takes: what it uses, if that is known, or what is reserved for it."""
    used = service.used_bytes or service.reserved_bytes
    return size_text(used) if used else ""


def describe_requests(service: UpServiceStatus) -> str:
    """Return how many requests run and wait."""
    waiting = f", {service.waiting} waiting" if service.waiting else ""
    return f"{service.running}{waiting}" if service.running or waiting else ""


def describe_unload(service: UpServiceStatus) -> str:
    """Return the time until a service is unloaded, unless it is asked."""
    if not service.on_demand:
        return "never"
    return "" if service.unload_seconds is None else duration_text(service.unload_seconds)


def _describe_counts(service: UpServiceStatus) -> str:
    return f"{service.running} running, {service.waiting} waiting; {service.requests} so far, {service.failed} failed"


def _describe_loads(service: UpServiceStatus) -> str:
    """Return when a service is loaded and unloaded."""
    if not service.on_demand:
        return "always"
    if service.idle_seconds is None:
        return "by its first request, or by `pomona load`"
    if service.unload_seconds is None:
        return "now, and while it has requests"
    return f"now; idle for {duration_text(service.idle_seconds)}, unloaded in {duration_text(service.unload_seconds)}"
