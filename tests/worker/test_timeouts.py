"""Timeouts: the attempt ends in time, whatever its thread does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from django_jobqueue import Status, signals
from django_jobqueue.models import ProcessingJob, Worker
from tests.app.jobs import noop, overrun, overrun_async, overrun_politely, quick
from tests.coordinators import burst, working
from tests.rows import sql, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects


def test_an_attempt_past_its_timeout_has_failed_and_is_delivered_again(tmp_path: Path) -> None:
    job = overrun.enqueue(path=str(tmp_path / "go"))

    with working(threads=2):
        wait_until(lambda: stored(job).status == Status.DEAD_LETTER)
        (tmp_path / "go").touch()

    first, second = stored(job).history.order_by("number")
    assert (tmp_path / "go.started").read_text().count("started") == 2
    assert (
        first.error
        == second.error
        == "Timed out: tests.app.jobs.overrun ran longer than its 0.4 s."
    )
    assert "_wait_for_file" in first.traceback


def test_what_the_thread_returns_too_late_is_dropped_and_its_slot_is_free_again(
    tmp_path: Path,
) -> None:
    job = overrun.using(max_attempts=1).enqueue(path=str(tmp_path / "go"))
    heard: list[int] = []

    def listen(*, job: ProcessingJob, **_kwargs: Any) -> None:
        heard.append(job.pk)

    signals.handler_came_back.connect(listen)
    try:
        with working(threads=1) as coordinator:
            wait_until(lambda: stored(job).status == Status.DEAD_LETTER)
            next_one = noop.enqueue()
            (tmp_path / "go").touch()
            wait_until(lambda: stored(next_one).status == Status.SUCCEEDED)
    finally:
        signals.handler_came_back.disconnect(listen)

    assert (stored(job).status, stored(job).result) == (Status.DEAD_LETTER, None)
    assert heard == [job.pk]
    assert (coordinator.summary.dead_letters, coordinator.summary.succeeded) == (1, 1)


def test_a_coroutine_is_cancelled_and_frees_its_slot(tmp_path: Path) -> None:
    job = overrun_async.enqueue(path=str(tmp_path / "cancelled"))
    next_one = noop.using(priority=-1).enqueue()

    burst(threads=1)

    assert (tmp_path / "cancelled").exists()
    assert "Timed out" in stored(job).last_error
    assert stored(next_one).status == Status.SUCCEEDED


def test_a_thread_is_told_by_its_context(tmp_path: Path) -> None:
    job = overrun_politely.enqueue(path=str(tmp_path / "told"))
    noop.using(priority=-1).enqueue()

    burst(threads=1)

    assert (tmp_path / "told").exists()
    assert "Timed out" in stored(job).last_error


def test_who_ends_in_time_knows_no_timeout() -> None:
    done = [quick.enqueue(value=number) for number in range(20)]

    burst(threads=4)

    assert [stored(job).result for job in done] == list(range(20))


def test_handlers_that_come_back_at_once_do_not_hang(tmp_path: Path, caplog: Any) -> None:
    for number in range(2):
        overrun_async.enqueue(path=str(tmp_path / f"cancelled-{number}"))
        overrun_politely.enqueue(path=str(tmp_path / f"told-{number}"))
    waiting = noop.using(priority=-1).enqueue()

    summary = burst(threads=1, restart_when_hung=True)

    assert stored(waiting).status == Status.SUCCEEDED
    assert (summary.dead_letters, summary.hangs) == (4, False)
    assert "hang" not in caplog.text


class TestEverySlotHangs:
    @pytest.fixture
    def hung(self, tmp_path: Path) -> Any:
        """Two jobs that fill two slots past their timeout."""
        hung = [
            overrun.using(max_attempts=1).enqueue(path=str(tmp_path / "go")) for _number in "ab"
        ]
        yield hung
        (tmp_path / "go").touch()

    def dead(self, hung: list[ProcessingJob]) -> bool:
        return all(stored(job).status == Status.DEAD_LETTER for job in hung)

    def test_it_is_said_and_shown(self, hung: Any, tmp_path: Path, caplog: Any) -> None:
        with working(threads=2):
            wait_until(lambda: self.dead(hung))
            wait_until(lambda: Worker.objects.filter(hung_slots=2).exists())
            (full,) = sql("SELECT full_since <= now(), busy_slots FROM processing_workers")
            (tmp_path / "go").touch()
        assert full == (True, 2)
        assert "All slots (2) hang, so no job can start: Job " in caplog.text

    def test_the_others_wait_until_a_slot_is_free(self, hung: Any, tmp_path: Path) -> None:
        waiting = noop.enqueue()
        with working(threads=2):
            wait_until(lambda: self.dead(hung))
            assert stored(waiting).status == Status.PENDING
            (tmp_path / "go").touch()
            wait_until(lambda: stored(waiting).status == Status.SUCCEEDED)

    def test_with_the_option_the_worker_ends_to_be_started_again(self, hung: Any) -> None:
        with working(threads=2, restart_when_hung=True) as coordinator:
            wait_until(lambda: coordinator.summary.seconds)
        assert coordinator.summary.hangs
        assert self.dead(hung)

    def test_a_stopping_worker_does_not_wait_for_them(self, hung: Any) -> None:
        with working(threads=2, shutdown_timeout=30) as coordinator:
            wait_until(lambda: self.dead(hung))
            coordinator.stop()
            wait_until(lambda: coordinator.summary.seconds, timeout=5)
        assert coordinator.summary.hung == 2
