"""The worker: one thread decides.

    claim ──▶ executor thread runs the handler ──▶ outcome in the inbox ──▶ settle

Everything reaches the deciding thread through its inbox: outcomes, the request to stop, a crash of
another thread. What could not be recorded because the database is away stays in hand, with its
heartbeat, and is recorded when it answers again. How it ends stands in `shutdown.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Union

from django_jobqueue import signals
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.execution import JobContext, timed_out
from django_jobqueue.failure import described
from django_jobqueue.handlers import registry
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Outcome, failed
from django_jobqueue.states import Status
from django_jobqueue.stats import due_for_unknown_handlers
from django_jobqueue.worker.bookkeeping import Bookkeeping
from django_jobqueue.worker.connection import bookkeeping_connection
from django_jobqueue.worker.executor import Executor, emptied
from django_jobqueue.worker.hand import Hand, claim_key
from django_jobqueue.worker.heartbeat import Heartbeat
from django_jobqueue.worker.options import WorkerOptions
from django_jobqueue.worker.outage import jittered
from django_jobqueue.worker.registration import Registration
from django_jobqueue.worker.shutdown import Shutdown
from django_jobqueue.worker.slots import Slots
from django_jobqueue.worker.summary import Summary
from django_jobqueue.worker.watchdog import Watchdog, beside

_SIGN_OF_LIFE_EVERY = 10.0
_LOOK_FOR_UNKNOWN_EVERY = 60.0
_SAY_ALL_HANG_EVERY = 60.0
#: When to look again at an end whose row somebody has locked.
_SETTLE_AGAIN_AFTER = 0.5
#: How long the worker's threads get to end: what is left then is left to the process's end.
_THREADS_END_WITHIN = 0.3


@dataclass(frozen=True, slots=True)
class _Stop:
    reason: str


@dataclass(frozen=True, slots=True)
class _Crash:
    error: BaseException


_Message = Union[Outcome, _Stop, _Crash]  # noqa: UP007 - evaluated at run time on Python 3.10


class _Clock:
    """A chore's clock: due at once, then every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Until it is due."""
        return max(0.0, self._next - time.monotonic())

    def is_due(self) -> bool:
        """Whether it is time; asking then sets it anew."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._seconds
        return True


class Coordinator:
    """Claims jobs, hands them to the executor and settles how they ended.

    `run` blocks in the calling thread until the worker is done; `stop` may be called from any
    thread and from a signal handler. `leave` is called when the worker cannot end in its time: by
    a program, which then ends the process.
    """

    def __init__(
        self, options: WorkerOptions | None = None, *, leave: Callable[[], None] | None = None
    ) -> None:
        self.options = options or WorkerOptions()
        self.summary = Summary()
        # A SimpleQueue: its put may interrupt its own get, so a signal handler may call `stop`.
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._leave = leave
        self._hand = Hand()
        self._slots = Slots(self.options.threads, self._hand)
        self._finished: list[Outcome] = []
        self._idle_since = time.monotonic()  # counts while nothing is in hand
        self._claimed = 0
        self._nothing_due = False
        self._look_again_at = 0.0
        self._is_stopping = False
        self.shutdown = Shutdown(timeout=self.options.shutdown_timeout)
        self._books = Bookkeeping(self.options.database, worker=self.options.name)
        self._executor = Executor(
            self.options.threads,
            database=self.options.database,
            on_outcome=self._inbox.put,
            on_crash=self._report_crash,
        )
        self._heartbeat = Heartbeat(
            self._hand, database=self.options.database, on_crash=self._report_crash
        )
        self._watchdog = Watchdog(
            [
                self._books.conversation,
                self._heartbeat.conversation,
                *self._executor.conversations,
            ],
            time_is_up=self._time_is_up,
            leave=self._leave_at_once,
            on_crash=self._report_crash,
        )
        self._registration = Registration(self.options)
        self._rescue_clock = _Clock(jobqueue_settings().RESCUE_INTERVAL)
        self._sign_of_life_clock = _Clock(_SIGN_OF_LIFE_EVERY)
        self._unknown_handlers_clock = _Clock(_LOOK_FOR_UNKNOWN_EVERY)
        self._all_hang_clock = _Clock(_SAY_ALL_HANG_EVERY)

    def stop(self, reason: str = "asked to") -> None:
        """Finish what runs, within the shutdown timeout. A second call gives it back at once."""
        self.shutdown.ask()
        self._inbox.put(_Stop(reason))

    @property
    def seconds_left(self) -> float:
        """How long the process may still be here; the whole timeout when nobody asked it to end."""
        left = self.shutdown.deadline - time.monotonic()
        return max(0.0, min(left, self.options.shutdown_timeout))

    def run(self) -> Summary:
        """Work until stopped, or until the options say that it is enough.

        An error of the worker itself is raised in the end: by then the jobs that ran have failed
        attempts, and those not started were given back.
        """
        started = time.monotonic()
        self._watchdog.start()
        try:
            with (
                bookkeeping_connection(self.options.database, "coordinator"),
                self._threads_running(),
            ):
                while not self._is_done():
                    self._turn()
        finally:
            self.summary.seconds = time.monotonic() - started
            self.summary.at_once = self.shutdown.at_once
            signals.tell(signals.worker_stopped, self, summary=self.summary)
            self._watchdog.stop()
        return self.summary

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._fail_overdue()
        if not self._books.outage.seconds_left:
            with self._books.retried_after_outages():
                self._settle_finished()
                self._do_chores()
                self._claim_into_free_slots()
        self._slots.note_whether_full()
        self._read_inbox()

    def _is_done(self) -> bool:
        if self.shutdown.has_begun:
            return not self._hand or time.monotonic() >= self.shutdown.deadline
        if self._hand:
            return False
        return not self._claims_left() or (self.options.burst and self._nothing_due)

    def _fail_overdue(self) -> None:
        """The attempt ends here; its thread keeps the slot until it comes back."""
        self._finished += [timed_out(context) for context in self._slots.fail_overdue()]

    def _settle_finished(self) -> None:
        if not self._finished:
            return
        skipped = self._books.settle(self._finished)
        settled = [outcome.job for outcome in self._finished if outcome.job.pk not in skipped]
        for job in settled:
            # By what the row says now; one that still says `processing` was another worker's.
            self.summary.add(Status(job.status))
        self._let_go(settled)
        self._finished = [outcome for outcome in self._finished if outcome.job.pk in skipped]
        self._nothing_due = False

    def _do_chores(self) -> None:
        if self._books.outage.lasts:
            self._release_unanswered_claims()
        if self._rescue_clock.is_due():
            # Again: the commit of a claim may come long after its connection was lost.
            self._release_unanswered_claims()
            self._books.jobs().rescue_stale_locks()
        if self._sign_of_life_clock.is_due():
            self._give_sign_of_life()
        if self._slots.all_hang and self._all_hang_clock.is_due():
            self._say_that_all_hang()

    def _claim_into_free_slots(self) -> None:
        limit = self._claim_limit()
        if not limit or (self._nothing_due and time.monotonic() < self._look_again_at):
            return
        # From before the statement: the lock holds at least as long as this says.
        good_until = time.monotonic() + jobqueue_settings().STALE_LOCK_AFTER
        claimed = self._books.jobs().claim(
            worker=self.options.name,
            queues=self.options.queues,
            handlers=registry.names(),
            limit=limit,
            rescue=False,
        )
        if self._books.undo_open_transaction():
            return  # the claim was part of it
        self._start([JobContext(job, good_until=good_until) for job in claimed])
        if len(claimed) < limit:
            self._nothing_due = True
            self._look_again_at = time.monotonic() + jittered(jobqueue_settings().POLL_INTERVAL)
            self._show_unknown_handlers()

    def _read_inbox(self) -> None:
        """Wait for a message, at most until there is something to do, and take all there are."""
        wait = 0.0 if self._is_done() else min(self._waits())
        if wait > 0:
            with suppress(Empty):
                self._receive(self._inbox.get(timeout=wait))
        for message in emptied(self._inbox):
            self._receive(message)

    def _receive(self, message: _Message) -> None:
        if isinstance(message, _Stop):
            self._begin_stopping(message.reason)
        elif isinstance(message, _Crash):
            raise RuntimeError("A thread of this worker ended by an error.") from message.error
        else:
            self._receive_outcome(message)

    def _receive_outcome(self, outcome: Outcome) -> None:
        if late := self._slots.come_back(outcome.job):
            self._nothing_due = False
            signals.tell(signals.handler_came_back, self, job=outcome.job, seconds=late.ran_for)
        else:
            self._finished.append(outcome)

    # --- the steps of a turn -------------------------------------------------------------------

    def _start(self, contexts: Sequence[JobContext]) -> None:
        self._claimed += len(contexts)
        self._hand.take(contexts)
        for context in contexts:
            self._executor.submit(context)

    def _let_go(self, jobs: Sequence[ProcessingJob]) -> None:
        self._idle_since = time.monotonic()
        self._hand.let_go(jobs)

    def _claim_limit(self) -> int:
        # What a worker claims that cannot extend its locks would run twice, side by side.
        if self.shutdown.has_begun or self._heartbeat.fails:
            return 0
        return min(self._slots.free, self._claims_left())

    def _claims_left(self) -> int:
        if self.options.max_jobs is None:
            return self.options.threads
        return self.options.max_jobs - self._claimed

    def _waits(self) -> Iterator[float]:
        """Seconds until each thing that is to be done without a message."""
        yield self._slots.next_change()
        yield self.shutdown.deadline - time.monotonic()
        if self._books.outage.lasts:
            yield self._books.outage.seconds_left
            return
        yield min(jobqueue_settings().RESCUE_INTERVAL, _SIGN_OF_LIFE_EVERY)
        if self._finished:
            yield _SETTLE_AGAIN_AFTER
        if self._slots.all_hang:
            yield self._all_hang_clock.seconds_left
        if self._heartbeat.fails:
            yield jobqueue_settings().POLL_INTERVAL
        elif self._claim_limit():
            yield self._look_again_at - time.monotonic() if self._nothing_due else 0.0

    def _release_unanswered_claims(self) -> None:
        """A claim may have been committed while its answer was lost with the connection."""
        unknown = [job for job in self._books.claims() if not self._hand.holds(job)]
        self._books.jobs().release(unknown, wait=False)

    def _give_sign_of_life(self) -> None:
        if self._heartbeat.fails:
            return  # a worker that takes no job should look like it
        self._registration.beat(
            busy_slots=self._slots.busy,
            hung_slots=len(self._slots.hung()),
            full_for=self._slots.full_for(),
        )

    def _say_that_all_hang(self) -> None:
        self._give_sign_of_life()
        signals.tell(signals.worker_hangs, self, contexts=self._slots.hung())
        if self.options.restart_when_hung and not self.shutdown.has_begun:
            self.summary.hangs = True
            self.shutdown.decide()
            self._begin_stopping("every slot hangs")

    def _show_unknown_handlers(self) -> None:
        if not self._unknown_handlers_clock.is_due():
            return
        waiting = due_for_unknown_handlers(
            registry.names(), queues=self.options.queues, using=self.options.database
        )
        if waiting:
            signals.tell(signals.handlers_unknown, self, waiting=waiting)

    # --- start and end -------------------------------------------------------------------------

    @contextmanager
    def _threads_running(self) -> Iterator[None]:
        """Whatever ends the worker, what it still has is given back before its threads go."""
        try:
            self._executor.start()
            self._heartbeat.start()
            signals.tell(
                signals.worker_started, self, options=self.options, handlers=registry.names()
            )
            yield
        except Exception as error:
            self._fail_what_runs(error)
            raise
        finally:
            # First, or its last beat has the rows locked that are to be given back.
            self._heartbeat.stop(wait=_THREADS_END_WITHIN)
            try:
                self._leave_nothing_behind()
            finally:
                self.summary.hung = self._executor.stop(wait=_THREADS_END_WITHIN)

    def _fail_what_runs(self, error: Exception) -> None:
        """The attempts that ran when the worker crashed count: one of them may be the cause, and
        would crash every worker in turn if it were given back."""
        with self._books.in_spite_of_errors():
            self._give_back(self._executor.take_back_unstarted())
        for message in emptied(self._inbox):
            if not isinstance(message, (_Stop, _Crash)):
                self._receive_outcome(message)
        reason = f"The worker crashed while this ran: {described(error).error}"
        self._finished += [failed(context.claim, reason) for context in self._unfinished()]

    def _leave_nothing_behind(self) -> None:
        """Each step is tried although another one failed, and what finished is tried twice: it is
        never given back."""
        for step in (
            self._settle_finished,
            self._settle_finished,
            self._give_back_unfinished,
            self._release_unanswered_claims,
            self._registration.end,
        ):
            with self._books.in_spite_of_errors():
                step()
        for context in self._hand.held():
            self.summary.left_behind += 1
            signals.tell(signals.job_left_behind, ProcessingJob, job=context.claim)

    def _begin_stopping(self, reason: str) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        with self._books.in_spite_of_errors():
            self._give_back(self._executor.take_back_unstarted())
        signals.tell(signals.worker_stopping, self, running=len(self._hand), reason=reason)

    def _give_back_unfinished(self) -> None:
        self._give_back(self._unfinished())

    def _give_back(self, contexts: Sequence[JobContext]) -> None:
        jobs = [context.claim for context in contexts]
        self.summary.released += self._books.release(jobs)
        self._let_go(jobs)

    def _unfinished(self) -> list[JobContext]:
        finished = {claim_key(outcome.job) for outcome in self._finished}
        held = self._hand.held()
        return [context for context in held if claim_key(context.claim) not in finished]

    def _report_crash(self, error: BaseException) -> None:
        self._inbox.put(_Crash(error))

    # --- called by the watchdog ----------------------------------------------------------------

    def _time_is_up(self) -> float:
        has_jobs = self._hand or self._finished
        return self.shutdown.time_is_up(idle_since=None if has_jobs else self._idle_since)

    def _leave_at_once(self) -> None:
        """Jobs that were not given back run again when their locks run out."""
        if self._leave is None:
            return
        self.summary.at_once = self.shutdown.at_once
        error = TimeoutError("The worker cannot end by itself, so its process is ended.")
        beside(lambda: signals.tell(signals.worker_step_failed, self, error=error))
        self._leave()
