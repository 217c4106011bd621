"""Handlers with `atomic=True`: the project's rows, the result and the end commit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db.models import F

from django_jobqueue import Status, handler, signals
from django_jobqueue.models import ProcessingJob
from tests.app.jobs import WAYS_TO_UNDO, ask_nothing, write, write_late
from tests.coordinators import burst, working
from tests.rows import stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_it_writes_and_its_end_are_there_together() -> None:
    job = write.enqueue(name="x")
    heard: list[tuple[str, Any]] = []

    def listen(*, job: ProcessingJob, **_kwargs: Any) -> None:
        heard.append((job.status, job.result))

    signals.job_succeeded.connect(listen)
    try:
        summary = burst(threads=1)
    finally:
        signals.job_succeeded.disconnect(listen)

    assert Group.objects.filter(name="x").exists()
    assert (stored(job).status, stored(job).result) == (Status.SUCCEEDED, "x")
    assert heard == [(Status.SUCCEEDED, "x")]
    assert (summary.succeeded, summary.lost) == (1, 0)


UNDONE = sorted(WAYS_TO_UNDO.keys() - {"fail after commit"})


@pytest.mark.parametrize("how", UNDONE)
def test_an_attempt_that_fails_leaves_nothing_it_wrote(how: str) -> None:
    job = write.enqueue(name="x", how=how)

    burst(threads=1)

    assert not Group.objects.exists()
    assert stored(job).status == Status.DEAD_LETTER
    assert stored(job).history.count() == (1 if how == "refuse" else 2)


@pytest.mark.parametrize("how", UNDONE)
def test_the_next_job_on_its_thread_starts_clean(how: str) -> None:
    write.using(max_attempts=1).enqueue(name="x", how=how)
    clean = write.using(priority=-1).enqueue(name="y")

    burst(threads=1)

    assert [group.name for group in Group.objects.all()] == ["y"]
    assert stored(clean).status == Status.SUCCEEDED


def test_a_lock_lost_meanwhile_rolls_back_what_was_written() -> None:
    job = lose_own_lock.enqueue()

    summary = burst(threads=1)

    assert not Group.objects.exists()
    assert stored(job).status == Status.PROCESSING
    assert summary.lost == 1


def test_an_error_after_the_commit_is_said_and_changes_no_verdict(caplog: Any) -> None:
    job = write.enqueue(name="x", how="fail after commit")

    burst(threads=1)

    assert Group.objects.filter(name="x").exists()
    assert (stored(job).status, stored(job).attempts) == (Status.SUCCEEDED, 1)
    assert "is committed, and what came after failed: ValueError: too late" in caplog.text


def test_jobs_enqueued_by_an_attempt_that_fails_are_not_there() -> None:
    write.enqueue(name="x", how="enqueue")

    burst(threads=1)

    assert ProcessingJob.objects.filter(handler="tests.app.jobs.add").count() == 0
    assert Group.objects.filter(name="x").exists()


def test_a_coroutine_cannot_be_atomic(handlers: Any) -> None:
    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="no transactions for async code"):
        handler(name="x", atomic=True)(coroutine)
    assert len(handlers) == 0


@handler(atomic=True)
def lose_own_lock() -> None:
    """Be taken for lost, by another connection, and go on."""
    from tests.racing import in_thread

    Group.objects.create(name="x")
    in_thread(
        lambda: ProcessingJob.objects.update(
            lock_token=F("lock_token") + 1, locked_by="another worker"
        )
    )


def test_one_that_asks_the_database_nothing_succeeds() -> None:
    job = ask_nothing.enqueue()

    burst(threads=1)

    assert (stored(job).status, stored(job).result) == (Status.SUCCEEDED, "nothing")


def test_what_it_writes_past_its_timeout_is_rolled_back(tmp_path: Path) -> None:
    job = write_late.enqueue(name="x", path=str(tmp_path / "go"))
    next_one = ask_nothing.using(priority=-1).enqueue()

    with working(threads=1):
        wait_until(lambda: stored(job).status == Status.DEAD_LETTER)
        (tmp_path / "go").touch()
        wait_until(lambda: stored(next_one).status == Status.SUCCEEDED)

    assert not Group.objects.exists()
    assert (stored(job).status, stored(job).attempts) == (Status.DEAD_LETTER, 1)
