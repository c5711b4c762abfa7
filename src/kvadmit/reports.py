"""What one instance tells the arbiter, and when that is worth a message.

Owns: the report's figures, its revisions, the newest reading of each device, and the rule
that at most one report is outstanding. Must not know: sockets, clocks, orders, ranks' states.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvadmit.group_events import Effect, SendArbiter, StartTimer, StopTimer
from kvadmit.link import ANSWER_WAIT_S, ArbiterLink
from kvadmit.messages import DeviceReading, Geometry, Report
from kvadmit.port import PoolLevels
from kvadmit.states import (
    ABORTING,
    COMMITTING,
    DRAINING,
    FENCED,
    ORPHAN,
    PREPARING,
    RESIDENT,
    SPARE,
    ExtentStates,
)

_DECIDES = ("allowance_seen", "backed", "preparing", "orphan", "leaving", "need", "want")
_GIVES = ("spare", "free", "cached")


def figures(
    states: ExtentStates,
    levels: PoolLevels,
    geometry: Geometry | None,
    *,
    serving: bool,
    silent: tuple[int, ...] = (),
) -> Report:
    """Return a report's levels; epoch, revisions, readings and counters are still to be set."""
    count = states.count
    need = want = room = 0
    if geometry is not None:
        room = max(0, geometry.cap - states.held)
        need = want = max(0, geometry.prefix - states.held)
    if serving:
        need = max(0, levels.need_total - states.usable)
        want = max(need, levels.want_total - states.usable)
    return Report(
        epoch=0,
        revision=0,
        allowance_seen=0,
        backed=count[RESIDENT] + count[DRAINING] + count[SPARE] + count[FENCED],
        preparing=count[PREPARING] + count[COMMITTING] + count[ABORTING],
        orphan=count[ORPHAN],
        leaving=count[FENCED],
        # A draining extent is as good as spare: it asks nothing of the scheduler any more.
        spare=count[SPARE] + count[DRAINING],
        free=levels.free,
        cached=levels.cached,
        need=min(need, room),
        want=min(want, room),
        running=levels.running,
        silent=silent,
    )


class Reports:
    """The reports of one instance over all epochs; `last` is the newest one sent in this."""

    def __init__(self, link: ArbiterLink) -> None:
        self.link = link
        self.last: Report | None = None
        self._timer = False
        self._revision = 0
        self._refused: set[str] = set()
        self._readings: dict[str, DeviceReading] = {}
        self._readings_taken = 0
        self._newest_of_rank: dict[int, int] = {}

    # --- what goes into them ---

    def refuse(self, devices: Iterable[str]) -> None:
        """Have the next report say that attempts failed on `devices`."""
        self._refused.update(devices)

    def take_reading(self, rank: int, reading: DeviceReading) -> None:
        """Keep a rank's reading unless a newer one of that rank was here already."""
        if reading.sequence > self._newest_of_rank.get(rank, 0):
            self._newest_of_rank[rank] = reading.sequence
            self.note_reading(reading)

    def note_reading(self, reading: DeviceReading) -> None:
        """Keep the newest reading of a device; towards the arbiter we number them ourselves.

        An answer that was lost and asked for again brings a reading from before.
        """
        known = self._readings.get(reading.device)
        if known is not None and reading.at_s < known.at_s:
            return
        self._readings_taken += 1
        self._readings[reading.device] = msgspec.structs.replace(
            reading, sequence=self._readings_taken
        )

    # --- sending ---

    def restart(self) -> None:
        """Send the next report whatever it says: the arbiter may not know the last one."""
        self.last = None

    def forget(self, effects: list[Effect]) -> None:
        """Start afresh with the next arbiter.

        It must not take what a device showed long ago for its state.
        """
        self.last = None
        self._readings.clear()
        self._stop_timer(effects)

    @property
    def outstanding(self) -> bool:
        """Whether the last report is on its way and not confirmed."""
        return self.last is not None and self.link.report_seen < self.last.revision

    def send(
        self, levels: Report, counters: dict[str, int], now_s: float, effects: list[Effect]
    ) -> None:
        """Complete and send `levels` if they say something new and no other is outstanding.

        What changes while one is outstanding goes into the next one.
        """
        if self.outstanding:
            return
        self._stop_timer(effects)
        report = msgspec.structs.replace(
            levels,
            epoch=self.link.epoch,
            revision=self._revision + 1,
            allowance_seen=self.link.revision,
            refused=tuple(sorted(self._refused)),
            devices=tuple(self._readings[device] for device in sorted(self._readings)),
            counters=counters,
        )
        pressure = self.link.pressure
        if self.last is not None and not _worth_sending(self.last, report, pressure=pressure):
            return
        self._revision += 1
        self._refused.clear()
        self.last = report
        self._post(report, now_s, effects)

    def send_again(self, now_s: float, effects: list[Effect]) -> bool:
        """Repeat the outstanding report when its timer fired; return whether there was one."""
        self._timer = False
        if self.last is None or not self.outstanding:
            return False
        self._post(self.last, now_s, effects)
        return True

    def _post(self, report: Report, now_s: float, effects: list[Effect]) -> None:
        self._timer = True
        effects.append(SendArbiter(report))
        effects.append(StartTimer("report", now_s + ANSWER_WAIT_S))

    def _stop_timer(self, effects: list[Effect]) -> None:
        if self._timer:
            self._timer = False
            effects.append(StopTimer("report"))


def _worth_sending(last: Report, report: Report, *, pressure: bool) -> bool:
    """Whether the arbiter could decide or show something else on `report` than on `last`."""
    if report.refused or last.devices != report.devices or _differ(last, report, _DECIDES):
        return True
    if last.silent != report.silent:
        return True
    if bool(last.running) != bool(report.running):
        return True  # the idle are asked first
    # While nobody waits, an exact count of what could be taken back interests nobody.
    return _differ(last, report, _GIVES) and (pressure or not report.running)


def _differ(last: Report, report: Report, fields: tuple[str, ...]) -> bool:
    return any(getattr(last, field) != getattr(report, field) for field in fields)
