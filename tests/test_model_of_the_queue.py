"""Random histories of jobs against a model: every move, by live workers, lost ones and people.

A failure prints the shortest sequence that shows it, as a program. `JOBQUEUE_MODEL_EXAMPLES=5000`
looks longer, and elsewhere each time; without it every run looks at the same sequences.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from itertools import cycle
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from django_jobqueue import InvalidPayload, LockLost, NoJobAvailable, NotDeadLetter, UnknownHandler
from django_jobqueue.failure import described
from django_jobqueue.models import ProcessingJob, Queue
from django_jobqueue.outcomes import Failed, Outcome, Refused, Succeeded
from tests.queue_model import (
    HANDLERS,
    PENDING,
    Claim,
    Ending,
    Instant,
    ModelJob,
    QueueModel,
    Wanted,
)
from tests.rows import WORKER_A, WORKER_B, database_now, make_stale, sql

jobs = ProcessingJob.objects

LONG_RUN = os.environ.get("JOBQUEUE_MODEL_EXAMPLES")
NOBODY = 2**62
"""The id of no job."""

# --- what may be drawn -------------------------------------------------------------------------
# Every span is a multiple of half a minute, far more than an example takes: which job is due and
# which lock is stale never depends on how fast the test runs.

ADD, FAIL_AT_ONCE, MAIL = HANDLERS
PAYLOADS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    ADD: st.sampled_from([{"a": 0}, {"a": 1}]),
    FAIL_AT_ONCE: st.just({}),
    MAIL: st.just({"to": "a@example.org"}),
}
QUEUES = ("default", "mail", "slow")
KEYS = ("red", "green", "blue")

workers = st.sampled_from([WORKER_A, WORKER_B])
spans = st.sampled_from([0, 30, 90])
ages = st.sampled_from([None, 0, 30, 600])


def mostly_none(*others: Any) -> st.SearchStrategy[Any]:
    """None in three cases of four: a history in which most moves find no job tells little."""
    return st.sampled_from([None, *others, *[None] * (3 * len(others) - 1)])


def orders_for(handler: str) -> st.SearchStrategy[Wanted]:
    return st.builds(
        Wanted,
        handler=st.just(handler),
        payload=PAYLOADS[handler],
        queue=mostly_none(*QUEUES),
        priority=st.sampled_from([None, 0, 1, -100, 100]),
        delay=mostly_none(0, 30, 90),
        max_attempts=st.sampled_from([None, 1, 1, 2, 3]),
        idempotency_key=mostly_none(*KEYS),
    )


orders = st.sampled_from(list(HANDLERS)).flatmap(orders_for)
endings = st.builds(
    Ending,
    kind=st.sampled_from(["succeeded", "failed", "refused"]),
    result=st.sampled_from([None, 0, "", [], {"sum": 1}]),
    error=st.sampled_from(["broken", "refused", "down"]),
    delay=spans,
)
some_queues = mostly_none([], ["mail"], ["slow", "default"])
some_handlers = mostly_none([], [ADD], [MAIL, FAIL_AT_ONCE])


# --- between the model and the rows ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is compared of one job. Spans are in half minutes from now."""

    status: str
    handler: str
    payload: dict[str, Any]
    queue: str
    priority: int
    key: str | None
    attempts: int
    max_attempts: int
    token: int
    locked_by: str | None
    locked_for: int | None
    due: bool
    due_in: int | None
    finished_in: int | None
    result: Any
    last_error: str
    history: list[list[Any]]


STORED_FACTS = """
SELECT job.id, jsonb_build_object(
    'status', status, 'handler', handler, 'payload', payload, 'queue', queue,
    'priority', priority, 'key', idempotency_key,
    'attempts', attempts, 'max_attempts', max_attempts, 'token', lock_token,
    'locked_by', locked_by,
    'locked_for', round(extract(epoch FROM lock_expires_at - now.instant) / 30),
    'due', claimable AND available_at <= now.instant,
    'due_in', CASE WHEN claimable
                   THEN round(extract(epoch FROM available_at - now.instant) / 30) END,
    'finished_in', round(extract(epoch FROM finished_at - now.instant) / 30),
    'result', result,
    'last_error', CASE WHEN (last_error = '') = (error_fingerprint = '')
                       THEN split_part(last_error, ' at ', 1) END,
    'history', (
        SELECT coalesce(jsonb_agg(jsonb_build_array(number, lock_token, outcome, worker)
                                  ORDER BY attempt.id), '[]')
        FROM processing_job_attempts AS attempt WHERE attempt.job_id = job.id
    )
)
FROM (SELECT *, status IN ('pending', 'failed') AS claimable FROM processing_jobs) AS job,
     (SELECT clock_timestamp() AS instant) AS now
"""


def stored_facts() -> dict[int, Facts]:
    """Every job, by id, in one statement."""
    return {pk: Facts(**json.loads(facts)) for pk, facts in sql(STORED_FACTS)}


def expected_facts(model: QueueModel) -> dict[int, Facts]:
    now = model.now()
    return {pk: facts_of(job, now) for pk, job in model.jobs.items()}


def facts_of(job: ModelJob, now: Instant) -> Facts:
    def half_minutes(instant: Instant | None) -> int | None:
        return None if instant is None else round((instant.seconds - now.seconds) / 30)

    return Facts(
        status=job.status,
        handler=job.handler,
        payload=job.payload,
        queue=job.queue,
        priority=job.priority,
        key=job.key,
        attempts=job.attempts,
        max_attempts=job.max_attempts,
        token=job.token,
        locked_by=job.locked_by,
        locked_for=half_minutes(job.lock_expires_at),
        due=job.is_due(now),
        due_in=half_minutes(job.available_at) if job.is_claimable else None,
        finished_in=half_minutes(job.finished_at),
        result=job.result,
        last_error=job.last_error,
        history=[list(astuple(attempt)) for attempt in job.history],
    )


def claim_of(job: ProcessingJob) -> Claim:
    return Claim(job.pk, job.lock_token)


def outcome_of(job: ProcessingJob, ending: Ending) -> Outcome:
    if ending.kind == "succeeded":
        return Succeeded(job=job, result=ending.result)
    failure = described(ending.error)
    if ending.kind == "refused":
        return Refused(job=job, failure=failure)
    return Failed(job=job, failure=failure, delay=ending.delay)


def arguments_of(wanted: Wanted) -> dict[str, Any]:
    return asdict(wanted)


def ids_of(found: Iterable[ProcessingJob]) -> list[int]:
    return [job.pk for job in found]


def move_every_row_back(seconds: int) -> None:
    """So much later, as far as the rows can tell."""
    names = ("available_at", "locked_at", "lock_expires_at", "created_at", "finished_at")
    earlier = {name: F(name) - timedelta(seconds=seconds) for name in names}
    ProcessingJob.objects.update(**earlier)


# --- the histories -----------------------------------------------------------------------------


class JobsOfTwoWorkers(RuleBasedStateMachine):
    """What happens to a table of jobs, step by step, and in the model beside it.

    `ids` are all jobs there ever were, `claims` all that a worker was ever handed: a claim drawn
    later may belong to a worker that crashed or lost the job. Rows are committed, so that another
    session can hold some of them; each history cleans up behind itself.
    """

    ids: Bundle[int] = Bundle("ids")
    claims: Bundle[ProcessingJob] = Bundle("claims")

    any_id = ids | claims.map(lambda job: int(job.pk)) | st.just(NOBODY)
    some_ids = st.lists(any_id, min_size=1, max_size=4)
    no_rows: st.SearchStrategy[list[int]] = st.just([])
    rows_elsewhere = no_rows | no_rows | st.lists(ids, max_size=3, unique=True)
    old_claims = st.lists(claims, max_size=3)

    def __init__(self) -> None:
        super().__init__()
        self.model = QueueModel()
        self.in_hand: dict[str, list[ProcessingJob]] = {WORKER_A: [], WORKER_B: []}
        self.newest_id = 0
        self.tokens: dict[int, int] = {}
        self.another_session = connections["default"].copy()

    def teardown(self) -> None:
        self.another_session.close()
        sql("DELETE FROM processing_job_attempts")
        sql("DELETE FROM processing_jobs")
        sql("DELETE FROM processing_queues")

    # --- enqueue -------------------------------------------------------------------------------

    @initialize(target=ids, wanted=st.lists(orders, min_size=2, max_size=6))
    def begin_with_some_jobs(self, wanted: list[Wanted]) -> MultipleResults[int]:
        return self.expect_many(wanted)

    @initialize(target=claims, worker=workers)
    def begin_with_a_claim(self, worker: str) -> MultipleResults[ProcessingJob]:
        self.expect_many([Wanted(handler=MAIL, payload={"to": "b@example.org"})])
        return self.expect_claim(worker)

    @rule(target=ids, wanted=orders, instant=mostly_none(-600, 0, 30))
    def enqueue(self, wanted: Wanted, instant: int | None) -> int:
        options = arguments_of(wanted)
        if instant is not None:
            wanted = replace(wanted, delay=instant)
            options["delay"] = None
            options["available_at"] = database_now() + timedelta(seconds=instant)

        job = jobs.enqueue(**options)

        self.expect_answers([job], [wanted])
        return job.pk

    @rule(target=ids, wanted=st.lists(orders, max_size=6))
    def enqueue_many(self, wanted: list[Wanted]) -> MultipleResults[int]:
        return self.expect_many(wanted)

    @rule(wanted=orders, job=claims)
    def make_mistakes(self, wanted: Wanted, job: ProcessingJob) -> None:
        with pytest.raises(UnknownHandler, match="Job 1 of the batch"):
            jobs.enqueue_many([arguments_of(wanted), {"handler": "nobody's"}])
        with pytest.raises(InvalidPayload):
            jobs.complete(job, {"not", "JSON"})

    @rule(wanted=orders, worker=workers)
    def roll_back(self, wanted: Wanted, worker: str) -> None:
        with transaction.atomic():
            jobs.enqueue(**arguments_of(wanted))
            jobs.settle([Succeeded(job=job) for job in jobs.claim(worker=worker, limit=2)])
            jobs.cancel_many(list(self.model.jobs))
            transaction.set_rollback(True)

    def expect_many(self, wanted: list[Wanted]) -> MultipleResults[int]:
        made = jobs.enqueue_many(map(arguments_of, wanted))

        self.expect_answers(made, wanted)
        return multiple(*ids_of(made))

    def expect_answers(self, made: Sequence[ProcessingJob], wanted: Sequence[Wanted]) -> None:
        now = self.model.now()
        assert len(made) == len(wanted)
        for job, one in zip(made, wanted, strict=True):
            holder = self.model.holder_of(one.idempotency_key)
            if holder is None:
                self.expect_inserted(job, one, now)
            else:
                differs = (holder.handler, holder.payload) != (one.handler, one.payload)
                assert (job.pk, job.created, job.differs) == (holder.pk, False, differs)

    def expect_inserted(self, job: ProcessingJob, wanted: Wanted, now: Instant) -> None:
        assert (job.created, job.differs) == (True, False)
        assert job.pk > self.newest_id, "an id is never given twice, and the order is kept"
        self.newest_id = job.pk
        self.model.enqueue(wanted, job.pk, now)

    # --- claim ---------------------------------------------------------------------------------

    @rule(
        target=claims,
        worker=workers,
        queues=some_queues,
        handlers=some_handlers,
        limit=st.sampled_from([1, 2, 3, 100, 0, -1]),
        elsewhere=rows_elsewhere,
    )
    def claim(
        self,
        worker: str,
        queues: list[str] | None,
        handlers: list[str] | None,
        limit: int,
        elsewhere: list[int],
    ) -> MultipleResults[ProcessingJob]:
        with self.locked_by_another_session(elsewhere):
            claimed = jobs.claim(worker=worker, queues=queues, handlers=handlers, limit=limit)

        assert ids_of(claimed) == self.model.claim(
            worker, queues=queues, handlers=handlers, limit=limit, elsewhere=elsewhere
        )
        return self.take(worker, claimed)

    @rule(target=claims, worker=workers)
    def claim_all(self, worker: str) -> MultipleResults[ProcessingJob]:
        return self.expect_claim(worker)

    @rule(target=claims, worker=workers, lost=claims)
    def claim_after_a_lock_ran_out(
        self, worker: str, lost: ProcessingJob
    ) -> MultipleResults[ProcessingJob]:
        self.let_run_out([lost.pk])
        return self.expect_claim(worker)

    @rule(target=claims, worker=workers, queues=some_queues, handlers=some_handlers)
    def dequeue(
        self, worker: str, queues: list[str] | None, handlers: list[str] | None
    ) -> MultipleResults[ProcessingJob]:
        expected = self.model.claim(worker, queues=queues, handlers=handlers, limit=1)

        try:
            claimed = [jobs.dequeue(worker=worker, queues=queues, handlers=handlers)]
        except NoJobAvailable:
            claimed = []

        assert ids_of(claimed) == expected
        return self.take(worker, claimed)

    def expect_claim(self, worker: str) -> MultipleResults[ProcessingJob]:
        claimed = jobs.claim(worker=worker, limit=100)

        assert ids_of(claimed) == self.model.claim(worker, limit=100)
        return self.take(worker, claimed)

    def take(self, worker: str, claimed: list[ProcessingJob]) -> MultipleResults[ProcessingJob]:
        for job in claimed:
            expected = self.model.jobs[job.pk]
            assert (job.status, job.attempts) == (expected.status, expected.attempts)
            assert (job.lock_token, job.locked_by) == (expected.token, worker)
            assert (job.handler, job.payload) == (expected.handler, expected.payload)
        self.in_hand[worker] += claimed
        return multiple(*claimed)

    @rule(worker=workers, old=old_claims)
    def extend_locks(self, worker: str, old: list[ProcessingJob]) -> None:
        held = self.in_hand[worker] + old

        assert sorted(jobs.extend_locks(held)) == self.model.extend_locks(map(claim_of, held))

    @rule(worker=workers, old=old_claims)
    def release(self, worker: str, old: list[ProcessingJob]) -> None:
        held = self.in_hand[worker] + old
        self.in_hand[worker] = []

        assert jobs.release(held) == self.model.release(map(claim_of, held))

    # --- settle --------------------------------------------------------------------------------

    @rule(job=claims, ending=endings)
    def complete(self, job: ProcessingJob, ending: Ending) -> None:
        succeeded = replace(ending, kind="succeeded")

        if self.model.settle([(claim_of(job), succeeded)]):
            jobs.complete(job, ending.result)
            self.expect_in_hand(job)
        else:
            with pytest.raises(LockLost, match=f"Job {job.pk} "):
                jobs.complete(job, ending.result)

    @rule(job=claims, ending=endings)
    def fail(self, job: ProcessingJob, ending: Ending) -> None:
        failed = replace(ending, kind="failed", delay=self.model.backoff(job.pk))

        if self.model.settle([(claim_of(job), failed)]):
            jobs.fail(job, ending.error)
            self.expect_in_hand(job)
        else:
            with pytest.raises(LockLost, match=f"Job {job.pk} "):
                jobs.fail(job, ending.error)

    @rule(
        worker=workers,
        some=st.lists(endings, min_size=1, max_size=3),
        old=st.lists(st.tuples(claims, endings), max_size=3),
    )
    def settle(
        self, worker: str, some: list[Ending], old: list[tuple[ProcessingJob, Ending]]
    ) -> None:
        ends = [*zip(self.in_hand[worker], cycle(some), strict=False), *old]
        self.in_hand[worker] = []

        settled = jobs.settle([outcome_of(job, ending) for job, ending in ends])

        expected = self.model.settle((claim_of(job), ending) for job, ending in ends)
        assert sorted(settled) == expected
        for job, _ending in ends:
            if job.pk in settled and job.lock_token == self.model.jobs[job.pk].token:
                self.expect_in_hand(job)

    @rule(job=claims, ending=endings)
    def come_late(self, job: ProcessingJob, ending: Ending) -> None:
        """A worker that lost its lock, and does not know it, tries everything."""
        if self.model.holds(claim_of(job)):
            return

        assert jobs.extend_locks([job]) == []
        assert jobs.release([job]) == []
        assert jobs.settle([outcome_of(job, ending)]) == []

    def expect_in_hand(self, job: ProcessingJob) -> None:
        """The object has the values that were recorded."""
        expected = self.model.jobs[job.pk]
        assert (job.status, job.locked_by) == (expected.status, None)
        assert (job.finished_at is None) == (expected.finished_at is None)
        assert job.result == expected.result

    # --- time and rescue -----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([30, 60, 90, 600]))
    def let_time_pass(self, seconds: int) -> None:
        move_every_row_back(seconds)
        self.model.let_time_pass(seconds)

    @rule(worker=workers)
    def crash(self, worker: str) -> None:
        self.in_hand[worker] = []
        self.let_run_out(self.model.held_by(worker))

    @rule(job=claims)
    def let_a_lock_run_out(self, job: ProcessingJob) -> None:
        self.let_run_out([job.pk])

    def let_run_out(self, ids: list[int]) -> None:
        locked = self.model.let_locks_run_out(ids)
        make_stale(*jobs.filter(pk__in=locked))

    @rule(elsewhere=rows_elsewhere)
    def rescue_stale_locks(self, elsewhere: list[int]) -> None:
        with self.locked_by_another_session(elsewhere):
            rescued = jobs.rescue_stale_locks()

        assert (rescued.failed, rescued.dead_letters) == self.model.rescue_stale_locks(elsewhere)

    # --- what people do ------------------------------------------------------------------------

    @rule(pk=any_id)
    def requeue_dead_letter(self, pk: int) -> None:
        if pk not in self.model.jobs:
            with pytest.raises(ProcessingJob.DoesNotExist):
                jobs.requeue_dead_letter(pk)
        elif not self.model.requeue_many([pk]):
            with pytest.raises(NotDeadLetter):
                jobs.requeue_dead_letter(pk)
        else:
            job = jobs.requeue_dead_letter(pk)
            assert (job.pk, job.status, job.attempts) == (pk, PENDING, 0)

    @rule(ids=some_ids)
    def requeue_many(self, ids: list[int]) -> None:
        assert jobs.requeue_many(ids) == self.model.requeue_many(ids)

    @rule(queues=st.lists(st.sampled_from(QUEUES), unique=True))
    def requeue_dead_letters(self, queues: list[str]) -> None:
        moved = jobs.filter(queue__in=queues).requeue_dead_letters()

        assert moved == self.model.requeue_dead_letters(queues)

    @rule(pk=any_id)
    def cancel(self, pk: int) -> None:
        if pk not in self.model.jobs:
            with pytest.raises(ProcessingJob.DoesNotExist):
                jobs.cancel(pk)
        else:
            assert jobs.cancel(pk) is bool(self.model.cancel_many([pk]))

    @rule(ids=some_ids)
    def cancel_many(self, ids: list[int]) -> None:
        assert jobs.cancel_many(ids) == self.model.cancel_many(ids)

    @rule(older_than=ages, dead_letters_older_than=ages, elsewhere=rows_elsewhere)
    def prune(
        self, older_than: int | None, dead_letters_older_than: int | None, elsewhere: list[int]
    ) -> None:
        with self.locked_by_another_session(elsewhere):
            gone = jobs.prune(older_than, dead_letters_older_than=dead_letters_older_than)

        assert gone == self.model.prune(older_than, dead_letters_older_than, elsewhere)

    @rule()
    def prune_after_a_week(self) -> None:
        self.let_time_pass(8 * 24 * 3600)

        assert jobs.prune() == self.model.prune(None, None)

    @rule(pk=any_id)
    def status(self, pk: int) -> None:
        if pk not in self.model.jobs:
            with pytest.raises(ProcessingJob.DoesNotExist):
                jobs.status(pk)
        else:
            assert jobs.status(pk) == self.model.jobs[pk].status

    @rule(target=claims, paused=st.sets(st.sampled_from(QUEUES)), worker=workers)
    def pause_and_claim(self, paused: set[str], worker: str) -> MultipleResults[ProcessingJob]:
        for queue in QUEUES:
            Queue.objects.update_or_create(name=queue, defaults={"paused": queue in paused})
        self.model.paused = paused
        return self.expect_claim(worker)

    # --- always --------------------------------------------------------------------------------

    @invariant()
    def every_job_is_as_the_model_says(self) -> None:
        stored = stored_facts()

        self.expect_tokens_only_rise(stored)
        self.expect_a_key_names_one_job(stored)
        assert stored == expected_facts(self.model)

    def expect_tokens_only_rise(self, stored: dict[int, Facts]) -> None:
        tokens = {pk: facts.token for pk, facts in stored.items()}
        assert all(token >= self.tokens.get(pk, 0) for pk, token in tokens.items())
        self.tokens = tokens

    def expect_a_key_names_one_job(self, stored: dict[int, Facts]) -> None:
        keys = [facts.key for facts in stored.values() if facts.key]
        assert len(keys) == len(set(keys))

    @contextmanager
    def locked_by_another_session(self, ids: list[int]) -> Iterator[None]:
        """As by a move of somebody else that has not been committed yet."""
        if not ids:
            yield
            return
        with self.another_session.cursor() as cursor:
            cursor.execute("BEGIN")
            try:
                cursor.execute("SELECT FROM processing_jobs WHERE id = ANY (%s) FOR UPDATE", [ids])
                yield
            finally:
                cursor.execute("ROLLBACK")


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of late workers are not worth a line each."""
    caplog.set_level(logging.CRITICAL, "django_jobqueue")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("quiet")
def test_whatever_happens_every_job_is_where_the_model_says() -> None:
    run_state_machine_as_test(
        JobsOfTwoWorkers,
        settings=settings(
            max_examples=int(LONG_RUN or 60),
            stateful_step_count=40,
            derandomize=not LONG_RUN,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
