"""The one way to wait in a test: for a condition, never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = 10.0, message: str = "") -> T:
    """The first true value of the condition.

    Raises AssertionError with the message when there is none within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(message or f"Nothing came true within {timeout} seconds.")
        time.sleep(0.02)
