"""Which device is read when, and by whom, so that the arbiter's books stay true.

Owns: the elections under way, the timers `read` and `back`, and whose turn it is. Must not know:
the policy, allowances, or what a reading changes (`ledger`).

A device that somebody outside the group uses sends no event when memory comes free. So while
somebody goes short and its figures may be stale it is read again: at once, then after READ_WAIT_S,
backing off to READ_WAIT_S_MAX; every BACK_WAIT_S while bytes of a member that left are not back.
Where nobody goes short, nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvadmit.arbitration_events import Effect, Send, StartTimer, StopTimer
from kvadmit.ledger import DeviceBook
from kvadmit.membership import Instance
from kvadmit.messages import Elect

READ_WAIT_S = 0.250
READ_WAIT_S_MAX = 2.0
BACK_WAIT_S = 0.100
BACK_READS = 150
"""So many times after each loss: within 15 s every worker of a killed engine core is gone."""


class Elections:
    """The readings of one epoch. Of the books and members it changes `reads_left` only."""

    def __init__(
        self,
        epoch: int,
        devices: Mapping[str, DeviceBook],
        instances: Mapping[str, Instance],
        counters: dict[str, int],
    ) -> None:
        self.open: dict[str, str] = {}
        """Who was elected last to read a device, while no reading of it has come since."""
        self.counters = counters
        self._epoch = epoch
        self._devices, self._instances = devices, instances
        self._wait_s = 0.0
        """How long until the timer `read`; 0 while it does not run."""
        self._round = 0
        self._back_timer = False

    def elect(self, devices: set[str], effects: list[Effect], first: str = "") -> None:
        """Have a member read each of `devices`: one with agents there, if any.

        `first`, if it has the device; else one that answers, and not one that was asked already.
        """
        for device in sorted(devices):
            able = [p for p, i in self._instances.items() if device in i.hello.devices]
            able.sort(key=lambda p: (device not in self._instances[p].cost, p))
            able = [p for p in able if not self._instances[p].account.report.silent] or able
            if able:
                # Another one each time: the last may be stopped and never answer.
                others = [p for p in able if p != self.open.get(device)] or able
                chosen = first if first in able else others[self._round % len(others)]
                self.open[device] = chosen
                self.counters["device_reads"] += 1
                effects.append(Send(chosen, Elect(epoch=self._epoch, device=device)))

    def answered(self, device: str) -> bool:
        """Note that a reading came; return whether anybody was elected for it."""
        return self.open.pop(device, None) is not None

    def pass_over(self, peer: str, effects: list[Effect]) -> None:
        """Elect others for what `peer` was to read: ranks of it do not answer."""
        self.elect({d for d, elected in self.open.items() if elected == peer}, effects)

    def member_left(self, peer: str, devices: set[str], effects: list[Effect]) -> None:
        """Have `devices` read at once, and often, for whoever goes short: `peer` left them.

        What it was to read itself somebody else reads now.
        """
        for device in devices:
            self._devices[device].reads_left = BACK_READS
        self._wait_s = 0.0
        unread = {device for device, elected in self.open.items() if elected == peer}
        for device in unread:
            del self.open[device]
        self.elect(unread, effects)

    def watch(self, unsure: set[str], now_s: float, effects: list[Effect]) -> None:
        """Start or stop reading; `unsure`: where somebody goes short and figures may be stale."""
        if unsure and not self._wait_s:
            self._wait_s = READ_WAIT_S
            # The wait has just begun: what the books call foreign may be free by now.
            self.elect({d for d in unsure if not self._devices[d].capped}, effects)
            effects.append(StartTimer("read", now_s + self._wait_s))
        elif not unsure and self._wait_s:
            self._wait_s = 0.0
            effects.append(StopTimer("read"))
        returning = bool(self._returning(unsure))
        if returning and not self._back_timer:
            effects.append(StartTimer("back", now_s + BACK_WAIT_S))
        elif not returning and self._back_timer:
            effects.append(StopTimer("back"))
        self._back_timer = returning

    def read_again(self, unsure: set[str], now_s: float, effects: list[Effect]) -> None:
        """Elect again when the timer `read` has fired, and wait longer for the next time."""
        self._wait_s = min(2 * (self._wait_s or READ_WAIT_S), READ_WAIT_S_MAX)
        self._round += 1
        if unsure:
            self.elect(unsure, effects)
            effects.append(StartTimer("read", now_s + self._wait_s))
        else:
            self._wait_s = 0.0

    def read_back(self, unsure: set[str], effects: list[Effect]) -> None:
        """Elect again when the timer `back` has fired; `watch` starts the next one."""
        self._back_timer = False
        self._round += 1
        devices = self._returning(unsure)
        for device in devices:
            self._devices[device].reads_left -= 1
        self.elect(devices, effects)

    def _returning(self, unsure: set[str]) -> set[str]:
        """Return those of `unsure` that are to show back soon what a member that left had."""
        books = {device: self._devices[device] for device in unsure}
        return {d for d, b in books.items() if b.unshown_bytes and b.reads_left and not b.capped}
