"""The worker: one thread decides, and all its state is its own.

    claim ──▶ executor thread runs the handler ──▶ outcome in the inbox ──▶ settle

Everything reaches the deciding thread through its inbox: outcomes, the request to stop, a crash of
another thread. What could not be recorded because the database is away stays in hand, with its
heartbeat, and is recorded when it answers again.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Union

from django.db import connections

from django_jobqueue import signals
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.execution import JobContext
from django_jobqueue.failure import described
from django_jobqueue.handlers import registry
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Failed, Outcome, Refused, failed
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.states import Status
from django_jobqueue.stats import due_for_unknown_handlers
from django_jobqueue.worker.connection import (
    bookkeeping_connection,
    is_outage,
    is_spoilt,
    reopen,
)
from django_jobqueue.worker.executor import Executor
from django_jobqueue.worker.hand import Hand
from django_jobqueue.worker.heartbeat import Heartbeat
from django_jobqueue.worker.options import WorkerOptions
from django_jobqueue.worker.registration import Registration
from django_jobqueue.worker.summary import Summary

_SIGN_OF_LIFE_EVERY = 10.0
_LOOK_FOR_UNKNOWN_EVERY = 60.0
_FIRST_OUTAGE_WAIT = 0.5
_LONGEST_OUTAGE_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class _Stop:
    reason: str


@dataclass(frozen=True, slots=True)
class _Crash:
    error: BaseException


_Message = Union[Outcome, _Stop, _Crash]  # noqa: UP007 - evaluated at run time on Python 3.10


class _Every:
    """A chore's clock: due at once, then every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic()

    def due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._seconds
        return True


class Coordinator:
    """Claims jobs, hands them to the executor and settles how they ended.

    `run` blocks in the calling thread until the worker is done; `stop` may be called from any
    thread and from a signal handler.
    """

    def __init__(self, options: WorkerOptions | None = None) -> None:
        self.options = options or WorkerOptions()
        self.summary = Summary()
        # A SimpleQueue: its put may interrupt its own get, so a signal handler may call `stop`.
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._hand = Hand()
        self._finished: list[Outcome] = []
        self._given_up: set[int] = set()
        self._claimed = 0
        self._nothing_due = False
        self._look_again_at = 0.0
        self._stopping = False
        self._deadline = 0.0
        self._outage_wait = 0.0
        self._executor = Executor(
            self.options.threads, on_outcome=self._inbox.put, on_crash=self._report_crash
        )
        self._heartbeat = Heartbeat(
            self._hand, database=self.options.database, on_crash=self._report_crash
        )
        self._registration = Registration(self.options)
        self._rescue_is = _Every(jobqueue_settings().RESCUE_INTERVAL)
        self._sign_of_life_is = _Every(_SIGN_OF_LIFE_EVERY)
        self._look_for_unknown_is = _Every(_LOOK_FOR_UNKNOWN_EVERY)

    def stop(self, reason: str = "asked to") -> None:
        """Finish what runs, within the shutdown timeout. A second call gives it back at once."""
        self._inbox.put(_Stop(reason))

    def run(self) -> Summary:
        """Work until stopped, or until the options say that it is enough.

        An error of the worker itself is raised in the end: by then the jobs that ran have failed
        attempts, and those not started were given back.
        """
        started = time.monotonic()
        try:
            with (
                bookkeeping_connection(self.options.database, "coordinator"),
                self._threads_running(),
            ):
                while not self._done():
                    self._turn()
        finally:
            self.summary.seconds = time.monotonic() - started
            signals.tell(signals.worker_stopped, self, summary=self.summary)
        return self.summary

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        with self._weathering_outages():
            self._settle_finished()
            self._do_chores()
            self._claim_into_free_slots()
        self._read_inbox()

    def _done(self) -> bool:
        if self._stopping:
            return not self._hand or self.summary.at_once or time.monotonic() >= self._deadline
        if self._hand:
            return False
        return not self._claims_left() or (self.options.burst and self._nothing_due)

    def _settle_finished(self) -> None:
        if not self._finished:
            return
        # Let go first: a heartbeat in between would take what is settled for lost.
        contexts = self._hand.let_go(outcome.job for outcome in self._finished)
        try:
            self._settle(self._finished)
            skipped = self._skipped(self._finished)
        except BaseException:
            self._hand.take(contexts)
            raise
        self._count(outcome for outcome in self._finished if outcome.job.pk not in skipped)
        self._hand.take(context for context in contexts if context.claim.pk in skipped)
        self._finished = [outcome for outcome in self._finished if outcome.job.pk in skipped]
        self._nothing_due = False

    def _do_chores(self) -> None:
        if self._outage_wait:
            self._release_strays()
        if self._rescue_is.due():
            self._jobs.rescue_stale_locks()
        if self._sign_of_life_is.due():
            self._registration.beat(busy_slots=len(self._hand))

    def _claim_into_free_slots(self) -> None:
        limit = self._claim_limit()
        if not limit or (self._nothing_due and time.monotonic() < self._look_again_at):
            return
        # From before the statement: the lock holds at least as long as this says.
        good_until = time.monotonic() + jobqueue_settings().STALE_LOCK_AFTER
        claimed = self._jobs.claim(
            worker=self.options.name,
            queues=self.options.queues,
            handlers=registry.names(),
            limit=limit,
        )
        if self._recover_books():
            return  # the claim was part of a transaction that is rolled back now
        self._start([JobContext(job, good_until=good_until) for job in claimed])
        if len(claimed) < limit:
            self._nothing_due = True
            self._look_again_at = time.monotonic() + _jittered(jobqueue_settings().POLL_INTERVAL)
            self._show_unknown_handlers()

    def _read_inbox(self) -> None:
        """Wait for a message, at most until there is something to do, and take all there are."""
        wait = self._idle_seconds()
        try:
            self._receive(self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait())
            while True:
                self._receive(self._inbox.get_nowait())
        except Empty:
            pass

    def _receive(self, message: _Message) -> None:
        if isinstance(message, _Stop):
            self._begin_stopping(message.reason)
        elif isinstance(message, _Crash):
            raise RuntimeError("A thread of this worker ended by an error.") from message.error
        else:
            self._finished.append(message)

    # --- the steps of a turn -------------------------------------------------------------------

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        try:
            self._jobs.settle(outcomes, wait=False)
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
            self._jobs.settle([_storable_instead(outcome, error)], wait=False)
        except Exception as still:
            if is_outage(still):
                raise
            # Not for any words: its lock runs out, and a rescue counts the attempt as lost.
            self._given_up.add(outcome.job.pk)
            signals.tell(signals.worker_step_failed, self, error=still)

    def _skipped(self, outcomes: Sequence[Outcome]) -> set[int]:
        """Those whose row somebody has locked: their turn comes when it is free."""
        missed = [outcome.job for outcome in outcomes if outcome.job.status == Status.PROCESSING]
        return self._jobs.still_held(missed) - self._given_up if missed else set()

    def _start(self, contexts: Sequence[JobContext]) -> None:
        self._claimed += len(contexts)
        self._hand.take(contexts)
        for context in contexts:
            self._executor.submit(context)

    def _claim_limit(self) -> int:
        if self._stopping:
            return 0
        return min(self.options.threads - len(self._hand), self._claims_left())

    def _claims_left(self) -> int:
        if self.options.max_jobs is None:
            return self.options.threads
        return self.options.max_jobs - self._claimed

    def _idle_seconds(self) -> float:
        if self._outage_wait:
            wait = self._outage_wait
        elif not self._claim_limit():
            wait = _SIGN_OF_LIFE_EVERY
        else:
            wait = self._look_again_at - time.monotonic() if self._nothing_due else 0.0
        if self._stopping:
            wait = min(wait, self._deadline - time.monotonic())
        chores = min(jobqueue_settings().RESCUE_INTERVAL, _SIGN_OF_LIFE_EVERY)
        return 0.0 if self._done() else min(wait, chores)

    def _release_strays(self) -> None:
        """A claim may have been committed while its answer was lost with the connection."""
        locked = self._jobs.filter(status=Status.PROCESSING, locked_by=self.options.name)
        strays = locked.exclude(pk__in=self._given_up)
        self._jobs.release([job for job in strays if not self._hand.holds(job)])

    def _show_unknown_handlers(self) -> None:
        if self._look_for_unknown_is.due():
            waiting = due_for_unknown_handlers(
                registry.names(), queues=self.options.queues, using=self.options.database
            )
            if waiting:
                signals.tell(signals.handlers_unknown, self, waiting=waiting)

    def _count(self, outcomes: Iterable[Outcome]) -> None:
        """By what the row says now; one that still says `processing` was another worker's."""
        for outcome in outcomes:
            self.summary.add(Status(outcome.job.status))

    # --- start and end -------------------------------------------------------------------------

    @contextmanager
    def _threads_running(self) -> Iterator[None]:
        """Whatever ends the worker, what it still has is given back before its threads go."""
        self._executor.start()
        self._heartbeat.start()
        signals.tell(signals.worker_started, self, options=self.options, handlers=registry.names())
        try:
            yield
        except Exception as error:
            self._fail_what_runs(error)
            raise
        finally:
            try:
                self._leave_nothing_behind()
            finally:
                self._heartbeat.stop()
                self.summary.hung = self._executor.stop(wait=0.5)

    def _fail_what_runs(self, error: Exception) -> None:
        """The attempts that ran when the worker crashed count: one of them may be the cause, and
        would crash every worker in turn if it were given back."""
        with self._in_spite_of_errors():
            self._give_back(self._executor.take_back_unstarted())
        ended = {outcome.job.pk for outcome in self._finished}
        running = [context for context in self._hand.held() if context.claim.pk not in ended]
        reason = f"The worker crashed while this ran: {described(error).error}"
        self._finished += [failed(context.claim, reason) for context in running]

    def _leave_nothing_behind(self) -> None:
        for step in (self._settle_finished, self._give_back_all, self._registration.end):
            with self._in_spite_of_errors():
                step()

    def _give_back_all(self) -> None:
        self._give_back(self._hand.held())

    def _begin_stopping(self, reason: str) -> None:
        if self._stopping:
            self.summary.at_once = True
            return
        self._stopping = True
        self._deadline = time.monotonic() + self.options.shutdown_timeout
        unstarted = self._executor.take_back_unstarted()
        with self._in_spite_of_errors():
            self._give_back(unstarted)
        signals.tell(signals.worker_stopping, self, running=len(self._hand), reason=reason)

    def _give_back(self, contexts: Sequence[JobContext]) -> None:
        if not contexts:
            return
        jobs = [context.claim for context in contexts]
        self._hand.let_go(jobs)
        self.summary.released += len(self._jobs.release(jobs))

    def _report_crash(self, error: BaseException) -> None:
        self._inbox.put(_Crash(error))

    @contextmanager
    def _weathering_outages(self) -> Iterator[None]:
        """A turn, during which the database may be away: then the next one waits a bit longer."""
        try:
            yield
        except Exception as error:
            if not is_outage(error):
                raise
            connections[self.options.database].close()
            self._nothing_due = False
            longer = max(_FIRST_OUTAGE_WAIT, self._outage_wait * 2)
            self._outage_wait = _jittered(min(longer, _LONGEST_OUTAGE_WAIT))
            signals.tell(signals.worker_outage, self, error=error, wait=self._outage_wait)
        else:
            if self._outage_wait:
                self._outage_wait = 0.0
                signals.tell(signals.worker_recovered, self)

    @contextmanager
    def _in_spite_of_errors(self) -> Iterator[None]:
        """A last step: when it fails, the locks run out and other workers rescue the jobs."""
        try:
            yield
        except Exception as error:
            if is_outage(error):
                connections[self.options.database].close()
            signals.tell(signals.worker_step_failed, self, error=error)

    def _recover_books(self) -> bool:
        """Receivers of signals use this connection too. Returns whether one had to be undone."""
        connection = connections[self.options.database]
        if not is_spoilt(connection):
            return False
        reason = "A receiver left a transaction open on the worker's connection: rolled back."
        signals.tell(signals.worker_step_failed, self, error=RuntimeError(reason))
        reopen(connection)
        return True

    @property
    def _jobs(self) -> JobQuerySet:
        self._recover_books()
        return ProcessingJob.objects.using(self.options.database)


def _jittered(seconds: float) -> float:
    """Up to a fifth less, so that workers started together do not ask together."""
    return seconds * random.uniform(0.8, 1.0)


def _storable_instead(outcome: Outcome, error: Exception) -> Outcome:
    """The same verdict in words that are sure to be stored."""
    reason = described(f"How this attempt ended could not be stored ({type(error).__name__}).")
    if isinstance(outcome, Failed):
        return dataclasses.replace(outcome, failure=reason)
    # A success whose result cannot be stored: its work is done, so no retry.
    return Refused(job=outcome.job, failure=reason, seconds=outcome.seconds)
