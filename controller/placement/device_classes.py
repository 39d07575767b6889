"""The device classes of the cluster, by accelerator: kept as nodes and hosts come, change and go.

A class is described by the weakest of its devices, so that what is estimated for it holds for all of them. The classes
of an accelerator are the same tuple until one of them changes, so that what follows from them is computed once.
"""

from collections.abc import Callable, Sequence

from fitness.serving_devices import ServingDevices


class DeviceClasses:
    """All device classes that nodes and hosts have."""

    def __init__(self) -> None:
        """Start without any cell."""
        self._cells: dict[str, tuple[str, ServingDevices]] = {}
        """By `Cell.id`, its accelerator and one of its devices."""
        self._members: dict[tuple[str, str], dict[ServingDevices, int]] = {}
        """By accelerator and class, how many cells describe the class alike."""
        self._unknown: dict[str, set[str]] = {}
        """By accelerator, the cells of which nobody says what devices they have."""
        self._listed: dict[str, tuple[ServingDevices, ...]] = {}
        """By accelerator, the weakest devices of each class."""
        self._listeners: list[Callable[[str], None]] = []

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Call `listener(accelerator)` when a class of an accelerator comes, changes or goes."""
        self._listeners.append(listener)

    def list_classes(self, accelerator: str) -> Sequence[ServingDevices]:
        """Return one device of each class of an accelerator, by the name of the class."""
        return self._listed.get(accelerator, ())

    def has_unknown(self, accelerator: str) -> bool:
        """Return whether any node or host has devices of an accelerator of which nobody says what they are."""
        return bool(self._unknown.get(accelerator))

    def put(self, cell: str, accelerator: str, devices: ServingDevices | None) -> None:
        """Note the devices of a cell, by its `Cell.id`, None if they are unknown; call listeners if a class changes."""
        # 1. Note whether they are unknown.
        entry = (accelerator, devices) if devices is not None and devices.device_class else None
        for cells in self._unknown.values():
            cells.discard(cell)
        if accelerator and entry is None:
            self._unknown.setdefault(accelerator, set()).add(cell)

        # 2. Move the cell from the class that it had to the one that it has now.
        last = self._cells.get(cell)
        if entry == last:
            return
        changed_accelerators = set[str]()
        if last is not None:
            del self._cells[cell]
            changed_accelerators |= self._count_in_class(*last, -1)
        if entry is not None:
            self._cells[cell] = entry
            changed_accelerators |= self._count_in_class(*entry, 1)

        for changed_accelerator in sorted(changed_accelerators):
            self._list_anew(changed_accelerator)

    def remove(self, cell: str) -> None:
        """Forget the devices of a cell that is gone."""
        self.put(cell, "", None)

    def _count_in_class(self, accelerator: str, devices: ServingDevices, number: int) -> set[str]:
        """Add `number` cells, 1 or -1, with these devices to their class.

        Returns the accelerator, in a set, if its classes may have changed by that: at most one cell has such devices
        now, so that the first may have come or the last have gone. Otherwise the set is empty.
        """
        key = accelerator, devices.device_class
        members = self._members.setdefault(key, {})  # how many cells have each kind of devices in this class
        count = members.get(devices, 0) + number
        if count:
            members[devices] = count
        else:
            del members[devices]
        if not members:
            del self._members[key]
        return {accelerator} if count <= 1 else set()

    def _list_anew(self, accelerator: str) -> None:
        """List the weakest devices of each class of an accelerator; call the listeners if the list has changed."""
        classes = tuple(
            min(members, key=_rate)
            for (name, _), members in sorted(self._members.items(), key=lambda item: item[0])
            if name == accelerator
        )
        if classes == self._listed.get(accelerator, ()):
            return
        self._listed[accelerator] = classes
        for listener in self._listeners:
            listener(accelerator)


def _rate(devices: ServingDevices) -> tuple[float, ...]:
    """Return a key by which the weakest devices of a class come first; what is unknown counts as least."""
    return (
        devices.memory_bytes or 0,
        devices.bandwidth_bytes_per_second or 0,
        devices.flops or 0.0,
        devices.cores or 0,
    )
