"""What a channel keeps per peer: the queue of unsent messages, sequences and counters.

Owns: which queued message a newer one replaces, and the bound of the queue. Must not know:
sockets, or what a message means beyond which types are levels.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvadmit.messages import Allowance, Message, Report

LEVELS: tuple[type, ...] = (Report, Allowance)
"""Absolute levels: a newer one of the type makes a queued one worthless."""

QUEUE_MESSAGES_MAX = 1024
"""Messages kept for a peer that does not read. An instance has some tens under way at most."""


class ChannelCounters(msgspec.Struct):
    """What went through a socket and what did not. Written by its owner thread only."""

    sent: int = 0
    received: int = 0
    queued: int = 0
    levels_replaced: int = 0
    queue_full: int = 0
    unreachable: int = 0
    sequence_gaps: int = 0
    sequence_repeats: int = 0
    bad_messages: int = 0
    version_errors: int = 0
    without_lease: int = 0
    from_dropped: int = 0


class Outbox:
    """Messages a peer has not taken yet, oldest first; of each level only the newest.

    A newer level takes its place at the *end*: everything sent before it still arrives first.
    """

    def __init__(self, messages_max: int = QUEUE_MESSAGES_MAX) -> None:
        self.messages_max = messages_max
        self.replaced = 0
        self._messages: OrderedDict[object, Message] = OrderedDict()
        self._number = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> bool:
        """Queue `message`. False, and nothing changed, if the queue is full."""
        key: object
        if isinstance(message, LEVELS):
            key = type(message)
            if self._messages.pop(key, None) is not None:
                self.replaced += 1
        else:
            self._number += 1
            key = self._number
        if len(self._messages) >= self.messages_max:
            return False
        self._messages[key] = message
        return True

    def first(self) -> Message:
        """Return the message to send next. The queue must not be empty."""
        return next(iter(self._messages.values()))

    def remove_first(self) -> None:
        """Forget the message `first` returned: the socket has taken it."""
        self._messages.popitem(last=False)


class Peer:
    """Both directions of one peer: the queue, the counters of its sequence, its fall."""

    __slots__ = ("dropped", "name", "outbox", "sequence_in", "sequence_out")

    def __init__(self, name: str) -> None:
        self.name = name
        self.outbox = Outbox()
        self.sequence_in = 0
        self.sequence_out = 0
        self.dropped = False
