"""How long a failed job waits for its retry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: From the number of the attempt that failed (1 for the first) to the wait in seconds.
Backoff = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`least(attempts, most) × step` seconds: the wait grows evenly, then stays.

    The default policy. With step 30 and most 10 the waits are 30 s, 60 s, … 300 s, 300 s.
    """

    step: float = 30
    most: int = 10

    def __call__(self, attempts: int) -> float:
        return min(attempts, self.most) * self.step
