"""Many threads at once, each with a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import connections

T = TypeVar("T")


def together(count: int, act: Callable[[int], T]) -> list[T]:
    """Call `act(0)` … `act(count - 1)` from as many threads, released by one barrier."""
    barrier = threading.Barrier(count)

    def run(number: int) -> T:
        barrier.wait(timeout=30)
        return closing_connections(act)(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def in_thread(act: Callable[[], T]) -> T:
    """Call `act` from another thread, so over another connection, and wait for it."""
    return together(1, lambda _number: act())[0]


def closing_connections(act: Callable[[int], T]) -> Callable[[int], T]:
    def run(number: int) -> T:
        try:
            return act(number)
        finally:
            connections.close_all()

    return run
