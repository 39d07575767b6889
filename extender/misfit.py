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
    """Return why this hardware can never run the replica, even if it were idle; None if it may fit.

    It cannot if its devices are of another vendor, or if too few of them are large enough. What is unknown counts as
    fitting: a pod of no service, a vendor or a size of memory that is not known.
    """
    # 1. Its devices are of another vendor.
    # hardware.vendors: all vendors whose devices the node has; hardware.vendor: the one that its sizes are about
    vendor = vendors.get(subject.accelerator)
    if not subject.is_served or vendor is None or not vendor.has_devices or not hardware.vendors:
        return None
    if subject.accelerator not in hardware.vendors:
        return f"its devices are of {', '.join(sorted(hardware.vendors))}, and the service needs {subject.accelerator}"

    # 2. Too few of its devices are large enough.
    sizes_are_of_its_devices = hardware.vendor == subject.accelerator
    if subject.need_bytes is None or not sizes_are_of_its_devices:
        return None
    known_sizes = [size for size in hardware.memory_bytes if size is not None]
    # A device of unknown size counts as large enough.
    large_enough = sum(size is None or size >= subject.need_bytes for size in hardware.memory_bytes)
    # Labels state one size for all devices.
    needed = subject.device_count if hardware.lists_devices else 1
    # A node whose agent lists fewer devices than are requested may have new ones.
    has_enough = large_enough >= min(needed, len(hardware.memory_bytes))
    if not known_sizes or has_enough:
        return None
    return f"a device has {size_text(max(known_sizes))} of memory, and the model needs {size_text(subject.need_bytes)}"


def find_transient_misfit(facts: ScoringFacts, subject: ScoringSubject) -> str | None:
    """Return why no shared device of this node has enough free memory for the replica now; None if it may fit.

    Kubernetes counts devices, and not the memory that other pods take of one that they share. What is unknown fits.
    """
    if subject.need_bytes is None or not facts.free_gib or facts.hardware.vendor != subject.accelerator:
        return None
    # The free memory is known in whole GiB, rounded down: almost one GiB more may be free.
    has_room = [free is None or (free + 1) * GIB > subject.need_bytes for free in facts.free_gib]
    if any(has_room):
        return None
    # No entry is None here: an unknown one would have counted as room.
    largest = max(free for free in facts.free_gib if free is not None)
    return f"its shared devices have {largest} GiB free, and the model needs {size_text(subject.need_bytes)}"
