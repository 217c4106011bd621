"""The pauses between two tries while the database is away."""

from __future__ import annotations

import random
import time

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 5.0


class Outage:
    """Whether there is one, and when to try again. `pause` is the last pause in seconds."""

    def __init__(self) -> None:
        self.pause = 0.0
        self._next_try_at = 0.0

    @property
    def lasts(self) -> bool:
        """Whether the last try failed."""
        return self.pause > 0

    @property
    def seconds_left(self) -> float:
        """Until the next try; 0 when it is due, or when there is no outage."""
        return max(0.0, self._next_try_at - time.monotonic())

    def goes_on(self) -> None:
        """Another try failed: the next pause is longer."""
        self.pause = jittered(min(max(_FIRST_PAUSE, self.pause * 2), _LONGEST_PAUSE))
        self._next_try_at = time.monotonic() + self.pause

    def ended(self) -> bool:
        """A try worked. Returns whether there was an outage."""
        lasted, self.pause, self._next_try_at = self.lasts, 0.0, 0.0
        return lasted


def jittered(seconds: float) -> float:
    """Up to a fifth less, so that workers started together do not ask together."""
    return seconds * random.uniform(0.8, 1.0)
