"""Enqueueing: part of the caller's transaction, one row per key, and bad input stores nothing."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.core.handlers.base import BaseHandler
from django.db import DatabaseError, connection, transaction
from django.http import HttpRequest, HttpResponse

from django_jobqueue import InvalidPayload, Status, UnknownHandler, signals
from django_jobqueue.models import ProcessingJob
from tests.app.jobs import add, echo, mail, noop
from tests.racing import in_thread, together
from tests.rows import (
    WORKER_A,
    age_finished,
    count_jobs,
    database_now,
    sql,
    wait_until_somebody_waits_for_a_lock,
)

jobs = ProcessingJob.objects


@pytest.mark.django_db
class TestOneJob:
    def test_a_new_job_is_pending_and_due_now_by_the_databases_clock(self) -> None:
        before = database_now()

        job = jobs.enqueue("tests.app.jobs.add", {"a": 1})

        assert (job.status, job.attempts, job.lock_token, job.created) == ("pending", 0, 0, True)
        assert before <= job.available_at <= database_now()
        assert ProcessingJob.objects.get(pk=job.pk).payload == {"a": 1}

    def test_the_handlers_defaults_hold_until_a_call_says_otherwise(self) -> None:
        default = mail.enqueue(to="a@example.org")
        special = mail.using(queue="night", priority=0, max_attempts=1).enqueue(to="b@example.org")

        assert (default.queue, default.priority, default.max_attempts) == ("mail", 10, 2)
        assert (special.queue, special.priority, special.max_attempts) == ("night", 0, 1)

    def test_the_settings_fill_what_neither_call_nor_handler_names(self, settings: Any) -> None:
        settings.DJANGO_JOBQUEUE = {"MAX_ATTEMPTS": 9}

        assert noop.enqueue().max_attempts == 9

    @pytest.mark.parametrize("delay", [90, 90.0, timedelta(seconds=90)])
    def test_a_delay_counts_from_the_databases_now(self, delay: Any) -> None:
        job = noop.using(delay=delay).enqueue()

        waits = job.available_at - job.created_at
        assert waits == timedelta(seconds=90)

    def test_a_delay_of_zero_is_a_delay_and_not_left_out(self) -> None:
        job = noop.using(delay=0).enqueue()

        assert job.available_at == job.created_at

    def test_available_at_is_kept_to_the_microsecond(self) -> None:
        moment = datetime(2031, 5, 17, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=2)))

        assert noop.using(available_at=moment).enqueue().available_at == moment

    def test_falsy_payload_values_are_stored_as_they_are(self) -> None:
        falsy: tuple[Any, ...] = (0, False, "", [], {}, None, 0.0)
        for value in falsy:
            job = echo.enqueue(value=value)
            stored = ProcessingJob.objects.get(pk=job.pk).payload["value"]
            assert stored == value
            assert type(stored) is type(value)

    def test_a_payload_changed_after_the_call_is_not_changed_in_the_job(self) -> None:
        value = [1, 2]

        job = echo.enqueue(value=value)
        value.append(3)

        assert job.payload == {"value": [1, 2]}

    def test_async_code_enqueues_too(self) -> None:
        async def enqueue() -> ProcessingJob:
            return await noop.aenqueue()

        assert async_to_sync(enqueue)().created

    def test_a_receiver_that_raises_does_not_reach_the_caller(self) -> None:
        def broken(**_kwargs: Any) -> None:
            raise RuntimeError("receiver")

        signals.job_enqueued.connect(broken)
        try:
            assert noop.enqueue().created
        finally:
            signals.job_enqueued.disconnect(broken)


_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


@pytest.mark.django_db
class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "error", "says"),
        [
            ({"handler": "shop.jobs.send_recipt"}, UnknownHandler, "send_recipt"),
            ({"handler": "tests.app.jobs.ad"}, UnknownHandler, "Did you mean 'tests.app.jobs.add'"),
            ({"handler": "add"}, UnknownHandler, "Did you mean 'tests.app.jobs.add'"),
            ({"handler": "x" * 300}, UnknownHandler, "xxx…"),
            ({"handler": "os.system", "payload": {"command": "ls"}}, UnknownHandler, "os.system"),
            ({"handler": None}, UnknownHandler, "None"),
            ({"payload": {}}, InvalidPayload, "missing a required argument: 'a'"),
            ({"payload": {"a": 1, "c": 2}}, InvalidPayload, "unexpected keyword argument 'c'"),
            ({"payload": [1]}, InvalidPayload, "must be a dict"),
            ({"payload": {"a": float("nan")}}, InvalidPayload, "payload.a is nan"),
            ({"payload": {"a": float("inf")}}, InvalidPayload, "payload.a is inf"),
            ({"payload": {"a": "x\x00"}}, InvalidPayload, "payload.a contains a NUL"),
            ({"payload": {"a": ["\ud83d"]}}, InvalidPayload, r"payload.a\[0\] contains a lone"),
            ({"payload": {"a": {"\x00": 1}}}, InvalidPayload, "payload.a has a key with a NUL"),
            ({"payload": {"a": {1, 2}}}, InvalidPayload, "payload.a is of type set"),
            ({"payload": {"a": {1: 2}}}, InvalidPayload, "payload.a has a key of type int"),
            ({"payload": {"a": _CIRCLE}}, InvalidPayload, "contains itself"),
            ({"payload": {"a": "x" * 100_000_000}}, InvalidPayload, "The limit"),
            ({"queue": ""}, ValueError, "queue is empty"),
            ({"queue": "q" * 300}, ValueError, "has 300 characters"),
            ({"queue": "a\x00b"}, ValueError, "NUL"),
            ({"queue": "\ud800"}, ValueError, "surrogate"),
            ({"queue": 7}, ValueError, "must be a string"),
            ({"priority": 101}, ValueError, "from -100 to 100, not 101"),
            ({"priority": -101}, ValueError, "from -100 to 100, not -101"),
            ({"priority": 1.5}, ValueError, "whole number, not 1.5"),
            ({"priority": True}, ValueError, "whole number, not True"),
            ({"max_attempts": 0}, ValueError, "from 1 to 32767, not 0"),
            ({"max_attempts": 40_000}, ValueError, "not 40000"),
            ({"delay": -1}, ValueError, "delay"),
            ({"delay": float("nan")}, ValueError, "delay"),
            ({"delay": "soon"}, ValueError, "seconds or a timedelta"),
            ({"delay": 1e300}, ValueError, "36500 days"),
            ({"available_at": datetime(2031, 1, 1)}, ValueError, "no time zone"),  # noqa: DTZ001
            ({"available_at": "tomorrow"}, ValueError, "aware datetime"),
            (
                {"available_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))},
                ValueError,
                "outside the years",
            ),
            (
                {"delay": 0, "available_at": datetime(2031, 1, 1, tzinfo=timezone.utc)},
                ValueError,
                "Both delay and available_at",
            ),
            ({"idempotency_key": ""}, ValueError, "idempotency key is empty"),
            ({"idempotency_key": "k" * 300}, ValueError, "has 300 characters"),
            ({"idempotency_key": "k\x00"}, ValueError, "NUL"),
            ({"idempotency_key": 7}, ValueError, "must be a string"),
        ],
        ids=lambda value: repr(value)[:40] if isinstance(value, dict) else None,
    )
    def test_says_what_and_stores_nothing_and_leaves_the_transaction_usable(
        self, arguments: dict[str, Any], error: type[Exception], says: str
    ) -> None:
        call = {"handler": "tests.app.jobs.add", "payload": {"a": 1}, **arguments}

        with transaction.atomic():
            with pytest.raises(error, match=says) as caught:
                jobs.enqueue(**call)
            Group.objects.create(name="goes on")

        assert len(str(caught.value)) < 500
        assert Group.objects.filter(name="goes on").exists()
        assert count_jobs() == 0

    def test_a_payload_error_never_shows_the_value(self) -> None:
        with pytest.raises(InvalidPayload) as caught:
            echo.enqueue(value={"password": "hunter2\x00"})

        assert "hunter2" not in str(caught.value)
        assert "payload.value.password" in str(caught.value)


@pytest.mark.django_db
class TestIdempotencyKey:
    def test_the_same_key_twice_makes_one_row_and_returns_the_same_job(self) -> None:
        first = add.using(idempotency_key="k").enqueue(a=1)
        second = add.using(idempotency_key="k").enqueue(a=1)

        assert (first.created, second.created, second.differs) == (True, False, False)
        assert first.pk == second.pk
        assert sql("SELECT count(*) FROM processing_jobs WHERE idempotency_key = 'k'") == [(1,)]

    def test_the_caller_sees_that_the_job_with_the_key_is_another_call(self) -> None:
        add.using(idempotency_key="k").enqueue(a=1)

        other_payload = add.using(idempotency_key="k").enqueue(a=2)
        other_handler = echo.using(idempotency_key="k").enqueue(value=1)

        assert (other_payload.created, other_payload.differs) == (False, True)
        assert other_payload.payload == {"a": 1}
        assert other_handler.differs

    def test_a_key_stays_taken_in_every_status_until_its_job_is_pruned(self) -> None:
        def again() -> bool:
            return noop.using(idempotency_key="k", max_attempts=1).enqueue().created

        job = noop.using(idempotency_key="k", max_attempts=1).enqueue()
        taken = {"pending": again()}
        (job,) = jobs.claim(worker=WORKER_A, limit=1)
        taken["processing"] = again()
        jobs.fail(job, "broken")
        taken["dead_letter"] = again()
        jobs.requeue_dead_letter(job.pk)
        jobs.cancel(job.pk)
        taken["cancelled"] = again()
        age_finished(seconds=60)
        jobs.prune(older_than=30)

        assert taken == dict.fromkeys(taken, False)
        assert again(), "pruning frees the key"

    def test_jobs_that_wait_for_a_retry_do_not_pile_up(self) -> None:
        for _round in range(5):
            noop.using(idempotency_key="k").enqueue()
            for job in jobs.claim(worker=WORKER_A, limit=1):
                jobs.fail(job, "broken")

        assert count_jobs() == 1

    def test_a_duplicate_inside_a_transaction_leaves_it_usable(self) -> None:
        noop.using(idempotency_key="k").enqueue()

        with transaction.atomic():
            Group.objects.create(name="order")
            duplicate = noop.using(idempotency_key="k").enqueue()
            with transaction.atomic():
                noop.using(idempotency_key="k").enqueue()
            Group.objects.create(name="order line")

        assert not duplicate.created
        assert Group.objects.count() == 2


@pytest.mark.django_db(transaction=True)
class TestRacesForAKey:
    def test_32_threads_make_one_row_and_all_get_it(self) -> None:
        made = together(32, lambda _: noop.using(idempotency_key="k").enqueue())

        assert len({job.pk for job in made}) == 1
        assert sum(job.created for job in made) == 1
        assert count_jobs() == 1

    @pytest.mark.parametrize("first_commits", [True, False])
    def test_the_second_caller_waits_for_the_firsts_transaction(self, first_commits: bool) -> None:
        """Race: both inside atomic(), the same new key; the first one commits or rolls back."""
        inserted = threading.Event()

        def first() -> ProcessingJob | None:
            with transaction.atomic():
                job = noop.using(idempotency_key="k").enqueue()
                inserted.set()
                wait_until_somebody_waits_for_a_lock()
                transaction.set_rollback(not first_commits)
            return job

        def second() -> ProcessingJob:
            inserted.wait(timeout=30)
            with transaction.atomic():
                Group.objects.create(name="order")
                job = noop.using(idempotency_key="k").enqueue()
                Group.objects.create(name="order line")
            return job

        one, two = together(2, lambda number: second() if number else first())

        assert one is not None
        assert two is not None
        assert two.created is not first_commits
        assert (two.pk == one.pk) is first_commits
        assert count_jobs() == 1
        assert Group.objects.count() == 2

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_a_holder_invisible_to_the_callers_snapshot_is_found(self, level: str) -> None:
        with transaction.atomic():
            sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
            assert count_jobs() == 0  # takes the snapshot
            holder = in_thread(lambda: noop.using(idempotency_key="k").enqueue())
            found = noop.using(idempotency_key="k").enqueue()
            new = noop.using(idempotency_key="other").enqueue()
            Group.objects.create(name="order")

        assert (found.pk, found.created) == (holder.pk, False)
        assert new.created
        assert count_jobs() == 2
        assert Group.objects.count() == 1

    def test_a_key_freed_and_taken_all_the_time_never_gives_an_error(self) -> None:
        """Race: callers with one key, while others finish and prune its job as fast as they can."""
        callers, ended = 6, list[int]()

        def finish_and_prune() -> list[int]:
            while len(ended) < callers:
                for job in jobs.claim(worker=WORKER_A, limit=10):
                    jobs.complete(job)
                jobs.prune(older_than=0)
            return []

        def enqueue_often(number: int) -> list[int]:
            try:
                return [noop.using(idempotency_key="k").enqueue().pk for _round in range(100)]
            finally:
                ended.append(number)

        made = together(
            callers + 1, lambda number: enqueue_often(number) if number else finish_and_prune()
        )

        assert [len(pks) for pks in made] == [0] + [100] * callers
        assert count_jobs() <= 1


@pytest.mark.django_db(transaction=True)
class TestBatchesAtTheSameTime:
    def test_the_same_keys_in_opposite_order_never_deadlock(self) -> None:
        """Race: two callers' transactions, each with the keys of the other, the other way round."""
        keys = [f"key-{number}" for number in range(2_000)]

        def enqueue(number: int) -> list[int]:
            ordered = keys if number else keys[::-1]
            with transaction.atomic():
                made = jobs.enqueue_many({"handler": noop, "idempotency_key": k} for k in ordered)
            return [job.pk for job in made]

        for _round in range(5):
            one, two = together(2, enqueue)
            assert one == two[::-1]
            ProcessingJob.objects.all().delete()

    def test_a_batch_runs_in_the_order_it_was_given_whatever_its_keys(self) -> None:
        keys = [f"key-{number * 7919 % 6000}" for number in range(6_000)]

        made = jobs.enqueue_many({"handler": noop, "idempotency_key": key} for key in keys)

        claimed = jobs.claim(worker=WORKER_A, limit=6_000)
        assert [job.pk for job in claimed] == [job.pk for job in made]


@pytest.mark.django_db(transaction=True)
class TestTheCallersTransaction:
    def test_a_rollback_leaves_no_job(self) -> None:
        with pytest.raises(RuntimeError), transaction.atomic():
            noop.enqueue()
            raise RuntimeError

        assert count_jobs() == 0

    def test_a_rolled_back_savepoint_takes_its_job_with_it(self) -> None:
        with transaction.atomic():
            kept = noop.enqueue()
            with pytest.raises(RuntimeError), transaction.atomic():
                noop.enqueue()
                raise RuntimeError

        assert [row.pk for row in ProcessingJob.objects.all()] == [kept.pk]

    def test_nobody_sees_the_job_before_the_commit(self) -> None:
        with transaction.atomic():
            noop.enqueue()
            before = in_thread(lambda: jobs.claim(worker=WORKER_A, limit=1))
        after = in_thread(lambda: jobs.claim(worker=WORKER_A, limit=1))

        assert (len(before), len(after)) == (0, 1)

    def test_a_request_that_ends_in_an_error_leaves_no_job(self, settings: Any) -> None:
        def view(_request: HttpRequest) -> HttpResponse:
            noop.enqueue()
            raise RuntimeError("the request ends in a 500")

        connection.settings_dict["ATOMIC_REQUESTS"] = True
        try:
            handled = BaseHandler().make_view_atomic(view)
            with pytest.raises(RuntimeError):
                handled(HttpRequest())
        finally:
            connection.settings_dict["ATOMIC_REQUESTS"] = False

        assert count_jobs() == 0

    def test_a_database_error_surfaces_where_the_job_was_enqueued(self) -> None:
        with pytest.raises(DatabaseError, match="current transaction"), transaction.atomic():
            with pytest.raises(DatabaseError, match="division by zero"):
                sql("SELECT 1/0")
            noop.enqueue()

        assert count_jobs() == 0


@pytest.mark.django_db
class TestMany:
    def test_one_job_per_input_in_order(self) -> None:
        made = jobs.enqueue_many(
            {"handler": "tests.app.jobs.add", "payload": {"a": number}, "priority": number % 7}
            for number in range(100)
        )

        assert [job.payload["a"] for job in made] == list(range(100))
        assert [job.priority for job in made] == [number % 7 for number in range(100)]
        assert [job.pk for job in made] == sorted(job.pk for job in made)
        assert all(job.created for job in made)
        assert count_jobs() == 100

    def test_nothing_makes_nothing(self) -> None:
        assert jobs.enqueue_many([]) == []

    def test_duplicates_outside_and_inside_the_batch_are_answers_not_errors(self) -> None:
        holder = noop.using(idempotency_key="taken").enqueue()
        batch: list[dict[str, Any]] = [{"handler": noop} for _number in range(10_000)]
        batch[17]["idempotency_key"] = "taken"
        batch[4_000]["idempotency_key"] = batch[9_999]["idempotency_key"] = "twice"

        made = jobs.enqueue_many(batch)

        assert [i for i, job in enumerate(made) if not job.created] == [17, 9_999]
        assert made[17].pk == holder.pk
        assert made[9_999].pk == made[4_000].pk
        assert count_jobs() == 9_999  # the holder, and all but two of the batch

    def test_one_bad_payload_refuses_all_before_any_insert_and_names_its_position(self) -> None:
        batch: list[dict[str, Any]] = [
            {"handler": "tests.app.jobs.echo", "payload": {"value": number}}
            for number in range(10_000)
        ]
        batch[5_000]["payload"] = {"value": {1, 2}}

        with pytest.raises(
            InvalidPayload, match=r"Job 5000 of the batch: payload.value is of type"
        ):
            jobs.enqueue_many(batch)

        assert count_jobs() == 0

    @pytest.mark.parametrize(
        ("item", "error"),
        [
            ({"handler": "nobody"}, UnknownHandler),
            ({"payload": {}}, ValueError),
            ("tests.app.jobs.noop", ValueError),
            ({"handler": "tests.app.jobs.noop", "prioriy": 3}, ValueError),
            ({"handler": "tests.app.jobs.noop", "priority": 101}, ValueError),
        ],
    )
    def test_a_bad_item_is_named(self, item: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="Job 1 of the batch"):
            jobs.enqueue_many([{"handler": "tests.app.jobs.noop"}, item])

        assert count_jobs() == 0

    def test_100_000_jobs_pass_the_limit_of_bind_parameters(self) -> None:
        made = jobs.enqueue_many({"handler": noop} for _number in range(100_000))

        assert len({job.pk for job in made}) == 100_000
        assert count_jobs() == 100_000

    def test_every_key_of_a_batch_is_answered_by_its_one_job(self) -> None:
        noop.using(idempotency_key="a").enqueue()

        made = jobs.enqueue_many(
            {"handler": noop, "idempotency_key": key} for key in ("a", "b", "a", "c", "b")
        )

        assert [job.created for job in made] == [False, True, False, True, False]
        assert made[0].pk == made[2].pk
        assert made[1].pk == made[4].pk

    def test_two_inputs_with_a_taken_key_are_compared_each_with_its_own_call(self) -> None:
        add.using(idempotency_key="k").enqueue(a=1)

        made = jobs.enqueue_many(
            {"handler": add, "payload": {"a": a}, "idempotency_key": "k"} for a in (1, 2)
        )

        assert [job.differs for job in made] == [False, True]


@pytest.mark.django_db(transaction=True)
def test_a_batch_that_fails_half_way_leaves_nothing() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        jobs.enqueue_many({"handler": noop} for _number in range(6_000))
        raise RuntimeError

    assert count_jobs() == 0


@pytest.mark.django_db(transaction=True)
def test_a_batch_in_a_repeatable_read_transaction_finds_invisible_holders() -> None:
    with transaction.atomic():
        sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert count_jobs() == 0
        holder = in_thread(lambda: noop.using(idempotency_key="a").enqueue())
        made = jobs.enqueue_many(
            {"handler": noop, "idempotency_key": key} for key in ("a", "b", None, "b")
        )

    assert [job.created for job in made] == [False, True, True, False]
    assert made[0].pk == holder.pk
    assert ProcessingJob.objects.filter(status=Status.PENDING).count() == 3
