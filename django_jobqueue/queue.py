"""The moves of a job. Every change of `status` stands in this file, and nowhere else.

The guards of a move stand in its statements, and it returns what really changed. A claim raises
`lock_token`; who ends, extends or releases it must show that token, so that a worker that lost its
lock changes nothing, however late it comes. PostgreSQL's clock is the only one.

Raw SQL stands where the ORM has no words for it: `ON CONFLICT` with an answer, `RETURNING`, data-
modifying CTEs. Every value is a parameter. A statement that waits for row locks takes them in the
order of ids, so that no two wait for each other in a circle; the others skip what is locked. Rows
to end are looked up by primary key alone, because the statistics say that no row is `processing`
and would lead the planner to a scan. Locks are NO KEY ones: a row that refers to a job by a foreign
key stands in nobody's way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import Error, OperationalError, connections, models, router, transaction
from django.db.models import BooleanField, Func
from django.db.models.functions import Now

from django_jobqueue import signals
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.exceptions import (
    JobQueueError,
    LockLost,
    NoJobAvailable,
    NotDeadLetter,
)
from django_jobqueue.failure import described
from django_jobqueue.handlers import Handler
from django_jobqueue.new_job import NewJob, checked_new_job, checked_new_jobs
from django_jobqueue.outcomes import Failed, Outcome, Refused, Succeeded, failed
from django_jobqueue.payload import checked_result
from django_jobqueue.sqlstates import is_refusal
from django_jobqueue.states import CANCEL, PRUNABLE, REQUEUE, Status
from django_jobqueue.values import checked_delay, checked_ids, checked_limit, checked_name

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob

#: Rows moved by one statement where a caller may name any number of them.
CHUNK = 1_000
_ENQUEUE_CHUNK = 5_000
_RESCUE_CHUNK = 100
#: How often `enqueue` looks again when the row that holds its key vanishes under it.
_KEY_ROUNDS = 20
_SERIALIZATION_FAILURE = "40001"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescued:
    """What a rescue found: jobs that will run again, and jobs that were out of attempts."""

    failed: int = 0
    dead_letters: int = 0


class JobQuerySet(models.QuerySet["ProcessingJob"]):
    """`ProcessingJob.objects`: every move of a job. Works on `using(alias)`, never on a replica.

    Only `requeue_dead_letters` acts on what a queryset filters. Every other move names its jobs
    itself and raises `TypeError` on a filtered queryset.
    """

    # --- enqueue -------------------------------------------------------------------------------

    def enqueue(
        self,
        handler: str | Handler[..., Any],
        payload: dict[str, Any] | None = None,
        *,
        queue: str | None = None,
        priority: int | None = None,
        delay: float | timedelta | None = None,
        available_at: datetime | None = None,
        max_attempts: int | None = None,
        idempotency_key: str | None = None,
    ) -> ProcessingJob:
        """Insert a job in the caller's transaction. → pending

        What is None comes from the handler, then from the settings. `delay` is seconds or a
        `timedelta` from the database's now, `available_at` an aware datetime; one of the two.

        With an `idempotency_key` that some job has already (in whatever status, until it is
        pruned) that job is returned: `job.created` is False, and `job.differs` tells whether its
        handler or payload are others. No error reaches the caller's transaction, not when two
        callers race either; if the first one rolls back, the second one's job is inserted.

        Raises `UnknownHandler`, `InvalidPayload` and `ValueError`, each before any SQL, and
        `JobQueueError` when the key is taken and freed all the time.
        """
        new = checked_new_job(
            jobqueue_settings(),
            handler=handler,
            payload=payload,
            queue=queue,
            priority=priority,
            delay=delay,
            available_at=available_at,
            max_attempts=max_attempts,
            idempotency_key=idempotency_key,
        )
        job = self._insert_unkeyed(new) if new.idempotency_key is None else self._insert_keyed(new)
        _tell_enqueued([job])
        return job

    async def aenqueue(
        self,
        handler: str | Handler[..., Any],
        payload: dict[str, Any] | None = None,
        **options: Any,
    ) -> ProcessingJob:
        """`enqueue` for async code."""
        return await sync_to_async(self.enqueue)(handler, payload, **options)

    def enqueue_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[ProcessingJob]:
        """Insert many jobs, all or none: one job per input, in order. → pending

        Each input is a mapping of `enqueue`'s arguments. A key that is taken, outside the batch or
        earlier in it, is answered as by `enqueue`. Raises what `enqueue` raises, naming the
        position, before any insert.
        """
        new_jobs = checked_new_jobs(jobqueue_settings(), jobs)
        with transaction.atomic(using=self._alias):
            made = self._answer_taken_keys(new_jobs, self._insert_many(new_jobs))
        _tell_enqueued(made)
        return made

    # --- claim ---------------------------------------------------------------------------------

    def dequeue(
        self,
        *,
        worker: str,
        queues: Collection[str] | None = None,
        handlers: Collection[str] | None = None,
    ) -> ProcessingJob:
        """Rescue what is stale, then take one due job. pending, failed → processing

        Raises `NoJobAvailable`. See `claim`.
        """
        queues, handlers = _names(queues, "queue"), _names(handlers, "handler")
        for job in self.claim(worker=worker, queues=queues, handlers=handlers, limit=1):
            return job
        raise NoJobAvailable(_nothing_due(queues, handlers))

    def claim(
        self,
        *,
        worker: str,
        queues: Collection[str] | None = None,
        handlers: Collection[str] | None = None,
        limit: int,
        rescue: bool = True,
    ) -> list[ProcessingJob]:
        """Rescue what is stale, then take up to `limit` due jobs. pending, failed → processing

        The largest priority first, then the longest due, then the lowest id. None means every
        queue or handler, an empty collection none. Paused queues are left out. The attempt is
        counted here; outside a transaction it is committed when this returns. Inside one that is
        rolled back nothing was claimed: throw the jobs away, the next claim gets their tokens.

        A row that a trigger or constraint of the project refuses is left where it is, and
        `row_refused` is sent. `rescue=False` is for who rescues at times of its own.
        """
        worker = checked_name(worker, what="worker")
        queues, handlers = _names(queues, "queue"), _names(handlers, "handler")
        limit = checked_limit(limit)
        if rescue:
            self.rescue_stale_locks()
        if limit < 1 or queues == [] or handlers == []:
            return []
        jobs = self._take_due(self._due(queues, handlers), worker, limit)
        for job in jobs:
            job.claim_token = job.lock_token
        return sorted(jobs, key=lambda job: (-job.priority, job.available_at, job.pk))

    def extend_locks(self, jobs: Collection[ProcessingJob]) -> list[int]:
        """The heartbeat: the locks of these claims are good for their full length again.

        Returns the ids extended, by one statement that waits for nobody. A missing one is lost, or
        its row is locked by somebody's transaction just now, or refuses to be changed.
        """
        tokens = self._tokens(jobs)
        seconds = jobqueue_settings().STALE_LOCK_AFTER

        def extend(ids: list[int]) -> list[int]:
            return _first(self._execute(_EXTEND, (ids, seconds, _json_of(tokens, ids))))

        return self._sparing_refused(extend, list(tokens))

    def release(self, jobs: Collection[ProcessingJob], *, wait: bool = True) -> list[int]:
        """Give unfinished jobs back, in their old place. Costs no attempt. processing → pending

        Returns the ids given back; a lost lock is left out. With `wait=False` a row that somebody
        has locked is left out too.
        """
        tokens = self._tokens(jobs)
        statement = _RELEASE if wait else _RELEASE_UNLOCKED

        def give_back(ids: list[int]) -> list[int]:
            return _first(self._execute(statement, (ids, _json_of(tokens, ids))))

        released = set(self._sparing_refused(give_back, list(tokens)))
        for job in jobs:
            if job.pk in released and _token(job) == tokens[job.pk]:
                signals.tell(signals.job_released, self.model, job=job)
        return sorted(released)

    # --- settle --------------------------------------------------------------------------------

    def complete(self, job: ProcessingJob, result: Any = None) -> None:
        """Record success. processing → succeeded

        Raises `LockLost`, and `InvalidPayload` when the result is not JSON or larger than
        MAX_RESULT_BYTES; both change nothing.
        """
        kept = checked_result(result, limit=jobqueue_settings().MAX_RESULT_BYTES)
        self._settle_one(Succeeded(job=job, result=kept))

    def fail(self, job: ProcessingJob, error: BaseException | str) -> None:
        """Record a failed attempt: a retry after the handler's backoff, or a dead letter.

        processing → failed, or dead_letter when no attempt is left or the error is `DeadLetter`.
        Raises `LockLost`.
        """
        self._settle_one(failed(job, error))

    def settle(self, outcomes: Collection[Outcome], *, wait: bool = True) -> list[int]:
        """Record how many attempts ended, in one fenced statement. processing → as each ended

        Returns the ids recorded; a lost lock is left out, never an error. Each recorded job has
        its new values afterwards. With `wait=False` a row that somebody has locked is passed over
        and stays held, and an end that is recorded already, by a statement whose answer was lost,
        is returned too.
        """
        if not outcomes:
            return []
        self._refuse_other_databases(outcome.job for outcome in outcomes)
        newest = _newest_claims(outcomes, job=lambda outcome: outcome.job)
        recorded = self._record(newest, _SETTLE if wait else _SETTLE_UNLOCKED)
        held = set[int]()
        if not wait and len(recorded) < len(newest):
            held = self._look_after(newest, recorded)
        # One claim of a job at most: of two, the older has lost its lock to the newer.
        for outcome in outcomes:
            if newest[outcome.job.pk] is not outcome:
                _tell_settled(outcome, None)
            elif outcome.job.pk not in held:
                _tell_settled(outcome, recorded.get(outcome.job.pk))
        return list(recorded)

    def settle_in_transaction(self, success: Succeeded) -> None:
        """Record a success as the last statement of the caller's transaction. → succeeded

        The row stays locked up to the commit, so no other claim can come between. Nobody is told
        and the job keeps its values, since the commit may fail: after it, `settle(wait=False)`
        finds what was recorded, and tells. Raises `LockLost`.
        """
        if not self._record({success.job.pk: success}, _SETTLE):
            raise LockLost(_lock_lost(success.job))

    def still_held(self, jobs: Collection[ProcessingJob]) -> set[int]:
        """The ids whose row still shows this claim: a plain read, which waits for nobody."""
        tokens = self._tokens(jobs)
        rows = self._rows.filter(pk__in=tokens, status=Status.PROCESSING)
        return {pk for pk, token in rows.values_list("pk", "lock_token") if tokens[pk] == token}

    # --- rescue --------------------------------------------------------------------------------

    def rescue_stale_locks(self) -> Rescued:
        """Take back what lost workers held. processing → failed (due at once), or dead_letter

        One probe of an index when nothing is stale. A row another rescue has in hand is skipped,
        one that a trigger or constraint of the project refuses is left, and `row_refused` is sent.
        """
        dead_letters = failed = 0
        for *values, worker, since in self._rescue_all():
            job = self.model.from_db(self._alias, _RESCUED_FIELDS, values)
            _tell_rescued(job, worker, since)
            dead_letters += job.status == Status.DEAD_LETTER
            failed += job.status == Status.FAILED
        return Rescued(failed=failed, dead_letters=dead_letters)

    # --- what people do ------------------------------------------------------------------------

    def requeue_dead_letter(self, pk: int) -> ProcessingJob:
        """Send one dead letter back. dead_letter → pending, with `attempts = 0`, due at once

        Raises `NotDeadLetter` and `ProcessingJob.DoesNotExist`.
        """
        with transaction.atomic(using=self._alias):
            if self.requeue_many([pk]):
                return self._rows.get(pk=pk)  # before a worker can see it
        raise NotDeadLetter(
            f"Job {pk} is {self.status(pk).label}, not a dead letter."
            " Only a dead letter can be requeued."
        )

    def requeue_dead_letters(self) -> int:
        """Send back every dead letter of this queryset, chunk by chunk. dead_letter → pending

        Returns how many were. Outside a transaction each chunk commits by itself.
        """
        everything = JobQuerySet(self.model, using=self._alias)
        dead = self.using(self._alias).filter(status=Status.DEAD_LETTER)
        return sum(len(everything.requeue_many(ids)) for ids in dead.id_chunks())

    def requeue_many(self, ids: Collection[int]) -> list[int]:
        """Send back those of these jobs that are dead letters, and return their ids. → pending

        Outside a transaction each chunk of 1,000 commits by itself.
        """
        moved = self._move(
            ids,
            REQUEUE.sources,
            status=Status.PENDING,
            attempts=0,
            available_at=Now(),
            finished_at=None,
        )
        if moved:
            signals.tell(signals.jobs_requeued, self.model, ids=moved)
        return moved

    def cancel(self, pk: int) -> bool:
        """Cancel one job that is not running. pending, failed, dead_letter → cancelled

        Returns whether it was. Raises `ProcessingJob.DoesNotExist`.
        """
        if self.cancel_many([pk]):
            return True
        self.status(pk)
        return False

    def cancel_many(self, ids: Collection[int]) -> list[int]:
        """Cancel those of these jobs that wait, and return their ids. → cancelled"""
        moved = self._move(ids, CANCEL.sources, status=Status.CANCELLED, finished_at=Now())
        if moved:
            signals.tell(signals.jobs_cancelled, self.model, ids=moved)
        return moved

    def prune(
        self,
        older_than: float | timedelta | None = None,
        *,
        dead_letters_older_than: float | timedelta | None = None,
    ) -> int:
        """Delete jobs that finished so long ago, with their history. succeeded, cancelled → gone

        Spans in seconds or as `timedelta`; None takes RETENTION and DEAD_LETTER_RETENTION, and a
        retention of None keeps for ever. Never touches a job that has not finished. Returns how
        many went. Outside a transaction each chunk of 1,000 commits by itself; two prunes at once
        share the work.
        """
        settings = jobqueue_settings()
        return self._prune(PRUNABLE, older_than, settings.RETENTION) + self._prune(
            (Status.DEAD_LETTER,), dead_letters_older_than, settings.DEAD_LETTER_RETENTION
        )

    def status(self, pk: int) -> Status:
        """Where this job stands, read from the primary. Raises `ProcessingJob.DoesNotExist`."""
        found = self._rows.filter(pk=pk).values_list("status", flat=True).first()
        if found is None:
            raise self.model.DoesNotExist(f"There is no job {pk}. It may have been pruned.")
        return Status(found)

    # --- how enqueue inserts -------------------------------------------------------------------

    def _insert_unkeyed(self, new: NewJob) -> ProcessingJob:
        (job,) = self._returned(_INSERT, new.row())
        job.created = True
        return job

    def _insert_keyed(self, new: NewJob) -> ProcessingJob:
        for _round in range(_KEY_ROUNDS):
            inserted = self._returned(_INSERT_KEYED, new.row())
            if inserted:
                inserted[0].created = True
                return inserted[0]
            if job := self._find_by_key(new) or self._insert_keyed_behind_savepoint(new):
                return job
        raise JobQueueError(
            f"The idempotency key {new.idempotency_key!r} was taken and freed {_KEY_ROUNDS} times"
            " while this job was being enqueued. Nothing was stored; try again."
        )

    def _find_by_key(self, new: NewJob) -> ProcessingJob | None:
        job = self._rows.filter(idempotency_key=new.idempotency_key).first()
        return job and _answered(job, new)

    def _insert_keyed_behind_savepoint(self, new: NewJob) -> ProcessingJob | None:
        """Insert where the holder of the key may be invisible: REPEATABLE READ or stricter.

        PostgreSQL then answers a conflict with an error, which only a savepoint keeps from the
        caller's transaction; the job that holds the key is read over a connection of its own.
        """
        try:
            with transaction.atomic(using=self._alias):
                inserted = self._returned(_INSERT_KEYED_STRICT, new.row())
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != _SERIALIZATION_FAILURE:
                raise
            if job := self._find_by_key_outside(new):
                return job
            raise  # nobody holds the key: a conflict of the caller's own, to be tried again
        if not inserted:
            return None
        inserted[0].created = True
        return inserted[0]

    def _find_by_key_outside(self, new: NewJob) -> ProcessingJob | None:
        connection = connections[self._alias].copy()
        columns = self._columns()
        try:
            with connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT {columns} FROM processing_jobs WHERE idempotency_key = %s",
                    [new.idempotency_key],
                )
                row = cursor.fetchone()
        finally:
            connection.close()
        return row and _answered(self._job_from(row), new)

    def _insert_many(self, new_jobs: Sequence[NewJob]) -> list[ProcessingJob | None]:
        """One job per input, in order; None where the key is taken.

        Ids are drawn in the order of the input, rows are inserted in the order of their keys: two
        batches with the same keys wait for each other, but never in a circle. All are due from one
        instant, so that the ids decide which runs first.
        """
        drawn = self._execute(_DRAW_IDS, (len(new_jobs),))
        ids = _first(drawn)
        by_key = sorted(zip(ids, new_jobs, strict=True), key=lambda pair: pair[1].key_order)
        inserted: dict[int, ProcessingJob] = {}
        for chunk in _chunks(by_key, _ENQUEUE_CHUNK):
            columns = zip(*((pk, *new.row()) for pk, new in chunk), strict=True)
            now = drawn[0][1]
            for job in self._returned(_INSERT_MANY, (now, *map(list, columns))):
                job.created = True
                inserted[job.pk] = job
        return [inserted.get(pk) for pk in ids]

    def _answer_taken_keys(
        self, new_jobs: Sequence[NewJob], made: Sequence[ProcessingJob | None]
    ) -> list[ProcessingJob]:
        taken = [new for new, job in zip(new_jobs, made, strict=True) if job is None]
        found = {
            job.idempotency_key: job
            for chunk in _chunks(taken, CHUNK)
            for job in self._rows.filter(idempotency_key__in=[new.idempotency_key for new in chunk])
        }
        answers = []
        for new, job in zip(new_jobs, made, strict=True):
            if job is None:
                holder = found.get(new.idempotency_key)
                # A copy: two inputs with this key may differ from it in different ways.
                job = _answered(copy(holder), new) if holder else self._insert_keyed(new)
            answers.append(job)
        return answers

    # --- how one end is recorded -------------------------------------------------------------

    def _record(self, claims: Mapping[int, Outcome], statement: str) -> dict[int, list[Any]]:
        verdicts = json.dumps({pk: _verdict(outcome) for pk, outcome in claims.items()})
        rows = self._execute(statement, (verdicts, list(claims)))
        return {pk: values for pk, *values in rows}

    def _look_after(
        self, claims: Mapping[int, Outcome], recorded: dict[int, list[Any]]
    ) -> set[int]:
        """Add what was recorded before to `recorded`, and return the ids that are still held."""
        missed = [outcome.job for pk, outcome in claims.items() if pk not in recorded]
        tokens = self._tokens(missed)
        rows = self._rows.filter(pk__in=tokens).values_list("pk", "lock_token", *_SETTLED_FIELDS)
        held = set[int]()
        for pk, token, *values in rows:
            if token == tokens[pk] and values[0] == Status.PROCESSING:
                held.add(pk)
            elif token == tokens[pk] and values[0] != Status.PENDING:  # that one was given back
                recorded[pk] = values
        return held

    def _settle_one(self, outcome: Outcome) -> None:
        if not self.settle([outcome]):
            raise LockLost(_lock_lost(outcome.job))

    # --- how much of a set can move --------------------------------------------------------------

    def _sparing_refused(self, move: Callable[[list[int]], list[T]], ids: list[int]) -> list[T]:
        """Move all of these rows, or all but those that the table refuses.

        What is refused is found by halves, so that one row of a thousand costs ten statements more.
        """
        if not ids:
            return []
        try:
            return self._undoable(lambda: move(ids))
        except Error as error:
            if not is_refusal(error):
                raise
            if len(ids) == 1:
                signals.tell(signals.row_refused, self.model, job_id=ids[0], error=error)
                return []
        half = len(ids) // 2
        return self._sparing_refused(move, ids[:half]) + self._sparing_refused(move, ids[half:])

    def _undoable(self, move: Callable[[], list[T]]) -> list[T]:
        """Inside a caller's transaction an error of one statement must not end it."""
        if not connections[self._alias].in_atomic_block:
            return move()
        with transaction.atomic(using=self._alias):
            return move()

    def _take_due(
        self, due: models.QuerySet[ProcessingJob], worker: str, limit: int
    ) -> list[ProcessingJob]:
        try:
            return self._take(due, worker, limit)
        except Error as error:
            if not is_refusal(error):
                raise
        candidates = iter(due.values_list("pk", flat=True)[:CHUNK])
        taken: list[ProcessingJob] = []
        while ids := list(islice(candidates, limit - len(taken))):
            taken += self._sparing_refused(
                lambda some: self._take(due.filter(pk__in=some), worker, len(some)), ids
            )
        return taken

    def _rescue_all(self) -> Iterator[tuple[Any, ...]]:
        try:
            full = True
            while full:
                chunk = self._undoable(self._rescue_chunk)
                yield from chunk
                full = len(chunk) == _RESCUE_CHUNK
        except Error as error:
            if not is_refusal(error):
                raise
            for ids in _chunks(self._stale_ids(), _RESCUE_CHUNK):
                yield from self._sparing_refused(self._rescue_these, ids)

    # --- the statements' own needs -------------------------------------------------------------

    @property
    def _alias(self) -> str:
        """The database of every move. Never a replica: a decision needs the row as it is."""
        explicit: str | None = self._db  # type: ignore[attr-defined]
        return explicit or router.db_for_write(self.model)

    @property
    def _rows(self) -> models.QuerySet[ProcessingJob]:
        """The whole table, on the database of every move."""
        self._refuse_filters()
        return self.model._base_manager.using(self._alias)

    def _due(
        self, queues: list[str] | None, handlers: list[str] | None
    ) -> models.QuerySet[ProcessingJob]:
        """What can be claimed now, in the order of its turn."""
        due = self._rows.filter(
            _Sql("status IN ('pending', 'failed')"),
            _Sql(_NOT_PAUSED),
            available_at__lte=Now(),
        )
        if queues is not None:
            due = due.filter(queue__in=queues)
        if handlers is not None:
            due = due.filter(handler__in=handlers)
        return due.order_by("-priority", "available_at", "pk")

    def _take(
        self, due: models.QuerySet[ProcessingJob], worker: str, limit: int
    ) -> list[ProcessingJob]:
        with transaction.atomic(using=self._alias):
            free, params = self._free(due, limit)
            return self._returned(
                _CLAIM.replace("{due}", free),
                (*params, worker, jobqueue_settings().STALE_LOCK_AFTER),
            )

    def _free(self, due: models.QuerySet[ProcessingJob], limit: int) -> tuple[str, tuple[Any, ...]]:
        """The SQL that locks the first of these, and skips those that others have locked."""
        free = due.select_for_update(skip_locked=True, no_key=True).values("id")[:limit]
        sql, params = free.query.get_compiler(using=self._alias).as_sql()
        return sql, tuple(params)

    def _rescue_chunk(self) -> list[tuple[Any, ...]]:
        return self._execute(_RESCUE.replace("{which}", ""), (_RESCUE_CHUNK, _LOST_FINGERPRINT))

    def _rescue_these(self, ids: list[int]) -> list[tuple[Any, ...]]:
        statement = _RESCUE.replace("{which}", "AND id = ANY (%s::bigint[])")
        return self._execute(statement, (ids, len(ids), _LOST_FINGERPRINT))

    def _stale_ids(self) -> list[int]:
        stale = self._rows.filter(status=Status.PROCESSING, lock_expires_at__lt=Now())
        return list(stale.order_by("lock_expires_at", "pk").values_list("pk", flat=True))

    def _move(self, ids: Collection[int], sources: Sequence[Status], **changes: Any) -> list[int]:
        """Change those of these rows that are still in one of the sources, and return their ids."""
        chunks = _chunks(sorted(checked_ids(ids)), CHUNK)
        return [pk for chunk in chunks for pk in self._move_chunk(chunk, sources, changes)]

    def _move_chunk(
        self, ids: list[int], sources: Sequence[Status], changes: dict[str, Any]
    ) -> list[int]:
        with transaction.atomic(using=self._alias):
            movable = self._rows.filter(pk__in=ids, status__in=sources).order_by("pk")
            locked = list(movable.select_for_update(no_key=True).values_list("pk", flat=True))
            if locked:
                self._rows.filter(pk__in=locked, status__in=sources).update(**changes)
        return locked

    def id_chunks(self) -> Iterator[list[int]]:
        """The ids of this queryset in ascending chunks, each read when the one before is done."""
        ordered = self.order_by("pk").values_list("pk", flat=True)
        chunk = list(ordered[:CHUNK])
        while chunk:
            yield chunk
            chunk = list(ordered.filter(pk__gt=chunk[-1])[:CHUNK])

    def _prune(
        self,
        statuses: Sequence[Status],
        older_than: float | timedelta | None,
        retention: float | None,
    ) -> int:
        span = retention if older_than is None else checked_delay(older_than, what="age to prune")
        if span is None:
            return 0
        gone = 0
        prune = _PRUNE.format(statuses=", ".join(f"'{status.value}'" for status in statuses))
        while rows := self._execute(prune, (span, CHUNK)):
            gone += len(rows)
        return gone

    def _tokens(self, jobs: Collection[ProcessingJob]) -> dict[int, int]:
        self._refuse_other_databases(jobs)
        newest = _newest_claims(jobs, job=lambda job: job)
        return {pk: _token(job) for pk, job in newest.items()}

    def _refuse_other_databases(self, jobs: Iterable[ProcessingJob]) -> None:
        # Ids and tokens of two databases are alike: a job of the other one would be ended here.
        for job in jobs:
            if job._state.db not in (self._alias, None):
                raise ValueError(
                    f"Job {job.pk} is from the database {job._state.db!r}, this would end one in"
                    f" {self._alias!r}: use ProcessingJob.objects.using({job._state.db!r})."
                )

    def _refuse_filters(self) -> None:
        # Or `filter(queue="mail").prune()` would prune every queue.
        if self.query.where or self.query.is_sliced:
            raise TypeError(
                "This move does not look at filters: call it on ProcessingJob.objects, with"
                " using(alias) at most. For dead letters there is requeue_dead_letters()."
            )

    def _execute(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        self._refuse_filters()
        with connections[self._alias].cursor() as cursor:
            cursor.execute(sql, params)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def _returned(self, sql: str, params: Sequence[Any]) -> list[ProcessingJob]:
        rows = self._execute(sql.replace("{columns}", self._columns()), params)
        return [self._job_from(row) for row in rows]

    def _columns(self) -> str:
        # Named, never `*`: a newer table may have more columns than this code knows.
        return ", ".join(f'processing_jobs."{f.column}"' for f in self.model._meta.concrete_fields)

    def _job_from(self, row: Sequence[Any]) -> ProcessingJob:
        fields = self.model._meta.concrete_fields
        values = [
            _parsed(value) if isinstance(field, models.JSONField) else value
            for field, value in zip(fields, row, strict=True)
        ]
        return self.model.from_db(self._alias, [field.attname for field in fields], values)


class _Sql(Func):
    """A condition written out, with constants: a partial index is only used when the planner sees
    its condition, which a bound parameter would hide."""

    conditional = True
    output_field = BooleanField()

    def __init__(self, sql: str) -> None:
        super().__init__(template=sql)


# --- between rows and objects ------------------------------------------------------------------


def _answered(job: ProcessingJob, new: NewJob) -> ProcessingJob:
    """The job that holds the key already, as the answer to this call."""
    job.created = False
    job.differs = job.handler != new.handler or job.payload != new.payload
    return job


def _verdict(outcome: Outcome) -> dict[str, Any]:
    """What the statement that settles needs of one outcome."""
    job = outcome.job
    verdict: dict[str, Any] = {"token": _token(job)}
    if isinstance(outcome, Succeeded):
        verdict["status"] = Status.SUCCEEDED
        if outcome.result is not None:
            verdict["result"] = outcome.result
        return verdict
    return verdict | {
        "status": Status.DEAD_LETTER if isinstance(outcome, Refused) else Status.FAILED,
        "delay": checked_delay(outcome.delay) if isinstance(outcome, Failed) else 0,
        "error": outcome.failure.error,
        "traceback": outcome.failure.traceback,
        "fingerprint": outcome.failure.fingerprint,
        "worker": job.locked_by,
        "started_at": job.locked_at and job.locked_at.isoformat(),
    }


def _lock_lost(job: ProcessingJob) -> str:
    return (
        f"Job {job.pk} is not locked by this claim any more (lock token {_token(job)}):"
        " its lock ran out and was taken back, or it has ended. Nothing was changed."
    )


def _newest_claims(claims: Iterable[T], *, job: Callable[[T], ProcessingJob]) -> dict[int, T]:
    """By id, in its order; of two claims of one job, the one with the higher token."""
    ordered = sorted(claims, key=lambda claim: (job(claim).pk, _token(job(claim))))
    return {job(claim).pk: claim for claim in ordered}


def _token(job: ProcessingJob) -> int:
    """The token of the claim that this object came from."""
    return job.lock_token if job.claim_token is None else job.claim_token


def _names(names: Collection[str] | None, what: str) -> list[str] | None:
    if isinstance(names, (str, bytes)):
        raise ValueError(f"{what}s must be a collection of names, not {names!r}.")
    return None if names is None else [checked_name(name, what=what) for name in names]


def _nothing_due(queues: Collection[str] | None, handlers: Collection[str] | None) -> str:
    where = "any queue" if queues is None else f"the queues {sorted(queues)}"
    what = "any handler" if handlers is None else f"the handlers {sorted(handlers)}"
    return f"No job is due in {where} for {what}."


def _parsed(text: str | None) -> Any:
    """JSON from a row. None also for what Python cannot read, which only plain SQL can store: one
    such row must not keep a worker from all the others."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_of(tokens: Mapping[int, int], ids: Iterable[int]) -> str:
    return json.dumps({pk: tokens[pk] for pk in ids})


def _first(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [row[0] for row in rows]


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, size)):
        yield chunk


# --- telling what happened ---------------------------------------------------------------------


def _tell_enqueued(jobs: Iterable[ProcessingJob]) -> None:
    for job in jobs:
        if job.created:
            signals.tell(signals.job_enqueued, type(job), job=job)


def _tell_settled(outcome: Outcome, moved: Sequence[Any] | None) -> None:
    job = outcome.job
    if moved is None:
        signals.tell(signals.job_lock_lost, type(job), job=job)
        return
    job.status, job.available_at, job.finished_at, job.last_error, job.error_fingerprint = moved
    job.locked_at = job.locked_by = job.lock_expires_at = None
    if job.status == Status.SUCCEEDED:
        if not isinstance(outcome, Succeeded):
            # An atomic handler's transaction was committed, and what came after it failed.
            signals.tell(signals.after_commit_failed, type(job), job=job, failure=outcome.failure)
            outcome = Succeeded(job=job, seconds=outcome.seconds)
        job.result = outcome.result
        signals.tell(signals.job_succeeded, type(job), job=job, outcome=outcome)
    elif job.status == Status.FAILED:
        signals.tell(signals.job_failed, type(job), job=job, outcome=outcome)
    else:
        signals.tell(signals.job_dead_lettered, type(job), job=job, outcome=outcome)


def _tell_rescued(job: ProcessingJob, worker: str, since: datetime) -> None:
    signals.tell(signals.job_lost, type(job), job=job, worker=worker, since=since)
    if job.status == Status.DEAD_LETTER:
        signals.tell(signals.job_dead_lettered, type(job), job=job, outcome=None)


# --- the statements ----------------------------------------------------------------------------
# In a statement that ends claims, `held` takes the row locks in the order of ids, through the
# primary key. The fence compares each row's token with the claim's. `status || ''` keeps the
# planner from taking "processing" for a rare value and starting from there.

# Filled in by `_returned`.
_RETURNING = "RETURNING {columns}"
_UNLOCKED = "locked_at = NULL, locked_by = NULL, lock_expires_at = NULL"
# The same for the queue: in a project with one queue, the statistics call any condition on it rare.
_NOT_PAUSED = "queue || '' <> ALL (ARRAY (SELECT name FROM processing_queues WHERE paused))"
_STILL_PROCESSING = "status || '' = 'processing'"
_HELD = """held AS MATERIALIZED (
    SELECT id FROM processing_jobs WHERE id = ANY (%s::bigint[]) ORDER BY id FOR NO KEY UPDATE
)"""
_SKIPPING_LOCKED = ("FOR NO KEY UPDATE", "FOR NO KEY UPDATE SKIP LOCKED")
_IN_HELD = "id = ANY (ARRAY (SELECT held.id FROM held))"

_NEW_COLUMNS = "queue, handler, payload, priority, max_attempts, available_at, idempotency_key"
_NEW_VALUES = """
    new.queue, new.handler, new.payload::jsonb, new.priority, new.max_attempts,
    COALESCE(new.available_at, {now} + new.delay * interval '1 second'), new.idempotency_key
"""
_ON_KNOWN_KEY = "ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING"
# Stricter levels answer a conflict with an invisible row by an error, so nothing is tried there.
_READ_COMMITTED = "current_setting('transaction_isolation') = 'read committed'"

_NEW_ROW = """
FROM (VALUES (%s::text, %s::text, %s::text, %s::smallint, %s::smallint, %s::timestamptz,
              %s::float8, %s::text))
     AS new (queue, handler, payload, priority, max_attempts, available_at, delay, idempotency_key)
"""
_INSERT_NEW = f"""
INSERT INTO processing_jobs ({_NEW_COLUMNS})
SELECT {_NEW_VALUES.format(now="STATEMENT_TIMESTAMP()")}
{_NEW_ROW}
"""
_INSERT = f"{_INSERT_NEW} {_RETURNING}"
_INSERT_KEYED = f"{_INSERT_NEW} WHERE {_READ_COMMITTED} {_ON_KNOWN_KEY} {_RETURNING}"
_INSERT_KEYED_STRICT = f"{_INSERT_NEW} {_ON_KNOWN_KEY} {_RETURNING}"
_DRAW_IDS = """
SELECT nextval(pg_get_serial_sequence('processing_jobs', 'id')), STATEMENT_TIMESTAMP()
FROM generate_series(1, %s)
"""
_INSERT_MANY = f"""
INSERT INTO processing_jobs (id, {_NEW_COLUMNS})
SELECT new.id, {_NEW_VALUES.format(now="%s::timestamptz")}
FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::smallint[], %s::smallint[],
            %s::timestamptz[], %s::float8[], %s::text[]) WITH ORDINALITY
     AS new (id, queue, handler, payload, priority, max_attempts, available_at, delay,
             idempotency_key, position)
WHERE new.idempotency_key IS NULL OR {_READ_COMMITTED}
ORDER BY new.position
{_ON_KNOWN_KEY}
{_RETURNING}
"""

# `due` is materialised and reaches the UPDATE as an array: in any other form a plan may run the
# locking part again and take more rows than its LIMIT. The column is qualified: should `due` ever
# have no `id`, that is an error, and not every row's own id.
_CLAIM = f"""
WITH due AS MATERIALIZED ({{due}})
UPDATE processing_jobs
SET status = 'processing', attempts = attempts + 1, lock_token = lock_token + 1,
    locked_at = STATEMENT_TIMESTAMP(), locked_by = %s,
    lock_expires_at = STATEMENT_TIMESTAMP() + %s * interval '1 second'
WHERE id = ANY (ARRAY (SELECT due.id FROM due))
{_RETURNING}
"""

# Skips a row that somebody has locked: waiting for one, all the others would run out.
_EXTEND = f"""
WITH {_HELD.replace(*_SKIPPING_LOCKED)}
UPDATE processing_jobs
SET lock_expires_at = CLOCK_TIMESTAMP() + %s * interval '1 second'
FROM (SELECT %s::jsonb AS tokens) AS given
WHERE {_IN_HELD} AND {_STILL_PROCESSING}
  AND lock_token = (given.tokens ->> id::text)::bigint
RETURNING id
"""

_RELEASE = f"""
WITH {_HELD}
UPDATE processing_jobs
SET status = 'pending', attempts = GREATEST(attempts - 1, 0), {_UNLOCKED}
FROM (SELECT %s::jsonb AS tokens) AS given
WHERE {_IN_HELD} AND {_STILL_PROCESSING}
  AND lock_token = (given.tokens ->> id::text)::bigint
RETURNING id
"""

_RELEASE_UNLOCKED = _RELEASE.replace(*_SKIPPING_LOCKED)

_SETTLED_FIELDS = ("status", "available_at", "finished_at", "last_error", "error_fingerprint")
_VERDICT = "(given.verdicts -> id::text)"
_RETRIED = f"({_VERDICT} ->> 'status' = 'failed' AND attempts < max_attempts)"
_SETTLE = f"""
WITH given AS NOT MATERIALIZED (SELECT %s::jsonb AS verdicts),
{_HELD},
ended AS (
    UPDATE processing_jobs
    SET status = CASE WHEN {_RETRIED} THEN 'failed'
                      WHEN {_VERDICT} ->> 'status' = 'failed' THEN 'dead_letter'
                      ELSE {_VERDICT} ->> 'status' END,
        available_at = CASE
            WHEN {_RETRIED}
            THEN STATEMENT_TIMESTAMP() + ({_VERDICT} ->> 'delay')::float8 * interval '1 second'
            ELSE available_at END,
        finished_at = CASE WHEN {_RETRIED} THEN NULL ELSE STATEMENT_TIMESTAMP() END,
        result = {_VERDICT} -> 'result',
        last_error = COALESCE({_VERDICT} ->> 'error', last_error),
        error_fingerprint = COALESCE({_VERDICT} ->> 'fingerprint', error_fingerprint),
        {_UNLOCKED}
    FROM given
    WHERE {_IN_HELD} AND {_STILL_PROCESSING}
      AND lock_token = ({_VERDICT} ->> 'token')::bigint
    RETURNING id, {", ".join(_SETTLED_FIELDS)}, attempts, lock_token
),
recorded AS (
    INSERT INTO processing_job_attempts
        (job_id, number, lock_token, outcome, worker, started_at,
         error, traceback, error_fingerprint)
    SELECT id, attempts, lock_token, 'failed', {_VERDICT} ->> 'worker',
           ({_VERDICT} ->> 'started_at')::timestamptz, {_VERDICT} ->> 'error',
           {_VERDICT} ->> 'traceback', {_VERDICT} ->> 'fingerprint'
    FROM ended, given
    WHERE {_VERDICT} ->> 'error' IS NOT NULL
    ON CONFLICT DO NOTHING
)
SELECT id, {", ".join(_SETTLED_FIELDS)} FROM ended
"""

_SETTLE_UNLOCKED = _SETTLE.replace(*_SKIPPING_LOCKED)

_LOST_FINGERPRINT = described("Worker lost.").fingerprint
# In the order of the model's fields, as `from_db` wants them.
_RESCUED_FIELDS = ("id", "queue", "handler", "status", "attempts", "max_attempts", "last_error")
_RESCUE = f"""
WITH stale AS MATERIALIZED (
    SELECT id, attempts, lock_token, locked_by, locked_at
    FROM processing_jobs
    WHERE status = 'processing' AND lock_expires_at < STATEMENT_TIMESTAMP() {{which}}
    ORDER BY lock_expires_at, id
    LIMIT %s
    FOR NO KEY UPDATE SKIP LOCKED
),
moved AS (
    UPDATE processing_jobs
    SET status = CASE WHEN attempts < max_attempts THEN 'failed' ELSE 'dead_letter' END,
        available_at = STATEMENT_TIMESTAMP(),
        finished_at = CASE WHEN attempts < max_attempts THEN NULL ELSE STATEMENT_TIMESTAMP() END,
        last_error = format(
            'Worker lost: %%s took the job at %%s, and its lock ran out at %%s.', locked_by,
            date_trunc('second', locked_at), date_trunc('second', lock_expires_at)
        ),
        error_fingerprint = %s,
        {_UNLOCKED}
    WHERE id = ANY (ARRAY (SELECT stale.id FROM stale))
      AND {_STILL_PROCESSING} AND lock_expires_at < STATEMENT_TIMESTAMP()
    RETURNING {", ".join(_RESCUED_FIELDS)}, error_fingerprint
),
recorded AS (
    INSERT INTO processing_job_attempts
        (job_id, number, lock_token, outcome, worker, started_at, error, error_fingerprint)
    SELECT id, stale.attempts, lock_token, 'lost', locked_by, locked_at,
           last_error, error_fingerprint
    FROM stale JOIN moved USING (id)
    ON CONFLICT DO NOTHING
)
SELECT {", ".join(f"moved.{field}" for field in _RESCUED_FIELDS)}, locked_by, locked_at
FROM stale JOIN moved USING (id)
"""

# The history goes in the same statement, so that no row is collected in Python to be cascaded.
_PRUNE = """
WITH old AS MATERIALIZED (
    SELECT id
    FROM processing_jobs
    WHERE status IN ({statuses}) AND finished_at < STATEMENT_TIMESTAMP() - %s * interval '1 second'
    ORDER BY finished_at, id
    LIMIT %s
    FOR UPDATE SKIP LOCKED
),
history AS (
    DELETE FROM processing_job_attempts WHERE job_id = ANY (ARRAY (SELECT old.id FROM old))
)
DELETE FROM processing_jobs WHERE id = ANY (ARRAY (SELECT old.id FROM old))
RETURNING id
"""
