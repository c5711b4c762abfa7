"""The hand-over between the scheduler thread and the coordinator thread."""

from __future__ import annotations

import threading

from kvadmit.port import (
    NO_LIMIT,
    Ceiling,
    Limit,
    PoolEvent,
    PoolLevels,
    PoolOrder,
    PoolPort,
    PoolReturned,
    Resident,
)


class Wakes:
    """Counts the wake-ups of each side."""

    def __init__(self) -> None:
        self.pool = self.coordinator = 0

    def wake_pool(self) -> None:
        self.pool += 1

    def wake_coordinator(self) -> None:
        self.coordinator += 1

    def port(self) -> PoolPort:
        return PoolPort(wake_pool=self.wake_pool, wake_coordinator=self.wake_coordinator)


def test_orders_come_out_once_and_in_order_and_wake_the_pool() -> None:
    wakes = Wakes()
    port = wakes.port()
    assert port.take() == []
    orders: list[PoolOrder] = [Ceiling(9), Resident(((1, 2),)), Ceiling(3)]
    for order in orders:
        port.give(order)
    assert port.orders
    assert (wakes.pool, wakes.coordinator) == (3, 0)
    assert port.take() == orders
    assert port.take() == []


def test_events_come_out_once_and_in_order_and_wake_the_coordinator() -> None:
    wakes = Wakes()
    port = wakes.port()
    events: list[PoolEvent] = [
        PoolLevels(resident=4),
        PoolReturned(((2, 2),), fence=7),
        PoolLevels(resident=2),
    ]
    for event in events:
        port.post(event)
    assert (wakes.pool, wakes.coordinator) == (0, 3)
    assert port.collect() == events
    assert port.collect() == []


def test_an_order_is_in_the_port_before_the_pool_is_woken() -> None:
    """A woken engine looks once and parks again: what it does not see then is lost."""
    seen: list[object] = []
    port = PoolPort(
        wake_pool=lambda: seen.extend([*port.take(), port.limit]),
        wake_coordinator=lambda: seen.extend(port.collect()),
    )
    port.give(Ceiling(3))
    port.give(Limit(2))
    port.post(PoolLevels(resident=3))
    assert seen == [Ceiling(3), NO_LIMIT, 2, PoolLevels(resident=3)]


def test_a_limit_is_a_level_and_waits_in_no_queue() -> None:
    wakes = Wakes()
    port = wakes.port()
    assert port.limit == NO_LIMIT
    for extents in (5, 3):
        port.give(Limit(extents))
    assert (port.limit, wakes.pool) == (3, 2)
    assert port.take() == []


def test_nothing_is_held_at_first() -> None:
    assert Wakes().port().hold_until_s == 0.0


def test_two_threads_lose_and_double_nothing() -> None:
    port = Wakes().port()
    total = 5000
    taken: list[object] = []
    done = threading.Event()

    def drain() -> None:
        while not done.is_set() or port.orders:
            taken.extend(port.take())

    reader = threading.Thread(target=drain)
    reader.start()
    for number in range(total):
        port.give(Ceiling(number))
    done.set()
    reader.join()
    assert taken == [Ceiling(number) for number in range(total)]
