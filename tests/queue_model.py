"""The queue in plain Python: what each move must answer, and what it must leave behind.

Written from the life of a job (`states.py`), not from the statements, and without a database. Its
clock moves only when it is told to; between two steps of the clock a `tick` tells what came first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PENDING, PROCESSING, FAILED = "pending", "processing", "failed"
SUCCEEDED, DEAD_LETTER, CANCELLED = "succeeded", "dead_letter", "cancelled"

LOCK_LENGTH = 60
RETENTION = 7 * 24 * 3600
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, order=True)
class Instant:
    """A moment: seconds of the model's clock, then the order of moves within the same second."""

    seconds: int
    tick: int

    def __add__(self, seconds: int) -> Instant:
        return Instant(self.seconds + seconds, self.tick)

    def __sub__(self, seconds: int) -> Instant:
        return self + -seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a handler gives to its jobs when `enqueue` is not told."""

    queue: str = "default"
    priority: int = 0
    max_attempts: int = MAX_ATTEMPTS
    backoff_step: int = 30


HANDLERS: Mapping[str, Defaults] = {
    "tests.app.jobs.add": Defaults(),
    "tests.app.jobs.fail_at_once": Defaults(backoff_step=0),
    "tests.app.jobs.mail": Defaults(queue="mail", priority=10, max_attempts=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One call of `enqueue`."""

    handler: str
    payload: dict[str, Any]
    queue: str | None = None
    priority: int | None = None
    delay: int | None = None
    max_attempts: int | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker shows to prove that a job is its own."""

    pk: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one attempt ended."""

    kind: Literal["succeeded", "failed", "refused"]
    result: Any = None
    error: str = "broken"
    delay: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of a job's history."""

    number: int
    token: int
    outcome: Literal["failed", "lost"]
    worker: str


@dataclass(slots=True, kw_only=True)
class ModelJob:
    """One job as it must be stored."""

    pk: int
    handler: str
    payload: dict[str, Any]
    queue: str
    priority: int
    max_attempts: int
    available_at: Instant
    key: str | None
    status: str = PENDING
    attempts: int = 0
    token: int = 0
    locked_by: str | None = None
    lock_expires_at: Instant | None = None
    finished_at: Instant | None = None
    result: Any = None
    last_error: str = ""
    history: list[Attempt] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, Instant, int]:
        """Where it stands among the due jobs: the smallest is claimed first."""
        return (-self.priority, self.available_at, self.pk)

    @property
    def is_claimable(self) -> bool:
        return self.status in (PENDING, FAILED)

    def is_due(self, now: Instant) -> bool:
        return self.is_claimable and self.available_at <= now

    def is_stale(self, now: Instant) -> bool:
        return self.lock_expires_at is not None and self.lock_expires_at < now

    def is_held_by(self, claim: Claim) -> bool:
        return self.status == PROCESSING and self.token == claim.token

    def lock(self, worker: str, now: Instant) -> None:
        self.status = PROCESSING
        self.attempts += 1
        self.token += 1
        self.locked_by = worker
        self.lock_expires_at = now + LOCK_LENGTH

    def unlock(self, status: str) -> None:
        self.status = status
        self.locked_by = self.lock_expires_at = None

    def finish(self, status: str, now: Instant) -> None:
        self.unlock(status)
        self.finished_at = now

    def wait_or_die(self, now: Instant, *, delay: int) -> None:
        """An attempt is over without success: the next one is due after `delay`, if one is left."""
        if self.attempts == self.max_attempts:
            self.finish(DEAD_LETTER, now)
        else:
            self.unlock(FAILED)
            self.available_at = now + delay

    def note(self, outcome: Literal["failed", "lost"], error: str) -> None:
        """Write the history of an attempt, while the job is still locked by its worker."""
        assert self.locked_by is not None
        self.history.append(Attempt(self.attempts, self.token, outcome, self.locked_by))
        self.last_error = error


class QueueModel:
    """Each move of `ProcessingJob.objects` by its name, answering with ids."""

    def __init__(self) -> None:
        self.jobs: dict[int, ModelJob] = {}
        self.paused: set[str] = set()
        self._clock = Instant(0, 0)

    # --- time ----------------------------------------------------------------------------------

    @property
    def seconds(self) -> int:
        return self._clock.seconds

    def let_time_pass(self, seconds: int) -> None:
        self._clock += seconds

    def now(self) -> Instant:
        """Each statement has a moment of its own."""
        self._clock = Instant(self._clock.seconds, self._clock.tick + 1)
        return self._clock

    # --- enqueue -------------------------------------------------------------------------------

    def holder_of(self, key: str | None) -> ModelJob | None:
        return next((job for job in self.jobs.values() if key and job.key == key), None)

    def enqueue(self, wanted: Wanted, pk: int, now: Instant) -> None:
        """A job is inserted under the id the database chose."""
        defaults = HANDLERS[wanted.handler]
        self.jobs[pk] = ModelJob(
            pk=pk,
            handler=wanted.handler,
            payload=wanted.payload,
            queue=_first_given(wanted.queue, defaults.queue),
            priority=_first_given(wanted.priority, defaults.priority),
            max_attempts=_first_given(wanted.max_attempts, defaults.max_attempts),
            available_at=now + (wanted.delay or 0),
            key=wanted.idempotency_key,
        )

    # --- claim ---------------------------------------------------------------------------------

    def claim(
        self,
        worker: str,
        *,
        queues: Collection[str] | None = None,
        handlers: Collection[str] | None = None,
        limit: int,
        elsewhere: Collection[int] = (),
    ) -> list[int]:
        """The ids claimed, in order. Rows that are locked `elsewhere` are passed by."""
        self.rescue_stale_locks(elsewhere)
        now = self.now()
        due = [
            job
            for job in self.jobs.values()
            if job.is_due(now)
            and job.pk not in elsewhere
            and job.queue not in self.paused
            and (queues is None or job.queue in queues)
            and (handlers is None or job.handler in handlers)
        ]
        taken = sorted(due, key=lambda job: job.place)[: max(limit, 0)]
        for job in taken:
            job.lock(worker, now)
        return [job.pk for job in taken]

    def held_by(self, worker: str) -> list[int]:
        return [job.pk for job in self.jobs.values() if job.locked_by == worker]

    def holds(self, claim: Claim) -> bool:
        return claim.pk in self.jobs and self.jobs[claim.pk].is_held_by(claim)

    def extend_locks(self, claims: Iterable[Claim]) -> list[int]:
        now = self.now()
        held = self._held(claims)
        for pk in held:
            self.jobs[pk].lock_expires_at = now + LOCK_LENGTH
        return held

    def release(self, claims: Iterable[Claim]) -> list[int]:
        held = self._held(claims)
        for pk in held:
            self.jobs[pk].unlock(PENDING)
            self.jobs[pk].attempts -= 1
        return held

    def let_locks_run_out(self, ids: Iterable[int]) -> list[int]:
        """The locks of these jobs are stale now; the answer is which of them had one."""
        now = self.now()
        locked = self._in_status(ids, PROCESSING)
        for pk in locked:
            self.jobs[pk].lock_expires_at = now - 1
        return locked

    # --- settle --------------------------------------------------------------------------------

    def settle(self, ends: Iterable[tuple[Claim, Ending]]) -> list[int]:
        """Of several ends of one job only that of its newest claim counts; of equals, the last."""
        now = self.now()
        ending_of = dict(ends)
        held = self._held(ending_of)
        newest = {claim.pk: ending for claim, ending in ending_of.items() if self.holds(claim)}
        for pk in held:
            self._end(self.jobs[pk], newest[pk], now)
        return held

    def _end(self, job: ModelJob, ending: Ending, now: Instant) -> None:
        if ending.kind == "succeeded":
            job.finish(SUCCEEDED, now)
            job.result = ending.result
            return
        job.note("failed", ending.error)
        if ending.kind == "refused":
            job.finish(DEAD_LETTER, now)
        else:
            job.wait_or_die(now, delay=ending.delay)

    def backoff(self, pk: int) -> int:
        """Seconds until the retry, if the current attempt fails."""
        job = self.jobs.get(pk)
        return 0 if job is None else HANDLERS[job.handler].backoff_step * min(job.attempts, 10)

    # --- rescue --------------------------------------------------------------------------------

    def rescue_stale_locks(self, elsewhere: Collection[int] = ()) -> tuple[int, int]:
        """How many failed and how many are dead letters now."""
        now = self.now()
        stale = [job for job in self.jobs.values() if job.is_stale(now) and job.pk not in elsewhere]
        for job in stale:
            job.note("lost", f"Worker lost: {job.locked_by} took the job")
            job.wait_or_die(now, delay=0)
        dead = sum(job.status == DEAD_LETTER for job in stale)
        return len(stale) - dead, dead

    # --- what people do ------------------------------------------------------------------------

    def requeue_many(self, ids: Iterable[int]) -> list[int]:
        now = self.now()
        moved = self._in_status(ids, DEAD_LETTER)
        for pk in moved:
            job = self.jobs[pk]
            job.status, job.attempts = PENDING, 0
            job.available_at, job.finished_at = now, None
        return moved

    def requeue_dead_letters(self, queues: Collection[str]) -> int:
        return len(self.requeue_many(pk for pk, job in self.jobs.items() if job.queue in queues))

    def cancel_many(self, ids: Iterable[int]) -> list[int]:
        now = self.now()
        moved = self._in_status(ids, PENDING, FAILED, DEAD_LETTER)
        for pk in moved:
            self.jobs[pk].finish(CANCELLED, now)
        return moved

    def prune(
        self,
        older_than: int | None,
        dead_letters_older_than: int | None,
        elsewhere: Collection[int] = (),
    ) -> int:
        """How many are gone. Dead letters are kept unless their age is given."""
        older_than = RETENTION if older_than is None else older_than
        ages = {SUCCEEDED: older_than, CANCELLED: older_than, DEAD_LETTER: dead_letters_older_than}
        now = self.now()
        gone = [
            pk
            for pk, job in self.jobs.items()
            if pk not in elsewhere and _is_old(job, ages.get(job.status), now)
        ]
        for pk in gone:
            del self.jobs[pk]
        return len(gone)

    # --- who is meant --------------------------------------------------------------------------

    def _held(self, claims: Iterable[Claim]) -> list[int]:
        return sorted({claim.pk for claim in claims if self.holds(claim)})

    def _in_status(self, ids: Iterable[int], *statuses: str) -> list[int]:
        known = sorted(self.jobs.keys() & set(ids))
        return [pk for pk in known if self.jobs[pk].status in statuses]


def _first_given(given: Any, default: Any) -> Any:
    return default if given is None else given


def _is_old(job: ModelJob, age: int | None, now: Instant) -> bool:
    return age is not None and job.finished_at is not None and job.finished_at < now - age
