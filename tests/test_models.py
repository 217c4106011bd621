"""The database refuses rows that cannot be, whoever writes them."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction

from django_jobqueue import Status
from django_jobqueue.models import JobAttempt, ProcessingJob, Worker
from tests.rows import sql

LOCK = {"locked_at": "now()", "locked_by": "'w'", "lock_expires_at": "now()"}
PROCESSING = {"status": "'processing'", "attempts": "1", **LOCK}

IMPOSSIBLE: dict[str, dict[str, str]] = {
    "processing without a lock": {"status": "'processing'", "attempts": "1"},
    "processing without an owner": {**PROCESSING, "locked_by": "NULL"},
    "processing without an end of its lock": {**PROCESSING, "lock_expires_at": "NULL"},
    "locked while pending": LOCK,
    "half a lock while pending": {"locked_by": "'w'"},
    "succeeded without a time": {"status": "'succeeded'"},
    "dead without a time": {"status": "'dead_letter'"},
    "finished while pending": {"finished_at": "now()"},
    "an unknown status": {"status": "'ready'"},
    "more attempts than allowed": {**PROCESSING, "attempts": "6"},
    "claimable without an attempt left": {"attempts": "5"},
    "negative attempts": {"attempts": "-1"},
    "no attempt allowed": {"max_attempts": "0"},
    "priority 101": {"priority": "101"},
    "priority -101": {"priority": "-101"},
    "a payload that is no object": {"payload": "'[1]'"},
    "an empty queue": {"queue": "''"},
    "an empty handler": {"handler": "''"},
    "an empty key": {"idempotency_key": "''"},
    "an empty owner": {**PROCESSING, "locked_by": "''"},
    "a negative token": {"lock_token": "-1"},
    "a token that cannot rise": {"lock_token": "9223372036854775807"},
    "due for ever ago": {"available_at": "'-infinity'"},
    "due in the year 9999": {"available_at": "'9999-01-01'"},
    "created never": {"created_at": "'infinity'"},
}


@pytest.mark.django_db
class TestConstraints:
    @pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
    def test_an_impossible_row_is_refused(self, change: dict[str, str]) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('x')")
        changes = ", ".join(f"{column} = {value}" for column, value in change.items())

        with pytest.raises(IntegrityError), transaction.atomic():
            sql(f"UPDATE processing_jobs SET {changes}")

    def test_a_lock_while_processing_is_possible(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('x')")
        changes = ", ".join(f"{column} = {value}" for column, value in PROCESSING.items())

        sql(f"UPDATE processing_jobs SET {changes}")

    def test_two_rows_cannot_share_a_key_and_any_number_have_none(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('x'), ('x')")
        sql("INSERT INTO processing_jobs (handler, idempotency_key) VALUES ('x', 'k')")

        with pytest.raises(IntegrityError), transaction.atomic():
            sql("INSERT INTO processing_jobs (handler, idempotency_key) VALUES ('y', 'k')")

    def test_a_claim_leaves_one_verdict_at_most(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('x')")
        job = ProcessingJob.objects.get()

        def verdict() -> None:
            JobAttempt.objects.create(
                job=job,
                number=1,
                lock_token=1,
                outcome="lost",
                worker="w",
                started_at=job.created_at,
            )

        verdict()
        with pytest.raises(IntegrityError), transaction.atomic():
            verdict()


@pytest.mark.django_db
class TestDefaults:
    def test_plain_sql_needs_only_a_handler(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('x')")

        job = ProcessingJob.objects.get()
        assert (job.queue, job.priority, job.payload) == ("default", 0, {})
        assert (job.status, job.attempts, job.lock_token) == (Status.PENDING, 0, 0)
        assert job.available_at == job.created_at

    def test_rows_are_named_for_people(self) -> None:
        sql("INSERT INTO processing_jobs (handler) VALUES ('shop.jobs.mail')")
        job = ProcessingJob.objects.get()

        assert str(job) == f"shop.jobs.mail #{job.pk}"
        assert str(JobAttempt(job=job, number=2)) == f"attempt 2 of job {job.pk}"
        assert str(Worker(name="host:1:ab")) == "host:1:ab"
