"""The heartbeat: extends the locks of everything in hand, on a thread and connection of its own,
so that neither a slow claim nor a busy interpreter loses a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobqueue import signals
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.execution import JobContext
from django_jobqueue.models import ProcessingJob
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.sqlstates import is_outage
from django_jobqueue.worker.connection import bookkeeping_connection
from django_jobqueue.worker.hand import Hand
from django_jobqueue.worker.outage import Outage
from django_jobqueue.worker.watchdog import Conversation

_SHORTEST_PATIENCE = 2.0


class Heartbeat:
    """Beats until stopped. `on_crash` is told when the thread ends by an error of its own."""

    def __init__(
        self, hand: Hand, *, database: str, on_crash: Callable[[BaseException], None]
    ) -> None:
        self._hand = hand
        self._database = database
        self._on_crash = on_crash
        self._outage = Outage()
        self.conversation = Conversation("heartbeat", patience=_patience)
        self._stopped = threading.Event()
        # A daemon, so that a hung connection cannot keep the process; `stop` joins it.
        self._thread = threading.Thread(target=self._run, name="jobqueue-heartbeat", daemon=True)

    @property
    def fails(self) -> bool:
        """Whether the last beat did not reach the database: what is claimed now could be lost."""
        return self._outage.lasts

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, wait: float) -> None:
        """Ask the thread to end and wait for it, so many seconds at most."""
        self._stopped.set()
        self._thread.join(timeout=wait)

    def _run(self) -> None:
        try:
            with bookkeeping_connection(self._database, "heartbeat") as connection:
                while not self._stopped.wait(self._pause()):
                    self._beat(connection)
        except BaseException as error:
            self._on_crash(error)

    def _pause(self) -> float:
        interval = jobqueue_settings().heartbeat_interval
        return min(interval, self._outage.seconds_left) if self.fails else interval

    def _beat(self, connection: BaseDatabaseWrapper) -> None:
        try:
            with self.conversation.asking(connection):
                # Also when there is nothing to extend, to know whether it could.
                connection.ensure_connection()
                self.conversation.asks_again()
                self._extend()
        except Exception as error:
            if not is_outage(error):
                raise
            # The locks run out by themselves, and each context knows when. Try again soon.
            connections[self._database].close()
            self._outage.goes_on()
            signals.tell(signals.heartbeat_failed, self, error=error, wait=self._outage.pause)
        else:
            self._outage.ended()

    def _extend(self) -> None:
        good_until = time.monotonic() + jobqueue_settings().STALE_LOCK_AFTER
        held = self._hand.held()
        extended = set(self._jobs.extend_locks([context.claim for context in held]))
        for context in held:
            if context.claim.pk in extended:
                context.extended(good_until=good_until)
        self._look_after([context for context in held if context.claim.pk not in extended])

    def _look_after(self, missed: list[JobContext]) -> None:
        """A row somebody else had locked was skipped, not lost: the next beat tries it again."""
        if not missed:
            return
        held = self._jobs.still_held([context.claim for context in missed])
        for context in missed:
            # One that is in hand no more was settled meanwhile.
            if context.claim.pk not in held and self._hand.holds(context.claim):
                context.lose_lock()

    @property
    def _jobs(self) -> JobQuerySet:
        return ProcessingJob.objects.using(self._database)


def _patience() -> float:
    """An answer later than the next beat is no use."""
    return max(_SHORTEST_PATIENCE, jobqueue_settings().heartbeat_interval)
