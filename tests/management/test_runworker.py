"""`manage.py runworker`: real processes, real signals, what stands on the screen."""

from __future__ import annotations

import io
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob, Worker
from tests.app.jobs import (
    add,
    fail,
    fail_at_once,
    hang_async,
    kill_worker,
    noop,
    refuse,
    sleep,
    touch,
    wait_for,
)
from tests.projects import QUICK_RESCUE, environment, project_settings, run_python
from tests.rows import sql
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects


class TestTheScreen:
    def test_a_burst_says_what_runs_what_failed_and_how_it_ended(self, worker: Any) -> None:
        done, retried = add.enqueue(a=1), fail.enqueue(message="no luck")
        dead, refused = fail_at_once.using(max_attempts=2).enqueue(), refuse.enqueue(reason="why")

        with worker("--burst", "--threads", "2") as process:
            assert process.ended() == 0

        said = process.output
        assert re.search(r"Worker \S+:\d+:\w{8} started: every queue, 2 threads, database", said)
        assert "tests.app.jobs.add" in said
        assert (
            f"WARNING Job {retried.pk} tests.app.jobs.fail failed on attempt 1 of 5,"
            " retry in 30 s: ValueError: no luck"
        ) in said
        assert f"ERROR   Job {dead.pk} tests.app.jobs.fail_at_once is a dead letter after" in said
        assert f"Job {refused.pk} tests.app.jobs.refuse is a dead letter after attempt 1" in said
        assert re.search(r"Worker stopped: 1 succeeded, 2 failed, 2 dead in \d\.\d s\.", said)
        assert f"Job {done.pk}" not in said, "one line per job only with -v 2"
        assert "Traceback" not in said

    def test_each_job_has_its_lines_with_verbosity_2(self, worker: Any) -> None:
        job = add.enqueue(a=1)

        with worker("--burst", "-v", "2") as process:
            process.ended()

        assert f"Job {job.pk} tests.app.jobs.add started, attempt 1 of 5." in process.output
        assert re.search(rf"Job {job.pk} tests.app.jobs.add succeeded in 0\.\d+ s", process.output)

    def test_only_deaths_with_verbosity_0(self, worker: Any) -> None:
        fail.enqueue()
        refuse.enqueue(reason="why")

        with worker("--burst", "-v", "0") as process:
            process.ended()

        (line,) = process.output.splitlines()
        assert "is a dead letter" in line

    def test_lines_reach_a_pipe_at_once(self, worker: Any) -> None:
        with worker() as process:
            process.says("started: every queue")
            refuse.enqueue(reason="why")
            process.says("is a dead letter after attempt 1 of 5: why")

    def test_the_projects_own_logging_wins_and_each_event_is_told_once(
        self, worker: Any, tmp_path: Path
    ) -> None:
        own = project_settings(
            tmp_path,
            "LOGGING = {'version': 1, 'formatters': {'own': {'format': 'OWN %(message)s'}},"
            " 'handlers': {'own': {'class': 'logging.StreamHandler', 'formatter': 'own'}},"
            " 'root': {'handlers': ['own'], 'level': 'INFO'}}",
        )
        with worker("--burst", settings=own) as process:
            process.ended()

        lines = process.output.splitlines()
        assert lines
        assert all(line.startswith("OWN ") for line in lines)
        assert len(lines) == len(set(lines))

    def test_running_twice_in_one_process_says_each_line_once(
        self, tmp_path: Path, database_url: str
    ) -> None:
        twice = (
            "import django, logging; django.setup()\n"
            "from django.core.management import call_command\n"
            "call_command('runworker', '--burst'); call_command('runworker', '--burst')\n"
            "print(logging.getLogger('django_jobqueue').handlers)"
        )
        ended = run_python(
            "-c",
            twice,
            env=environment(tmp_path, settings="tests.settings", database_url=database_url),
        )

        assert ended.returncode == 0, ended.stdout
        assert ended.stdout.count("Worker stopped") == 2
        assert ended.stdout.splitlines()[-1] == "[]"


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--threads", "0"], "a whole number of at least 1 is wanted, not '0'"),
            (["--threads", "many"], "not 'many'"),
            (["--max-jobs", "-3"], "not '-3'"),
            (["--queue", ""], "queue is empty"),
            (["--queue", "q" * 300], "has 300 characters"),
            (["--shutdown-timeout", "-1"], "seconds, 0 or more, are wanted"),
            (["--shutdown-timeout", "nan"], "seconds, 0 or more, are wanted"),
            (["--database", "nowhere"], "invalid choice: 'nowhere'"),
            (["--threds", "3"], "unrecognized arguments"),
        ],
    )
    def test_a_bad_one_is_named_and_nothing_runs(self, flags: list[str], says: str) -> None:
        job = noop.enqueue()

        with pytest.raises(CommandError, match=re.escape(says)):
            call_command("runworker", "--burst", *flags)

        assert jobs.status(job.pk) == Status.PENDING

    def test_several_queues(self) -> None:
        for queue in ("a", "b", "c"):
            noop.using(queue=queue).enqueue()

        call_command("runworker", "--burst", "--queue", "a", "--queue", "c", stdout=io.StringIO())

        assert list(jobs.filter(status=Status.PENDING).values_list("queue", flat=True)) == ["b"]

    def test_max_jobs(self) -> None:
        jobs.enqueue_many({"handler": noop} for _number in range(5))

        call_command("runworker", "--max-jobs", "2", stdout=io.StringIO())

        assert jobs.filter(status=Status.SUCCEEDED).count() == 2

    def test_missing_tables_are_one_clear_sentence(self) -> None:
        call_command("migrate", "django_jobqueue", "zero", verbosity=0)
        try:
            with pytest.raises(CommandError, match=r"Run: manage\.py migrate"):
                call_command("runworker", "--burst", stdout=io.StringIO())
        finally:
            call_command("migrate", "django_jobqueue", verbosity=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
class TestSignals:
    def test_an_idle_worker_exits_with_0_within_a_second(
        self, worker: Any, tmp_path: Path, number: signal.Signals
    ) -> None:
        own = project_settings(tmp_path, "DJANGO_JOBQUEUE = {'POLL_INTERVAL': 60}")
        with worker(settings=own) as process:
            wait_until(Worker.objects.exists)
            asked = time.monotonic()
            process.signal(number)
            assert process.ended() == 0
            assert time.monotonic() - asked < 10, "it does not wait for the next poll"
        assert f"Stopping ({number.name}): 0 running jobs may finish." in process.output
        assert "Traceback" not in process.output

    def test_a_running_job_finishes(
        self, worker: Any, tmp_path: Path, number: signal.Signals
    ) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with worker() as process:
            wait_until((tmp_path / "go.started").exists)
            process.signal(number)
            process.says("Stopping")
            (tmp_path / "go").touch()
            assert process.ended() == 0
        assert jobs.status(job.pk) == Status.SUCCEEDED

    def test_a_second_signal_gives_it_back_at_once_and_exits_with_1(
        self, worker: Any, tmp_path: Path, number: signal.Signals
    ) -> None:
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with worker() as process:
            wait_until((tmp_path / "go.started").exists)
            process.signal(number)
            process.says("Stopping")
            process.signal(number)
            assert process.ended(timeout=2) == 1
        assert jobs.status(job.pk) == Status.PENDING
        assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("hanging", "payload"), [(sleep, {"seconds": 600}), (hang_async, {})], ids=["sync", "async"]
)
def test_a_hung_handler_does_not_keep_the_process(
    worker: Any, hanging: Any, payload: dict[str, Any]
) -> None:
    job = hanging.enqueue(**payload)
    with worker("--shutdown-timeout", "0.2", "-v", "2") as process:
        process.says(f"Job {job.pk} {job.handler} started")
        process.signal(signal.SIGTERM)
        assert process.ended(timeout=10) == 0
    assert jobs.status(job.pk) == Status.PENDING
    assert "Worker stopped" in process.output
    assert "Traceback" not in process.output


class TestTheMainThread:
    def test_signal_handlers_are_put_back(self) -> None:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

        call_command("runworker", "--burst", stdout=io.StringIO())

        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert after == before

    def test_in_another_thread_it_works_without_signals(self) -> None:
        job = noop.enqueue()

        thread = threading.Thread(
            target=call_command, args=("runworker", "--burst"), kwargs={"stdout": io.StringIO()}
        )
        thread.start()
        thread.join(timeout=30)

        assert jobs.status(job.pk) == Status.SUCCEEDED


class TestKilledWorkers:
    def test_the_job_of_a_killed_worker_runs_again_without_a_person(
        self, worker: Any, tmp_path: Path
    ) -> None:
        own = project_settings(
            tmp_path, "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 1, 'RESCUE_INTERVAL': 0.2}"
        )
        job = wait_for.enqueue(path=str(tmp_path / "go"))
        with worker(settings=own) as killed:
            wait_until((tmp_path / "go.started").exists)
            with worker(settings=own):
                killed.kill()
                (tmp_path / "go").touch()
                wait_until(lambda: jobs.status(job.pk) == Status.SUCCEEDED)

        assert ProcessingJob.objects.get(pk=job.pk).attempts == 2
        assert job.history.get().outcome == "lost"

    def test_a_job_that_kills_its_worker_ends_as_a_dead_letter(
        self, worker: Any, tmp_path: Path
    ) -> None:
        own = project_settings(
            tmp_path,
            QUICK_RESCUE,
        )
        job = kill_worker.using(max_attempts=2).enqueue()

        def killed_worker() -> bool:
            with worker(settings=own) as process:
                wait_until(
                    lambda: process.died or jobs.status(job.pk) == Status.DEAD_LETTER, timeout=30
                )
                return bool(process.died)

        assert [killed_worker() for _start in range(3)] == [True, True, False]
        assert ProcessingJob.objects.get(pk=job.pk).last_error.startswith("Worker lost: ")
        assert job.history.filter(outcome="lost").count() == 2


class TestSettingsOfTheProject:
    @pytest.mark.parametrize("line", ["'ATOMIC_REQUESTS': True", "'AUTOCOMMIT': False"])
    def test_each_job_runs_once_whatever_is_set_for_requests(
        self, worker: Any, tmp_path: Path, line: str
    ) -> None:
        own = project_settings(tmp_path, f"DATABASES['default'].update({{{line}}})")
        effects = tmp_path / "effects.txt"
        jobs.enqueue_many(
            {"handler": touch, "payload": {"path": str(effects)}} for _number in range(500)
        )

        with worker("--burst", "--threads", "16", settings=own) as process:
            assert process.ended() == 0, process.output

        lines = effects.read_text().splitlines()
        assert len(lines) == len(set(lines)) == 500
        assert set(jobs.values_list("status", flat=True)) == {"succeeded"}
        assert sql("SELECT count(*) FROM processing_jobs WHERE attempts <> 1") == [(0,)]
