"""Inspection of a public source by a host, in place of a Job: for Models that only hosts serve.

It is the same work as that of a Job (see `jobs.proceed`): an attempt is a MetalProcess with `inspect`, which is created
for one host, and is deleted once its result is in the status of the Model. A host that is lost or does not answer is
given up, and the next attempt asks another one.

A host's token may be stolen, so its report is judged like the answer of a hostile server. A report is believed only
while its host is given to the namespace of the Model, only where it agrees with what the user states, and for hosts
alone: before pods serve the Model, a Job inspects it.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from artifacts.errors import REASONS
from artifacts.formats.gguf_split import is_gguf_name
from artifacts.source import Source, parse
from controller.models import jobs, volume
from controller.models.inspecting_hosts import InspectingHost
from controller.models.job_pods import NO_PODS
from controller.models.jobs import JobOutcome, JobProgress, Work
from controller.models.observation import ObservedModel
from controller.models.served import METAL, is_mounted_image
from controller.pod_settings import PodSettings
from controller.reconcile.plan import child
from crds.inspection import InspectionReport
from crds.meta import GROUP, LABEL_MODEL
from crds.metalprocess import Artifact, MetalProcessSpec
from crds.model import Model
from kube.client import Obj
from kube.resources import METAL_PROCESSES, MODELS, Resource
from kube.time import rfc3339

ANNOTATION_ASKED: Final = f"{GROUP}/asked-at"
"""Time of an attempt by the controller's clock: that of the API server may differ by more than any pause."""
ANNOTATION_TRIED: Final = f"{GROUP}/tried-hosts"
"""Hosts that made the attempts before this one, the last one first."""
MOST_TRIED: Final = 16
SILENT_SECONDS: Final = 60.0
"""Time for a host to report that it has the inspection; one that watches does so at once."""
KEPT_SECONDS: Final = 1.0
"""Time for which the process of a report is kept."""
MOST_BYTES: Final = 1 << 50
"""More than the size of any model, and than any other number about one."""
MOST_MESSAGE_CHARACTERS: Final = 768

_SCHEMES: Final = frozenset({"hf", "http", "https", "oci"})
"""Schemes of public sources that hosts can read."""
_COMMIT: Final = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def _is_for_hosts(model: Model, observed: ObservedModel) -> bool:
    """Return whether a host may inspect the Model: only hosts serve it, and its source is public."""
    spec = model.spec
    return (
        spec.hardware.accelerator == METAL
        and observed.consumer is None
        and spec.source_secret_ref is None
        and not is_mounted_image(model)
        and parse(spec.source, spec.files).scheme in _SCHEMES
    )


def inspect(
    model: Model,
    observed: ObservedModel,
    settings: PodSettings,
    now: datetime,
    *,
    last_checked: str = "",
) -> JobProgress:
    """Inspect a Model by a host or by a Job; the arguments are those of `volume.inspection`.

    A host that becomes live takes over from a Job that has a problem: its image may be out of the cluster's reach. No
    other attempt is given up for one elsewhere, so that a host that comes and goes stops none.
    """
    placement = volume.place_inspection(model, observed.consumer, observed.undecided, settings)
    work = volume.inspection(model, settings, placement=placement, last_checked=last_checked)
    by_job = jobs.proceed(work, observed.jobs, observed.pods, now)
    is_under_way = by_job.outcome.state == "Going" and not by_job.outcome.reason and by_job.create is None
    if not _is_for_hosts(model, observed) or by_job.outcome.state == "Succeeded" or is_under_way:
        return by_job
    by_host = _HostInspection(
        **{name: getattr(work, name) for name in work.__struct_fields__},
        model=model,
        hosts=observed.hosts(),
        asked=rfc3339(now),
    )
    current = jobs.find_current(by_host, observed.processes)
    if by_host.can_start() or (current is not None and by_host.read(current, (), now).state in {"Going", "Succeeded"}):
        progress = jobs.proceed(by_host, observed.processes, NO_PODS, now)
        if progress.outcome.state != "Succeeded":
            return progress
        # Once the status has the report, its process is deleted: a status that we write is no event.
        return msgspec.structs.replace(progress, again_seconds=KEPT_SECONDS)
    if by_job.outcome.reason != jobs.NO_IMAGE:
        return by_job
    namespace = model.metadata.namespace
    message = (
        f"no live host that serves namespace {namespace} can inspect the source, and the controller has no image for a "
        "Job: start `pomona agent` on a Mac (kubectl get metalhosts shows those that there are), or start `pomona "
        "controller` with --image"
    )
    return msgspec.structs.replace(by_job, outcome=msgspec.structs.replace(by_job.outcome, message=message))


class _HostInspection(Work, frozen=True, kw_only=True):
    """An inspection whose attempts are MetalProcesses, each on one host."""

    model: Model
    hosts: Mapping[str, InspectingHost] = {}
    """The hosts that are given to the namespace."""
    asked: str = ""
    """The time at which an attempt is made."""

    @property
    def resource(self) -> Resource:
        return METAL_PROCESSES

    @property
    def retried(self) -> Sequence[str]:
        # The next host may reach a source that this one cannot, and no user can delete the attempt.
        return ("Broken", "Failed")

    def can_start(self) -> bool:
        """Return whether there is a host for another attempt."""
        return any(host.is_live for host in self.hosts.values())

    def find_obstacle(self) -> str:
        return ""

    def build(self, attempt: int, previous: Obj | None) -> Obj:
        tried = _list_tried(previous) if previous is not None else []
        host = self._choose_host(tried)
        spec = self.model.spec
        process = MetalProcessSpec(
            inspect=True,
            model_name=self.model.metadata.name,
            artifact=Artifact(source=spec.source, sha256=spec.sha256 or "", files=spec.files, mirrors=spec.mirrors),
            memory_bytes=1,
            host_name=host,
        )
        labels = {LABEL_MODEL: self.owner.name}
        body = msgspec.to_builtins(process)
        _, made = child(METAL_PROCESSES, self.name(attempt), MODELS, self.owner, labels, spec=body)
        made["metadata"]["annotations"] = {
            **jobs.mark_attempt(self, attempt),
            ANNOTATION_ASKED: self.asked,
            **({ANNOTATION_TRIED: ",".join(tried)} if tried else {}),
        }
        return made

    def _choose_host(self, tried: Sequence[str]) -> str:
        """Return the live host that was not asked or was asked longest ago; of several, the one with least to do."""

        def order(name: str) -> tuple[int, int, str]:
            recency = len(tried) - tried.index(name) if name in tried else 0
            return recency, self.hosts[name].load, name

        return min((name for name, host in self.hosts.items() if host.is_live), key=order)

    def read(self, attempt: Obj, pods: Sequence[Obj], now: datetime) -> JobOutcome:
        del pods
        name, status = attempt["spec"]["hostName"], attempt.get("status") or {}
        phase = status.get("phase")
        host = self.hosts.get(name)

        def broken(reason: str, message: str) -> JobOutcome:
            text = f"host {name} {message}"
            return JobOutcome(state="Broken", reason=reason, message=text, ended=_asked(attempt), host=name)

        if host is None:
            return broken("HostGone", f"is gone, or does not serve namespace {self.owner.namespace} any more")
        if phase == "Stopped":
            report, problem = _read_report(self.model, status)
            if report is None:
                return broken("ReportRefused", f"sent a report that cannot be used: {problem}")
            return JobOutcome(state="Succeeded", answer=report, ended=_asked(attempt), host=name)
        if phase in {"Failed", "Rejected"}:
            return JobOutcome(
                state="Broken" if phase == "Failed" else "Failed",
                reason=_checked_reason(status.get("reason")),
                message=f"host {name}: {_printable(status.get('message'))}",
                ended=_reported(attempt, now),
                host=name,
            )
        if host.is_lost:
            return broken("HostLost", "does not renew its Lease")
        if (left := self.wait_seconds(attempt, now)) is not None and left <= 0:
            return broken("HostSilent", f"has not inspected the source for {self._limit(attempt):.0f} s")
        return JobOutcome(state="Going", host=name)

    def _limit(self, attempt: Obj) -> float:
        """Return the time for an attempt, in seconds: little until its host has it."""
        is_taken = bool((attempt.get("status") or {}).get("phase"))
        return volume.INSPECT_SECONDS if is_taken else SILENT_SECONDS

    def wait_seconds(self, attempt: Obj, now: datetime) -> float | None:
        return self._limit(attempt) - (now - _asked(attempt)).total_seconds()


def _asked(attempt: Obj) -> datetime:
    metadata = attempt["metadata"]
    return datetime.fromisoformat(metadata["annotations"].get(ANNOTATION_ASKED) or metadata["creationTimestamp"])


def _reported(attempt: Obj, now: datetime) -> datetime:
    """Return the time of the last report by the clock of the API server: a host could state any.

    It is within the time for an attempt: a host that fails again and again keeps the Model no longer than a silent one.
    """
    asked = _asked(attempt)
    entries = attempt["metadata"].get("managedFields") or ()
    times = [each["time"] for each in entries if each.get("subresource") == "status" and each.get("time")]
    reported = max(map(datetime.fromisoformat, times), default=asked)
    return max(asked, min(reported, now, asked + timedelta(seconds=volume.INSPECT_SECONDS)))


def _list_tried(previous: Obj) -> list[str]:
    """Return the hosts of an attempt and of those before it, each once, the last one first."""
    before = (previous["metadata"].get("annotations") or {}).get(ANNOTATION_TRIED, "").split(",")
    found = dict.fromkeys([previous["spec"]["hostName"], *filter(None, before)])
    return list(found)[:MOST_TRIED]


def _checked_reason(reason: Any) -> str:
    """Return a reason that an inspection can have: the controller decides by some others."""
    return reason if reason in REASONS else "InspectionFailed"


def _printable(message: Any) -> str:
    text = (
        message if isinstance(message, str) and message else "the inspection failed, for a reason that it did not state"
    )
    return "".join(each if each.isprintable() else " " for each in text[:MOST_MESSAGE_CHARACTERS])


def _read_report(model: Model, status: Obj) -> tuple[InspectionReport | None, str]:
    """Return the report of a host, or None and what is wrong with it."""
    try:
        report = msgspec.convert(status.get("inspection"), InspectionReport)
    except msgspec.ValidationError as error:
        return None, _printable(str(error))
    problem = _judge_report(model, report)
    return (None, problem) if problem else (report, "")


def _judge_report(model: Model, report: InspectionReport, revision: str = "") -> str:
    """Return why the report of a host is not believed; empty if it can be true.

    `revision` is the one that had to be inspected, if any.
    """
    source = parse(model.spec.source, model.spec.files)
    values = list(_list_values(msgspec.to_builtins(report)))
    if not all(each.isprintable() for each in values if isinstance(each, str)):
        return "a text in it is not printable"
    if any(not 0 <= each <= MOST_BYTES for each in values if isinstance(each, int)):
        return f"a number in it is negative, or larger than {MOST_BYTES}"
    if not report.size_bytes or (report.layout is not None and report.layout.tensor_bytes > report.size_bytes):
        return "the weights are larger than the files, or the files have no size"
    stated = model.spec.sha256
    if stated and report.sha256 not in (None, "", stated):
        return f"sha256 {report.sha256} is not the one of spec.sha256"
    return _judge_file(source, report) or _judge_revision(model, source, report.revision, revision)


def _judge_file(source: Source, report: InspectionReport) -> str:
    if not source.is_folder and (report.file, report.format) != (source.file, "gguf"):
        return f"file {report.file!r} of format {report.format} is not {source.file} of spec.source"
    is_file = bool(report.file)
    is_safe = is_gguf_name(report.file) and not report.file.startswith(".") and "/" not in report.file
    if is_file != (report.format == "gguf") or (is_file and not is_safe) or report.format in (None, "ollama"):
        return f"file {report.file!r} of format {report.format} is nothing that a folder can have"
    return ""


def _judge_revision(model: Model, source: Source, revision: str, expected: str) -> str:
    if not revision and model.spec.mirrors and source.scheme != "oci":
        return ""  # a mirror was read, whose revisions are its own; spec.sha256 holds the bytes
    if source.is_pinned or (expected and source.scheme in {"hf", "oci"}):
        pinned = expected or source.revision
        return "" if revision == pinned else f"revision {revision!r} is not {pinned}"
    if source.scheme == "oci":
        return "" if _DIGEST.fullmatch(revision) else f"revision {revision!r} is no digest"
    if source.scheme == "hf" and revision != source.revision and not _COMMIT.fullmatch(revision):
        return f"revision {revision!r} is no commit"
    return ""


def _list_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _list_values(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _list_values(each)
    elif not isinstance(value, bool):
        yield value
