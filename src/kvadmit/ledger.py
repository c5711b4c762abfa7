"""The arbiter's books: what each instance is counted for, and what each device has left.

Owns: the counting rule of an instance (never optimistic: an allowance counts until its
lowering was seen) and the foreign bytes of a device. Must not know: who should get what.
"""

from __future__ import annotations

from kvadmit.messages import DeviceReading, Report

EMPTY_REPORT = Report(epoch=0, revision=0, allowance_seen=0, backed=0)


class Account:
    """One instance's bookings, in extents."""

    def __init__(self) -> None:
        self.report = EMPTY_REPORT
        self.allowance = 0
        self.revision = 0
        self._sent: dict[int, int] = {}
        """Allowances by revision, from the one last seen on: each may still be spent."""

    def allow(self, extents: int) -> int:
        """Book a new allowance; return its revision."""
        self.revision += 1
        self.allowance = extents
        self._sent[self.revision] = extents
        return self.revision

    def receive(self, report: Report) -> bool:
        """Take the newest report; return False (and change nothing) for an older one."""
        if report.revision <= self.report.revision:
            return False
        self.report = report
        for revision in [r for r in self._sent if r < report.allowance_seen]:
            del self._sent[revision]
        return True

    @property
    def held(self) -> int:
        """Extents the instance says are backed, preparing or orphaned."""
        return self.report.backed + self.report.preparing + self.report.orphan

    @property
    def settled(self) -> bool:
        """Whether the newest allowance was seen and nothing is moving."""
        report = self.report
        return (
            report.allowance_seen == self.revision
            and not report.preparing
            and not report.leaving
            and self.held >= self.allowance
        )

    @property
    def booked(self) -> int:
        """The most extents the instance may hold now: max of held and every live allowance."""
        return max(self.held, *self._sent.values(), 0)

    @property
    def surely_held(self) -> int:
        """The fewest extents the instance can hold now."""
        return self.report.backed - self.report.leaving


class DeviceBook:
    """One device's bytes. `foreign_bytes`: used, and claimed by no instance."""

    def __init__(self, device: str, total_bytes: int) -> None:
        self.device = device
        self.total_bytes = total_bytes
        self.foreign_bytes = 0
        self.unshown_bytes = 0
        """Of the foreign ones: what members that left had and no reading has shown back."""
        self.reads_left = 0
        """How many more times it is read soon for these bytes."""
        self.known = False
        """Whether it was read in this epoch; before that nobody knows what is used."""
        self._read_at_s = 0.0
        """When the newest reading was taken, on the host's monotonic clock."""
        self.capped = False
        """A rank was refused here: nothing more is granted before a newer reading."""

    def leave(self, held_bytes: int) -> None:
        """Call the bytes of an instance that left foreign until the device shows them back."""
        self.foreign_bytes += held_bytes
        self.unshown_bytes += held_bytes

    def claim(self, held_bytes: int) -> None:
        """Take bytes a new member holds out of the foreign ones, where they were until now."""
        self._correct(max(0, self.foreign_bytes - held_bytes))

    def read(self, reading: DeviceReading, *, least_bytes: int, most_bytes: int) -> bool:
        """Correct `foreign_bytes` by a reading; returns whether it was used.

        `least_bytes` and `most_bytes` bound what the known instances can hold at this
        moment; the reading then bounds what is foreign. With nothing moving the two are
        equal and the figure is exact; otherwise it is only moved into the bounds. One that was
        taken before another that is known, by whomever, says nothing of this moment.
        """
        if reading.at_s < self._read_at_s:
            return False
        self._read_at_s = reading.at_s
        # By one total for all: NVML and the driver differ by what the device keeps for itself.
        used = self.total_bytes - reading.free_bytes
        low, high = max(0, used - most_bytes), max(0, used - least_bytes)
        self._correct(min(max(self.foreign_bytes, low), high))
        self.known = True
        return True

    def _correct(self, foreign_bytes: int) -> None:
        back_bytes = max(0, self.foreign_bytes - foreign_bytes)
        self.unshown_bytes = max(0, self.unshown_bytes - back_bytes)
        self.foreign_bytes = foreign_bytes
