"""The job table as the deciding thread sees it: a connection that comes back, and ends that are
recorded whatever they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobqueue import signals
from django_jobqueue.failure import described
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Failed, Outcome, Refused
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.sqlstates import is_outage
from django_jobqueue.states import Status
from django_jobqueue.worker.connection import is_spoilt, reopen
from django_jobqueue.worker.hand import claim_key
from django_jobqueue.worker.outage import Outage
from django_jobqueue.worker.watchdog import Conversation, lock_length


class Bookkeeping:
    """Belongs to the deciding thread, inside its `bookkeeping_connection`."""

    def __init__(self, database: str, *, worker: str) -> None:
        self._database = database
        self._worker = worker
        self.outage = Outage()
        self.conversation = Conversation("coordinator", patience=lock_length)
        self._given_up: set[tuple[int, int]] = set()

    def jobs(self) -> JobQuerySet:
        """Every move, over this connection."""
        self.undo_open_transaction()
        self.conversation.asks_again()
        return ProcessingJob.objects.using(self._database)

    def undo_open_transaction(self) -> bool:
        """Receivers of signals use this connection too. Returns whether one had to be undone."""
        if not is_spoilt(self._connection):
            return False
        reason = "A receiver left a transaction open on the worker's connection: rolled back."
        signals.tell(signals.worker_step_failed, self, error=RuntimeError(reason))
        reopen(self._connection)
        return True

    # --- outages -------------------------------------------------------------------------------

    @contextmanager
    def retried_after_outages(self) -> Iterator[None]:
        """The database may be away meanwhile: then the next try waits a bit longer."""
        try:
            with self.conversation.asking(self._connection):
                yield
        except Exception as error:
            if not is_outage(error):
                raise
            self._connection.close()
            self.outage.goes_on()
            signals.tell(signals.worker_outage, self, error=error, wait=self.outage.pause)
        else:
            if self.outage.ended():
                signals.tell(signals.worker_recovered, self)

    @contextmanager
    def in_spite_of_errors(self) -> Iterator[None]:
        """A last step: when it fails, the locks run out and other workers rescue the jobs."""
        try:
            with self.conversation.asking(self._connection):
                yield
        except Exception as error:
            if is_outage(error):
                self._connection.close()
            signals.tell(signals.worker_step_failed, self, error=error)

    # --- claims --------------------------------------------------------------------------------

    def claims(self) -> list[ProcessingJob]:
        """What the table says this worker holds."""
        rows = self.jobs().filter(status=Status.PROCESSING, locked_by=self._worker)
        # Asked every few seconds, and mostly for nothing: not with the payloads.
        return [job for job in rows.defer("payload") if claim_key(job) not in self._given_up]

    def release(self, jobs: Sequence[ProcessingJob]) -> int:
        """Give claims back. Returns how many were.

        Those whose row somebody has locked come last, so that no other has to wait for it.
        """
        released = set(self.jobs().release(jobs, wait=False))
        locked = [job for job in jobs if job.pk not in released]
        return len(released) + len(self.jobs().release(locked))

    # --- ends ----------------------------------------------------------------------------------

    def settle(self, outcomes: Sequence[Outcome]) -> set[int]:
        """Record how attempts ended. Returns the ids whose row somebody has locked.

        Those keep their place: their turn comes when the row is free. What was recorded already
        is not recorded, or told, again.
        """
        self._settle([one for one in outcomes if one.job.status == Status.PROCESSING])
        missed = [
            one.job
            for one in outcomes
            if one.job.status == Status.PROCESSING and claim_key(one.job) not in self._given_up
        ]
        return self.jobs().still_held(missed) if missed else set()

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self.jobs().settle(outcomes, wait=False)
        except Exception as error:
            if is_outage(error):
                raise
            self._settle_in_spite_of(error, outcomes)

    def _settle_in_spite_of(self, error: Exception, outcomes: Sequence[Outcome]) -> None:
        """One outcome that cannot be stored keeps no job from an end, not even its own."""
        if len(outcomes) == 1:
            self._settle_in_plain_words(error, outcomes[0])
            return
        for outcome in outcomes:
            self._settle([outcome])

    def _settle_in_plain_words(self, error: Exception, outcome: Outcome) -> None:
        try:
            self.jobs().settle([_storable_instead(outcome, error)], wait=False)
        except Exception as still:
            if is_outage(still):
                raise
            # Not for any words: its lock runs out, and a rescue counts the attempt as lost.
            self._given_up.add(claim_key(outcome.job))
            signals.tell(signals.worker_step_failed, self, error=still)

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self._database]


def _storable_instead(outcome: Outcome, error: Exception) -> Outcome:
    """The same verdict in words that are sure to be stored."""
    reason = described(f"How this attempt ended could not be stored ({type(error).__name__}).")
    if isinstance(outcome, Failed):
        return dataclasses.replace(outcome, failure=reason)
    # A success whose result cannot be stored: its work is done, so no retry.
    return Refused(job=outcome.job, failure=reason, seconds=outcome.seconds)
