"""The reasons why a node cannot run a replica, in words for the Events of its pod.

Kube-scheduler samples nodes before it asks an extender, so that a pod may stay pending if only the extender rejects
what it has sampled: whatever labels can state is held by the affinity of the pod, too. Here nothing is rejected that is
not known for sure: what is unknown fits.
"""

from crds.size import GIB, size_text
from devices.vendors import Vendors
from extender.node_facts import ScoringFacts
from extender.subject import ScoringSubject
from fitness.stated_hardware import DeviceHardware


def find_static_misfit(hardware: DeviceHardware, subject: ScoringSubject, vendors: Vendors) -> str | None:
    """Return why this hardware can never run the replica, so that preemption would not help; None if it may fit."""
    vendor = vendors.get(subject.accelerator)
    if not subject.is_served or vendor is None or not vendor.has_devices or not hardware.vendors:
        return None
    if subject.accelerator not in hardware.vendors:
        return f"its devices are of {', '.join(sorted(hardware.vendors))}, and the service needs {subject.accelerator}"
    if subject.need_bytes is None or hardware.vendor != subject.accelerator:
        return None
    known_sizes = [size for size in hardware.memory_bytes if size is not None]
    # A device of unknown size counts as large enough.
    large_enough = sum(size is None or size >= subject.need_bytes for size in hardware.memory_bytes)
    needed = subject.device_count if hardware.lists_devices else 1
    # A node whose agent lists fewer devices than are requested may have new ones.
    if not known_sizes or large_enough >= min(needed, len(hardware.memory_bytes)):
        return None
    return f"a device has {size_text(max(known_sizes))} of memory, and the model needs {size_text(subject.need_bytes)}"


def find_transient_misfit(facts: ScoringFacts, subject: ScoringSubject) -> str | None:
    """Return why this node cannot run the replica now; None if it may fit.

    Kubernetes counts devices, and not the memory that other pods take of one that they share.
    """
    if subject.need_bytes is None or not facts.free_gib or facts.hardware.vendor != subject.accelerator:
        return None
    # The free memory is known in whole GiB, rounded down.
    has_room = [free is None or (free + 1) * GIB > subject.need_bytes for free in facts.free_gib]
    if any(has_room):
        return None
    largest = max(free for free in facts.free_gib if free is not None)
    return f"its shared devices have {largest} GiB free, and the model needs {size_text(subject.need_bytes)}"
