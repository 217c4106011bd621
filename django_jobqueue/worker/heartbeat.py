"""The heartbeat: extends the locks of everything in hand, on a thread and connection of its own,
so that neither a slow claim nor a busy interpreter loses a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from django.db import connections

from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.execution import JobContext
from django_jobqueue.models import ProcessingJob
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.worker.connection import bookkeeping_connection, is_outage
from django_jobqueue.worker.hand import Hand


class Heartbeat:
    """Beats until stopped. `on_crash` is told when the thread ends by an error of its own."""

    def __init__(self, hand: Hand, *, database: str, on_crash: Callable[[BaseException], None]):
        self._hand = hand
        self._database = database
        self._on_crash = on_crash
        self._stopped = threading.Event()
        # A daemon, so that a hung connection cannot keep the process; `stop` joins it.
        self._thread = threading.Thread(target=self._run, name="jobqueue-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end and wait for it, a second at most."""
        self._stopped.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        try:
            with bookkeeping_connection(self._database, "heartbeat"):
                while not self._stopped.wait(jobqueue_settings().heartbeat_interval):
                    self._beat()
        except BaseException as error:
            self._on_crash(error)

    def _beat(self) -> None:
        try:
            self._extend()
        except Exception as error:
            if not is_outage(error):
                raise
            # The locks run out by themselves, and each context knows when. Try again next time.
            connections[self._database].close()

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
