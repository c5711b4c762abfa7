"""Orders the group has sent to its ranks, and which ranks still owe an answer.

Owns: order numbers, one `Operation` per order, and what all answers together say. Must not
know: what happens next (the group machine decides that).
"""

from __future__ import annotations

from kvadmit.extents import from_runs, to_runs
from kvadmit.messages import Answer, MapGrant, OrderKind


class Operation:
    """One order to all ranks and the answers so far."""

    __slots__ = ("answers", "extents", "grant", "kind", "order", "ranks", "wait_s")

    def __init__(self, grant: MapGrant, extents: list[int], ranks: int) -> None:
        self.grant = grant
        self.order = grant.order
        self.kind: OrderKind = grant.kind
        self.extents = extents
        self.ranks = ranks
        self.answers: dict[int, Answer] = {}
        self.wait_s = 0.0

    @property
    def waiting_ranks(self) -> set[int]:
        """Ranks that have not answered."""
        return set(range(self.ranks)) - set(self.answers)

    @property
    def all_done(self) -> bool:
        """Whether every rank reached the end state with every extent."""
        return all(answer.outcome == "done" for answer in self.answers.values())

    @property
    def refused_ranks(self) -> list[int]:
        """Ranks whose device had no room."""
        return [rank for rank, answer in self.answers.items() if answer.outcome == "refused"]

    @property
    def failed_ranks(self) -> list[int]:
        """Ranks that failed for another reason than room."""
        return [rank for rank, answer in self.answers.items() if answer.outcome == "failed"]

    @property
    def done_everywhere(self) -> set[int]:
        """Extents that reached the end state on every rank."""
        done = set(self.extents)
        for answer in self.answers.values():
            done &= set(from_runs(answer.done))
        return done

    @property
    def touched(self) -> set[int]:
        """Extents on which some rank made a map call."""
        touched: set[int] = set()
        for answer in self.answers.values():
            touched |= set(from_runs(answer.done)) | set(from_runs(answer.partial))
        return touched

    @property
    def reasons(self) -> str:
        """Why ranks did not do it, one clause per rank."""
        return "; ".join(
            f"rank {rank}: {answer.reason}"
            for rank, answer in sorted(self.answers.items())
            if answer.outcome != "done"
        )


class OrderBook:
    """All open operations of one group. Numbers grow by one and are never reused."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.open_operations: dict[int, Operation] = {}
        self._last_order = 0

    def open(self, kind: OrderKind, extents: list[int], fence: int) -> Operation:
        """Number a new order for `extents`; it is open until every rank has answered."""
        self._last_order += 1
        grant = MapGrant(order=self._last_order, kind=kind, extents=to_runs(extents), fence=fence)
        operation = Operation(grant, extents, self.ranks)
        self.open_operations[operation.order] = operation
        return operation

    def answer(self, rank: int, answer: Answer) -> Operation | None:
        """Note an answer; return the operation once this was the last one it waited for."""
        operation = self.open_operations.get(answer.order)
        if operation is None or rank in operation.answers:
            return None
        operation.answers[rank] = answer
        if operation.waiting_ranks:
            return None
        del self.open_operations[answer.order]
        return operation

    @property
    def growing(self) -> bool:
        """Whether a prepare, commit or abort is under way: one growth at a time."""
        return any(
            operation.kind in ("prepare", "commit", "abort")
            for operation in self.open_operations.values()
        )

    def snapshot(self) -> list[dict[str, object]]:
        """Return the open orders as plain data, oldest first."""
        return [
            {
                "order": operation.order,
                "kind": operation.kind,
                "extents": len(operation.extents),
                "waiting_ranks": sorted(operation.waiting_ranks),
            }
            for operation in self.open_operations.values()
        ]
