"""How a worker ends: who asked, how often, and how long it may take."""

from __future__ import annotations

import math
import time

#: How long a worker that holds no job may take to end: longer than a slow statement.
_LONGEST_FAREWELL = 1.5


class Shutdown:
    """Of a worker, or of the parent of several. Asked for by any thread and by signal handlers.

        runs ──asked, or its own decision──▶ lets jobs finish ──deadline, or asked again──▶ ends

    Moments are those of `time.monotonic`.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        # No lock guards them: a signal handler that waits for one may have interrupted its holder.
        self._asked: list[float] = []
        self._decided: list[float] = []

    def ask(self) -> None:
        """Somebody wants the worker to end; asked twice, at once."""
        self._asked.append(time.monotonic())

    def decide(self) -> None:
        """The worker wants to end. Who asks it to afterwards, asks for the first time."""
        self._decided.append(time.monotonic())

    @property
    def has_begun(self) -> bool:
        """Whether it was asked or decided."""
        return bool(self._asked or self._decided)

    @property
    def at_once(self) -> bool:
        """Whether somebody asked a second time."""
        return len(self._asked) > 1

    @property
    def deadline(self) -> float:
        """Until when jobs may run; infinity as long as nobody asked."""
        deadline = self._began_at() + self._timeout
        return min(deadline, self._asked[1]) if self.at_once else deadline

    def time_is_up(self, *, idle_since: float | None) -> float:
        """When the worker should be gone. `idle_since` is None while it holds jobs."""
        if idle_since is None or self.at_once:
            return self.deadline
        return min(self.deadline, max(self._began_at(), idle_since) + _LONGEST_FAREWELL)

    def _began_at(self) -> float:
        return min([*self._asked[:1], *self._decided[:1]], default=math.inf)
