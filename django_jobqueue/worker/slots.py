"""The slots of a worker: one for each thread that runs handlers."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from django_jobqueue.execution import JobContext
from django_jobqueue.worker.hand import Hand

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob


#: Seconds for a coroutine that was cancelled, or a handler that looks at its context.
_TIME_TO_COME_BACK = 2.0


class Slots:
    """What is in hand takes a slot. So does what is overdue: an attempt that was failed at its
    timeout, but whose thread has not come back. When it has not some time later, it hangs. Belongs
    to the coordinator."""

    def __init__(self, count: int, hand: Hand) -> None:
        self.count = count
        self._hand = hand
        self._overdue = Hand()
        self._full_since: float | None = None

    @property
    def busy(self) -> int:
        """How many are taken."""
        overdue = self._overdue.held()
        return len(self._hand) + sum(not self._hand.holds(one.claim) for one in overdue)

    @property
    def free(self) -> int:
        """How many are not."""
        return self.count - self.busy

    def hung(self) -> list[JobContext]:
        """The handlers that do not come back."""
        return [one for one in self._overdue.held() if -one.seconds_left >= _TIME_TO_COME_BACK]

    @property
    def all_hang(self) -> bool:
        """Whether no job can start any more."""
        return len(self.hung()) == self.count

    def fail_overdue(self) -> list[JobContext]:
        """Cancel the attempts whose timeout is over."""
        overdue = [context for context in self._running() if context.seconds_left <= 0]
        for context in overdue:
            context.cancel()
        self._overdue.take(overdue)
        return overdue

    def come_back(self, job: ProcessingJob) -> JobContext | None:
        """The thread of this claim has ended. Returns its context if it was overdue."""
        contexts = self._overdue.let_go([job])
        return contexts[0] if contexts else None

    def next_change(self) -> float:
        """Seconds until the next attempt is overdue, or hangs."""
        timeouts = [context.seconds_left for context in self._running()]
        hangs = [one.seconds_left + _TIME_TO_COME_BACK for one in self._overdue.held()]
        return min(timeouts + [left for left in hangs if left > 0], default=math.inf)

    def note_whether_full(self) -> None:
        """To be called whenever it may have changed."""
        if self.free > 0:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = time.monotonic()

    def full_for(self) -> float | None:
        """For how many seconds no slot has been free; None when one is."""
        return None if self._full_since is None else time.monotonic() - self._full_since

    def _running(self) -> list[JobContext]:
        return [context for context in self._hand.held() if not self._overdue.holds(context.claim)]
