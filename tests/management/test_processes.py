"""`runworker --processes N`: real processes, real signals, and what is left when they end."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.dispatch import Signal

from django_jobqueue import Status, signals
from django_jobqueue.management import processes
from django_jobqueue.management.processes import (
    HUNG,
    Parent,
    how_it_ended,
    next_pause,
    obeying_parent,
    own_command_line,
)
from django_jobqueue.models import ProcessingJob, Worker
from django_jobqueue.worker import WorkerOptions
from tests.app.jobs import noop, wait_for
from tests.processes import WorkerProcess, running_worker
from tests.projects import project_settings
from tests.rows import sql
from tests.waiting import wait_until

jobs = ProcessingJob.objects

QUICK_RESCUE = "DJANGO_JOBQUEUE = {'STALE_LOCK_AFTER': 1, 'RESCUE_INTERVAL': 0.2}"


def pids(parent: WorkerProcess) -> list[int]:
    """Every worker process that this parent has started, the first one first."""
    return [int(pid) for pid in re.findall(r"Worker process (\d+) started", parent.output)]


def command_line(pid: int) -> str:
    """In full, of a process that lives: a zombie has none."""
    ps = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    return subprocess.run(ps, capture_output=True, text=True, check=False).stdout


def lives(pid: int) -> bool:
    return "--lifeline" in command_line(pid)


def nobody_lives(parent: WorkerProcess) -> bool:
    return not any(lives(pid) for pid in pids(parent))


# --- the whole, with jobs ----------------------------------------------------------------------


@pytest.fixture
def parent(tmp_path: Path, database_url: str) -> Any:
    """Start two worker processes with a parent: `parent("--burst")`."""

    @contextmanager
    def start(*flags: str, own: str = "") -> Iterator[WorkerProcess]:
        with running_worker(
            *("--processes", "2", "--threads", "1", *flags),
            folder=tmp_path,
            database_url=database_url,
            settings=project_settings(tmp_path, own),
        ) as process:
            try:
                yield process
            finally:
                process.kill()
                for pid in filter(lives, pids(process)):
                    os.kill(pid, signal.SIGKILL)

    return start


@pytest.fixture
def waiting(tmp_path: Path) -> list[ProcessingJob]:
    """Two jobs that run until `let_go`."""
    return [wait_for.enqueue(path=str(tmp_path / f"go{number}")) for number in (1, 2)]


def both_run(folder: Path) -> bool:
    return all((folder / f"go{number}.started").exists() for number in (1, 2))


def let_go(folder: Path) -> None:
    for number in (1, 2):
        (folder / f"go{number}").touch()


def statuses() -> set[str]:
    return set(jobs.values_list("status", flat=True))


@pytest.mark.django_db(transaction=True)
class TestTheWhole:
    def test_each_process_works_and_sigterm_lets_all_finish(
        self, parent: Any, tmp_path: Path, waiting: list[ProcessingJob]
    ) -> None:
        with parent() as process:
            wait_until(lambda: both_run(tmp_path), timeout=30)
            workers = set(Worker.objects.values_list("pid", flat=True))
            holders = set(jobs.values_list("locked_by", flat=True))
            sessions = sql(
                "SELECT DISTINCT application_name FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'"
            )

            process.signal(signal.SIGTERM)
            process.says("Stopping (SIGTERM): 2 worker processes.")
            let_go(tmp_path)
            assert process.ended() == 0

            assert workers == set(pids(process))
            assert len(holders) == 2
            names = {name for (name,) in sessions}
            assert names <= {f"django_jobqueue {role}" for role in ("coordinator", "heartbeat")}
            assert statuses() == {Status.SUCCEEDED}
            assert nobody_lives(process)
            assert process.output.rstrip().endswith("All worker processes have ended.")
            assert "Traceback" not in process.output

    def test_a_killed_process_is_replaced_and_its_job_runs_again(
        self, parent: Any, tmp_path: Path, waiting: list[ProcessingJob]
    ) -> None:
        with parent(own=QUICK_RESCUE) as process:
            wait_until(lambda: both_run(tmp_path), timeout=30)
            killed = pids(process)[0]

            os.kill(killed, signal.SIGKILL)
            process.says(f"Worker process {killed} ended (SIGKILL), another starts in 1 s.")
            wait_until(lambda: len(pids(process)) == 3)
            let_go(tmp_path)
            wait_until(lambda: statuses() == {Status.SUCCEEDED}, timeout=30)

            assert sorted(jobs.values_list("attempts", flat=True)) == [1, 2]
            assert not command_line(killed), "not even a zombie is left"
            process.signal(signal.SIGTERM)
            assert process.ended() == 0, "a death that was made good does not count"

    def test_ctrl_c_in_a_terminal_counts_once(
        self, parent: Any, tmp_path: Path, waiting: list[ProcessingJob]
    ) -> None:
        with parent() as process:
            wait_until(lambda: both_run(tmp_path), timeout=30)

            process.interrupt_group()
            process.says("Stopping (SIGINT)")
            let_go(tmp_path)
            assert process.ended() == 0

        assert statuses() == {Status.SUCCEEDED}

    def test_a_manager_that_signals_every_process_asks_once(
        self, parent: Any, tmp_path: Path, waiting: list[ProcessingJob]
    ) -> None:
        with parent() as process:
            wait_until(lambda: both_run(tmp_path), timeout=30)

            for pid in (process.pid, *pids(process)):
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda: process.output.count("1 running jobs may finish") == 2)
            let_go(tmp_path)
            assert process.ended() == 0

        assert statuses() == {Status.SUCCEEDED}

    def test_a_second_signal_gives_all_back_at_once_and_exits_with_1(
        self, parent: Any, tmp_path: Path, waiting: list[ProcessingJob]
    ) -> None:
        with parent() as process:
            wait_until(lambda: both_run(tmp_path), timeout=30)

            process.signal(signal.SIGTERM)
            wait_until(lambda: process.output.count("1 running jobs may finish") == 2)
            process.signal(signal.SIGINT)
            assert process.ended(timeout=10) == 1

            assert nobody_lives(process)
        assert statuses() == {Status.PENDING}
        assert "SIGKILL" not in process.output

    def test_the_processes_of_a_killed_parent_stop_by_themselves(
        self, parent: Any, tmp_path: Path, waiting: list[ProcessingJob]
    ) -> None:
        with parent("--shutdown-timeout", "0.2") as process:
            wait_until(lambda: both_run(tmp_path), timeout=30)

            process.kill()
            wait_until(lambda: nobody_lives(process))

        assert process.output.count("Stopping (its parent ended): 1 running jobs may finish.") == 2
        assert statuses() == {Status.PENDING}, "given back"

    def test_they_end_with_0_when_each_has_done_what_it_was_for(self, parent: Any) -> None:
        jobs.enqueue_many({"handler": noop} for _number in range(7))

        with parent("--burst", "--max-jobs", "3") as process:
            assert process.ended() == 0

        assert jobs.filter(status=Status.PENDING).count() == 1, "three for each process"
        assert process.output.count("Worker process ") == 4, "two starts, two ends"

    def test_a_signal_while_they_start_ends_them_without_a_word(self, parent: Any) -> None:
        with parent() as process:
            process.says("started.")
            process.signal(signal.SIGINT)
            assert process.ended(timeout=10) == 0

            assert nobody_lives(process)
        assert "Traceback" not in process.output


# --- the parent, with programs that do one thing each ------------------------------------------

END_WITH = "import sys; sys.exit({code})"
KILL_YOURSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STAY = "import time; time.sleep(60)"
STAY_WHATEVER_COMES = (
    "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " pathlib.Path({path!r}).touch(); time.sleep(60)"
)

SIGNALS = {
    name: one
    for name, one in vars(signals).items()
    if isinstance(one, Signal) and name.startswith(("process_", "parent_", "worker_step"))
}


@pytest.fixture
def told() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What the parent's signals told so far, by name."""
    news: list[tuple[str, dict[str, Any]]] = []

    def listener(name: str) -> Callable[..., None]:
        return lambda signal, sender, **arguments: news.append((name, arguments))

    listeners = {name: listener(name) for name in SIGNALS}
    for name, one in SIGNALS.items():
        one.connect(listeners[name], weak=False)
    yield news
    for name, one in SIGNALS.items():
        one.disconnect(listeners[name])


class Running:
    """A parent on a thread of the test."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._well: list[bool] = []
        self._thread = threading.Thread(target=lambda: self._well.append(parent.run()))
        self._thread.start()

    def stop(self) -> None:
        self._parent.stop("the test")

    def ended_well(self, timeout: float = 10) -> bool:
        self._thread.join(timeout)
        assert self._well, "it still runs"
        return self._well[0]


@pytest.fixture
def run_parent() -> Iterator[Any]:
    """Run a Python program under a parent: `run_parent(program, burst=True)`."""
    running: list[Running] = []

    def run(program: str, *, python: str = sys.executable, count: int = 1, **flags: Any) -> Running:
        options = WorkerOptions(**flags)
        running.append(Running(Parent([python, "-c", program], options, processes=count)))
        return running[-1]

    yield run
    for one in running:
        one.stop()
        one.stop()
        one.ended_well()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FIRST_PAUSE", 0.1)
    monkeypatch.setattr(processes, "_TURN", 0.02)


def of(told: list[tuple[str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [news for one, news in told if one == name]


class TestDeaths:
    def test_one_that_dies_again_and_again_is_started_after_longer_and_longer_pauses(
        self, run_parent: Any, told: Any, short_pauses: None
    ) -> None:
        began = time.monotonic()
        run_parent(END_WITH.format(code=7))

        wait_until(lambda: len(of(told, "process_died")) == 4)

        deaths = of(told, "process_died")
        assert [death["wait"] for death in deaths] == pytest.approx([0.1, 0.2, 0.4, 0.8])
        assert {death["reason"] for death in deaths} == {"exit code 7"}
        assert time.monotonic() - began >= 0.7
        assert len(of(told, "process_started")) == 4

    @pytest.mark.parametrize(
        ("program", "reason"),
        [
            (KILL_YOURSELF, "SIGKILL"),
            (END_WITH.format(code=HUNG), "exit code 3: every slot hangs"),
            (END_WITH.format(code=0), "exit code 0"),
        ],
    )
    def test_another_one_is_started_whatever_the_end_of_one_that_was_to_run_on(
        self, run_parent: Any, told: Any, short_pauses: None, program: str, reason: str
    ) -> None:
        run_parent(program)

        wait_until(lambda: len(of(told, "process_started")) == 2)

        assert of(told, "process_died")[0]["reason"] == reason

    @pytest.mark.parametrize("flags", [{"burst": True}, {"max_jobs": 5}])
    def test_none_is_started_when_one_has_done_what_it_was_for(
        self, run_parent: Any, told: Any, flags: dict[str, Any]
    ) -> None:
        assert run_parent(END_WITH.format(code=0), count=3, **flags).ended_well()

        assert [name for name, _news in told] == [
            *["process_started"] * 3,
            *["process_ended"] * 3,
            "parent_stopped",
        ]

    def test_a_burst_goes_on_when_one_dies(
        self, run_parent: Any, told: Any, short_pauses: None, tmp_path: Path
    ) -> None:
        once = tmp_path / "died"
        program = (
            f"import pathlib, sys; path = pathlib.Path({str(once)!r}); died = path.exists();"
            " path.touch(); sys.exit(0 if died else 1)"
        )

        assert run_parent(program, burst=True).ended_well()

        assert len(of(told, "process_died")) == 1

    def test_restarts_leave_no_descriptor_open(
        self, run_parent: Any, told: Any, short_pauses: None
    ) -> None:
        before = len(os.listdir("/dev/fd"))
        parent = run_parent(END_WITH.format(code=1), count=3)
        wait_until(lambda: len(of(told, "process_died")) >= 6)

        parent.stop()
        parent.ended_well()

        assert len(os.listdir("/dev/fd")) == before

    def test_a_program_that_cannot_be_started_is_tried_again(
        self, run_parent: Any, told: Any, short_pauses: None, tmp_path: Path
    ) -> None:
        parent = run_parent(STAY, python=str(tmp_path / "python"))

        wait_until(lambda: len(of(told, "worker_step_failed")) == 2)

        assert isinstance(of(told, "worker_step_failed")[0]["error"], FileNotFoundError)
        parent.stop()
        assert parent.ended_well()


class TestTheEnd:
    def test_one_that_does_not_handle_signals_yet_ends_by_them_and_that_is_well(
        self, run_parent: Any, told: Any
    ) -> None:
        parent = run_parent(STAY, count=2)
        wait_until(lambda: len(of(told, "process_started")) == 2)

        parent.stop()

        assert parent.ended_well(timeout=2)
        assert of(told, "parent_stopping") == [{"running": 2, "reason": "the test"}]
        assert len(of(told, "process_ended")) == 2

    def test_one_that_does_not_stop_is_killed_and_that_is_not_well(
        self, run_parent: Any, told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "_GRACE", 0.3)
        ready = tmp_path / "ready"
        parent = run_parent(STAY_WHATEVER_COMES.format(path=str(ready)), shutdown_timeout=0.2)
        wait_until(ready.exists)
        asked = time.monotonic()

        parent.stop()

        assert not parent.ended_well()
        assert 0.5 <= time.monotonic() - asked < 5
        (death,) = of(told, "process_died")
        assert (death["reason"], death["wait"]) == ("SIGKILL", None)

    def test_one_that_waits_for_its_start_is_not_started_any_more(
        self, run_parent: Any, told: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(processes, "_FIRST_PAUSE", 30)
        parent = run_parent(END_WITH.format(code=1))
        wait_until(lambda: of(told, "process_died"))

        parent.stop()

        assert parent.ended_well(timeout=2)
        assert len(of(told, "process_started")) == 1


@pytest.mark.parametrize(
    ("code", "lived", "last_pause", "pause"),
    [
        (1, 0.5, 0.0, 1.0),
        (1, 0.5, 1.0, 2.0),
        (-9, 59.0, 16.0, 30.0),
        (-9, 59.0, 30.0, 30.0),
        (-9, 60.0, 30.0, 1.0),
        (HUNG, 60.0, 30.0, 0.0),
        (HUNG, 30.0, 0.0, 1.0),
    ],
)
def test_the_pause_grows_with_early_deaths_and_ends_with_a_steady_life(
    code: int, lived: float, last_pause: float, pause: float
) -> None:
    assert next_pause(code, lived=lived, last_pause=last_pause) == pause


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert how_it_ended(-35) == "signal 35"


# --- a worker process, and its parent's word ---------------------------------------------------


class TestObeyingTheParent:
    @pytest.fixture
    def lifeline(self) -> Iterator[int]:
        lifeline, of_parent = os.pipe()
        os.set_inheritable(lifeline, True)  # as `pass_fds` leaves it
        with open(of_parent, "wb", buffering=0) as self.of_parent:
            yield lifeline
        self.wait_for_its_thread()
        os.close(lifeline)

    def wait_for_its_thread(self) -> None:
        wait_until(lambda: "jobqueue-lifeline" not in {one.name for one in threading.enumerate()})

    def test_the_end_of_the_parent_and_all_signals_count_as_one(self, lifeline: int) -> None:
        reasons: list[str] = []
        stop = obeying_parent(lifeline, reasons.append)

        stop("SIGTERM")
        stop("SIGINT")
        self.of_parent.close()
        self.wait_for_its_thread()

        assert reasons == ["SIGTERM"]

    def test_at_once_is_a_second_request_whenever_the_signal_comes(self, lifeline: int) -> None:
        reasons: list[str] = []
        stop = obeying_parent(lifeline, reasons.append)

        self.of_parent.write(b"!")
        wait_until(lambda: len(reasons) == 2)
        stop("SIGTERM")

        assert reasons == ["its parent asked to"] * 2

    def test_what_handlers_start_does_not_get_the_lifeline(self, lifeline: int) -> None:
        obeying_parent(lifeline, lambda reason: None)

        assert not os.get_inheritable(lifeline)


# --- flags -------------------------------------------------------------------------------------


class TestFlags:
    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("0", "a whole number of at least 1 is wanted, not '0'"),
            ("two", "not 'two'"),
            ("101", "at most 100 are possible, not 101"),
        ],
    )
    def test_a_bad_number_is_named(self, value: str, says: str) -> None:
        with pytest.raises(CommandError, match=re.escape(says)):
            call_command("runworker", "--processes", value)

    def test_a_call_from_code_is_refused(self) -> None:
        with pytest.raises(CommandError, match="repeat the command line"):
            call_command("runworker", "--processes", "2", stdout=io.StringIO())

    @pytest.mark.django_db(transaction=True)
    def test_one_process_needs_no_parent(self) -> None:
        job = noop.enqueue()

        call_command("runworker", "--burst", "--processes", "1", stdout=io.StringIO())

        assert jobs.status(job.pk) == Status.SUCCEEDED

    def test_other_flags_are_checked_before_anything_starts(self) -> None:
        with pytest.raises(CommandError, match="threads must be at most 1000"):
            call_command("runworker", "--processes", "2", "--threads", "5000")


class TestTheCommandLine:
    def test_the_interpreters_options_are_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started_as = ["python", "-X", "dev", "-O", "-m", "django", "runworker", "--processes", "2"]
        monkeypatch.setattr(sys, "orig_argv", started_as)

        again = own_command_line(["django", "runworker", "--processes", "2"])

        assert again == [sys.executable, *started_as[1:]]

    def test_arguments_that_are_not_this_programs_are_refused(self) -> None:
        with pytest.raises(CommandError, match="not one that can be repeated"):
            own_command_line(["manage.py", "runworker", "--processes", "2"])

    def test_systems_without_such_signals_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "orig_argv", ["python", "manage.py", "runworker"])
        with monkeypatch.context() as there:
            there.setattr(os, "name", "nt")
            with pytest.raises(CommandError, match="POSIX"):
                own_command_line(["manage.py", "runworker"])
