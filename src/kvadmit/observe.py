"""What a process remembers about itself: counters, histograms, the trace, the state log.

Owns: how figures are kept in bounded memory and shown as plain data. Must not know: what a
counter or an event means, or any machine. Recording belongs to one thread each and costs
less than a microsecond; snapshots may be taken by any thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

HISTOGRAM_SAMPLES_MAX = 4096
TRACE_ENTRIES_MAX = 20_000
"""A trace of this length holds minutes of a busy instance and some ten megabytes at most."""

STORY_LINES_MAX = 200
LOG_INTERVAL_S = 5.0


class Counters:
    """Named counts that only grow. `add` belongs to one thread."""

    __slots__ = ("_counts",)

    def __init__(self, *names: str) -> None:
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter named at construction; KeyError for any other (a typing slip)."""
        self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Return the counts as plain data."""
        return dict(self._counts)


class Histogram:
    """The newest samples of one figure, in whatever unit its name says.

    A fixed ring and not a deque: copying a list is one step under the interpreter's lock,
    while iterating a deque that another thread appends to raises.
    """

    __slots__ = ("_max", "_ring", "_samples_max", "count")

    def __init__(self, samples_max: int = HISTOGRAM_SAMPLES_MAX) -> None:
        assert samples_max > 0
        self.count = 0
        self._samples_max = samples_max
        self._ring: list[float] = []
        self._max: float | None = None

    def add(self, value: float) -> None:
        """Record one sample; the oldest falls out when the ring is full."""
        ring = self._ring
        if len(ring) < self._samples_max:
            ring.append(value)
        else:
            ring[self.count % self._samples_max] = value
        self.count += 1
        if self._max is None or value > self._max:
            self._max = value

    def snapshot(self) -> dict[str, float | int | None]:
        """Return count and max of all samples, p50 and p99 of the newest; None without any."""
        ordered = sorted(self._ring.copy())
        if not ordered:
            return {"count": 0, "p50": None, "p99": None, "max": None}
        last = len(ordered) - 1
        return {
            "count": self.count,
            "p50": ordered[round(0.50 * last)],
            "p99": ordered[round(0.99 * last)],
            "max": self._max,
        }


class Story:
    """One operation's history, oldest first; printed below a broken invariant."""

    def __init__(self, op_id: object, lines_max: int = STORY_LINES_MAX) -> None:
        self.op_id = op_id
        self._lines: deque[tuple[float, str]] = deque(maxlen=lines_max)

    def add(self, now_s: float, what: object) -> None:
        """Append what happened at `now_s` (monotonic); the oldest line falls out when full."""
        self._lines.append((now_s, str(what)))

    def __len__(self) -> int:
        return len(self._lines)

    def __str__(self) -> str:
        if not self._lines:
            return f"operation {self.op_id}: nothing recorded"
        began = self._lines[0][0]
        lines = [f"  {1000 * (now_s - began):+10.3f} ms  {what}" for now_s, what in self._lines]
        return "\n".join([f"operation {self.op_id}:", *lines])


class TimedEvent(Protocol):
    """What every event of a machine carries: the monotonic time at which it was made."""

    @property
    def now_s(self) -> float: ...


class TraceEntry(msgspec.Struct, frozen=True):
    """One step of a machine: the event it was given and the effects it answered with."""

    number: int
    machine: str
    event: Any
    effects: tuple[Any, ...]


class TraceLine(msgspec.Struct, frozen=True):
    """A trace entry as written to a file: values beside the names of their classes."""

    number: int
    machine: str
    event: tuple[str, Any]
    effects: tuple[tuple[str, Any], ...]


_line_encoder = msgspec.json.Encoder()
_line_decoder = msgspec.json.Decoder(TraceLine)


class Trace:
    """A ring of all steps of one process's machines.

    Keeps references: events and effects are frozen, and are turned to text only on demand.
    The machines are pure, so replaying the events of a whole trace repeats the effects,
    without a seed or a clock.
    """

    def __init__(self, entries_max: int = TRACE_ENTRIES_MAX) -> None:
        self._entries: deque[TraceEntry] = deque(maxlen=entries_max)
        self.count = 0

    def record(self, machine: str, event: TimedEvent, effects: Sequence[object]) -> None:
        """Append one step. Belongs to one thread."""
        self.count += 1
        self._entries.append(TraceEntry(self.count, machine, event, tuple(effects)))

    def entries(self) -> list[TraceEntry]:
        """Return the entries still held, oldest first. Any thread."""
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # appended to meanwhile; an append is far shorter than a copy
                continue

    def story(self, key: str, value: object) -> Story:
        """Return the history of one operation: all events and effects with field `key=value`.

        Looks into nested values, so `story("order", 7)` finds the order, its sending and all
        answers to it.
        """
        story = Story(f"{key} {value}")
        for entry in self.entries():
            now_s = cast(float, entry.event.now_s)
            if _mentions(entry.event, key, value):
                story.add(now_s, f"{entry.machine} <- {entry.event}")
            for effect in entry.effects:
                if _mentions(effect, key, value):
                    story.add(now_s, f"{entry.machine} -> {effect}")
        return story

    def dump(self, path: str | Path) -> int:
        """Write the entries held as JSON lines, and return how many. Replaces the file."""
        entries = self.entries()
        with open(path, "wb") as file:
            for entry in entries:
                line = TraceLine(
                    entry.number,
                    entry.machine,
                    _named(entry.event),
                    tuple(_named(effect) for effect in entry.effects),
                )
                file.write(_line_encoder.encode(line) + b"\n")
        return len(entries)


def load_trace(path: str | Path, classes: Mapping[str, type]) -> Iterator[TraceEntry]:
    """Yield the entries of a dumped trace as the objects they were.

    `classes`: name -> class for every event and effect in it. Raises KeyError for a class not
    named there and msgspec.ValidationError for fields that no longer fit it.
    """
    with open(path, "rb") as file:
        for text in file:
            line = _line_decoder.decode(text)
            values: list[Any] = [
                msgspec.convert(fields, classes[name])
                for name, fields in (line.event, *line.effects)
            ]
            yield TraceEntry(line.number, line.machine, values[0], tuple(values[1:]))


def _named(value: object) -> tuple[str, Any]:
    return type(value).__name__, msgspec.to_builtins(value)


def _mentions(value: object, key: str, wanted: object) -> bool:
    if isinstance(value, msgspec.Struct):
        return any(
            (name == key and getattr(value, name) == wanted)
            or _mentions(getattr(value, name), key, wanted)
            for name in value.__struct_fields__
        )
    if isinstance(value, tuple | list):
        return any(_mentions(item, key, wanted) for item in value)
    return False


class StateLog:
    """Log one line per change of a state, and not more often than somebody can read.

    `role` names the process in front of every line (`coordinator qwen-1`). Repeating the
    state that was logged last says nothing. Changes within `interval_s` of the last line of
    the same subject are held back; the next line says how many, and `flush` brings the
    newest one out once the interval has passed.
    """

    def __init__(self, role: str, interval_s: float = LOG_INTERVAL_S) -> None:
        self.role = role
        self.suppressed = 0
        self._interval_s = interval_s
        self._logger = logging.getLogger("kvadmit")
        self._subjects: dict[str, _Subject] = {}

    def change(
        self,
        subject: str,
        state: str,
        *,
        level: int = logging.INFO,
        now_s: float | None = None,
    ) -> None:
        """Log that `subject` is now in `state`, unless that is known or comes too soon."""
        now_s = time.monotonic() if now_s is None else now_s
        known = self._subjects.setdefault(subject, _Subject())
        if known.newest == state:
            return
        known.newest, known.level = state, level
        if now_s < known.next_s:
            known.held_back += 1
            self.suppressed += 1
        else:
            self._write(subject, known, known.held_back, now_s)

    def flush(self, now_s: float | None = None) -> float | None:
        """Log states held back long enough; return when the next will be due, None if none."""
        now_s = time.monotonic() if now_s is None else now_s
        due: list[float] = []
        for subject, known in self._subjects.items():
            if known.logged == known.newest:
                continue  # it came back to where it was: nothing to tell
            if now_s >= known.next_s:
                self._write(subject, known, known.held_back - 1, now_s)
            else:
                due.append(known.next_s)
        return min(due, default=None)

    def forget(self, subject: str) -> None:
        """Drop a subject that is gone, so that the log does not grow with the peers seen."""
        self._subjects.pop(subject, None)

    def _write(self, subject: str, known: _Subject, unsaid: int, now_s: float) -> None:
        tail = f" ({unsaid} changes not shown)" if unsaid else ""
        self._logger.log(known.level, "%s: %s: %s%s", self.role, subject, known.newest, tail)
        known.logged = known.newest
        known.held_back = 0
        known.next_s = now_s + self._interval_s


class _Subject:
    """What the log knows about one subject."""

    __slots__ = ("held_back", "level", "logged", "newest", "next_s")

    def __init__(self) -> None:
        self.newest = ""
        self.logged = ""
        self.level = logging.INFO
        self.held_back = 0
        self.next_s = 0.0
