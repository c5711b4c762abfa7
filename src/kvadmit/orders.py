"""Orders the group has sent to its ranks, and which ranks still owe an answer.

Owns: order numbers, one `Operation` per order, when an unanswered one is sent again, and
what all answers together say. Must not know: what happens next (the group machine decides).
"""

from __future__ import annotations

from kvadmit.errors import RemoteProtocolError
from kvadmit.extents import from_runs, to_runs
from kvadmit.group_events import Effect, Note, SendAgent, StartTimer, StopTimer
from kvadmit.messages import Answer, MapGrant, OrderKind

ORDER_WAIT_S = 2.0
"""An unanswered order is sent again after this long, then after twice as long, and so on."""
ORDER_WAIT_S_MAX = 30.0


class Operation:
    """One order to all ranks and the answers so far."""

    __slots__ = ("answers", "extents", "grant", "kind", "order", "ranks", "repeats", "wait_s")

    def __init__(self, grant: MapGrant, extents: list[int], ranks: int) -> None:
        self.grant = grant
        self.order = grant.order
        self.kind: OrderKind = grant.kind
        self.extents = extents
        self.ranks = ranks
        self.answers: dict[int, Answer] = {}
        self.repeats = 0
        """How often it was sent again; -1 before it is sent at all."""
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
    def took_s(self) -> float:
        """For how long the slowest rank's driver was at it."""
        return max(answer.took_s for answer in self.answers.values())

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

    def send(
        self,
        kind: OrderKind,
        extents: list[int],
        now_s: float,
        effects: list[Effect],
        *,
        fence: int = 0,
        later: bool = False,
    ) -> None:
        """Give `extents` a new order and send it to every rank.

        It stays open until every rank has answered. `later`: send it only after the longest
        wait, since the ranks have just failed to do the same.
        """
        self._last_order += 1
        grant = MapGrant(order=self._last_order, kind=kind, extents=to_runs(extents), fence=fence)
        operation = Operation(grant, list(extents), self.ranks)
        self.open_operations[operation.order] = operation
        # A fence passes when the worker's step does, which may be a long one.
        operation.repeats = -1 if later else 0
        patient = later or kind in ("fence", "decommit")
        operation.wait_s = ORDER_WAIT_S_MAX if patient else ORDER_WAIT_S
        effects.append(StartTimer(f"answer:{operation.order}", now_s + operation.wait_s))
        if not later:
            effects.extend(SendAgent(rank, grant) for rank in range(self.ranks))

    def send_again(
        self, order: int, lost_ranks: set[int], now_s: float, effects: list[Effect]
    ) -> int:
        """Repeat an order to the ranks that owe its answer; return how many those are."""
        operation = self.open_operations.get(order)
        if operation is None:
            return 0
        waiting = sorted(operation.waiting_ranks - lost_ranks)
        operation.repeats += 1
        if operation.repeats == 1:
            ranks = ", ".join(map(str, waiting))
            text = (
                f"no answer to {operation.kind} {order} from rank {ranks} "
                f"after {operation.wait_s:.0f} s; asking again"
            )
            effects.append(Note("warning", text))
        operation.wait_s = min(2 * operation.wait_s, ORDER_WAIT_S_MAX)
        effects.append(StartTimer(f"answer:{order}", now_s + operation.wait_s))
        effects.extend(SendAgent(rank, operation.grant) for rank in waiting)
        return len(waiting)

    def answer(self, rank: int, answer: Answer, effects: list[Effect]) -> Operation | None:
        """Note an answer; return the operation once this was the last one it waited for.

        Raises RemoteProtocolError, changing nothing, for an answer to another order than ours.
        """
        operation = self.open_operations.get(answer.order)
        if operation is None or rank in operation.answers:
            return None
        named = {*from_runs(answer.done), *from_runs(answer.partial)}
        if answer.kind != operation.kind or not named <= set(operation.extents):
            raise RemoteProtocolError(
                f"rank {rank} answers {operation.kind} {operation.order} of "
                f"{operation.grant.extents} as {answer.kind} of {answer.done} {answer.partial}"
            )
        operation.answers[rank] = answer
        if operation.waiting_ranks:
            return None
        del self.open_operations[answer.order]
        effects.append(StopTimer(f"answer:{answer.order}"))
        return operation

    @property
    def growing(self) -> bool:
        """Whether a prepare, commit or abort is under way: one growth at a time."""
        return any(
            operation.kind in ("prepare", "commit", "abort")
            for operation in self.open_operations.values()
        )

    def silent_ranks(self, lost_ranks: set[int]) -> tuple[int, ...]:
        """Return the ranks that had to be asked again and have not answered, lowest first."""
        silent: set[int] = set()
        for operation in self.open_operations.values():
            if operation.repeats > 0:
                silent |= operation.waiting_ranks
        return tuple(sorted(silent - lost_ranks))

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
