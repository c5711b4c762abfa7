"""Blocking calls of one thread that another thread answers.

Owns: one outcome per named call, settled once. Must not know: what a call is for.
"""

from __future__ import annotations

import concurrent.futures

from kvadmit.errors import KvAdmitError, PeerTimeoutError


class PendingCalls:
    """Calls by name; each is settled at most once, before or after somebody waits for it."""

    def __init__(self, *names: str) -> None:
        self._outcomes: dict[str, concurrent.futures.Future[None]] = {
            name: concurrent.futures.Future() for name in names
        }

    def wait(self, name: str, timeout_s: float) -> None:
        """Wait for the outcome of `name`; raise its error, or PeerTimeoutError. Any thread."""
        try:
            self._outcomes[name].result(timeout_s)
        except TimeoutError:
            raise PeerTimeoutError("coordinator", f"settle {name}", timeout_s) from None

    def is_settled(self, name: str) -> bool:
        """Say whether `name` has its outcome."""
        return self._outcomes[name].done()

    def settle(self, name: str, error: KvAdmitError | None = None) -> None:
        """Give `name` its outcome unless it has one. One thread."""
        outcome = self._outcomes[name]
        if outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    def fail(self, error: KvAdmitError) -> None:
        """Settle with `error` whatever has no outcome yet."""
        for name in self._outcomes:
            self.settle(name, error)
