"""What one run left behind: the outcome of every request, the level of every instance over time.

Owns: the records that instances send and that table, JSON and plot are made of. Must not
know: how they were measured.
"""

from __future__ import annotations

import msgspec

COUNTS = (
    "allocation_misses",
    "no_slot_steps",
    "headroom_rejections",
    "timer_probes",
    "resends",
    "device_reads",
    "held_steps",
    "growths",
)
"""What the policies count. None where the policy has no such thing."""

SPREADS: dict[str, tuple[str, ...]] = {
    "grow_latency_s": ("p50", "p99"),
    "grant_wait_s": ("p50", "p99"),
    "prepare_call_s": ("p50", "p99"),
    "commit_call_s": ("p50", "p99"),
    "decommit_call_s": ("p50", "p99"),
    "scheduler_wait_us": ("p50", "p99", "max"),
    "scheduler_overlapped_us": ("p50", "p99", "max"),
}
"""What the policies time, and the figures of each that are reported."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One request's outcome. Times on the host's monotonic clock, in seconds.

    `error`: why it failed, "" if it completed. `first_s` is None if no token came. `probe`:
    one of the one-block requests that need no growth, kept out of every other figure. `digest`
    stands for the ids of the tokens that came: equal ids, equal digests. `silences`: from when to
    when its instance gave no token to anybody, while this one was being answered.
    """

    index: int
    submitted_s: float
    first_s: float | None
    last_s: float | None
    tokens: int
    error: str = ""
    probe: bool = False
    digest: str = ""
    silences: list[tuple[float, float]] = []

    @property
    def ttft_s(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_s is None else self.first_s - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at one moment: bytes of KV memory held (all ranks) and requests by state."""

    at_s: float
    held_bytes: int
    running: int
    waiting: int


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's counters over one run; None for what its policy does not have."""

    preemptions: int | None = None
    counts: dict[str, int | None] = {}
    spreads: dict[str, dict[str, float | None] | None] = {}
    peak_held_bytes: int | None = None
    engine_core_device_bytes: int | None = None


class InstanceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one instance did in one run."""

    name: str
    answered: list[Answered]
    levels: list[Level]
    counted: Counted


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs at one moment: bytes in use on each, by whomever. Monotonic clock."""

    at_s: float
    used_bytes: list[int]


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one policy. `started_s` on the monotonic clock."""

    policy: str
    repeat: int
    scenario: str
    engine: str
    started_s: float
    instances: list[InstanceOutcome]
    devices: list[DeviceUse] = []
