"""The workers of a scenario: real processes, each at a post, replaced as soon as they are gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from django_jobqueue.models import ProcessingJob
from django_jobqueue.states import Status
from example_project.postgres.keeper import ends_with_keeper
from tests.waiting import wait_until

#: A worker that was told to stop and still runs after so long hangs.
_LONGEST_GOODBYE = 20.0
_TAIL_LINES = 40


class WorkerFailed(AssertionError):
    """A worker did what no worker may do, whatever happens around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """How the worker at one post is started. `kills_itself`: its jobs may kill it."""

    flags: tuple[str, ...] = ("--threads", "10")
    env: Mapping[str, str] = field(default_factory=dict)
    kills_itself: bool = False


class WorkerProcess:
    """`runworker` as a process of its own, with its output in a file."""

    def __init__(self, post: Post, *, log: Path, env: Mapping[str, str]) -> None:
        self.post = post
        self.log = log
        self.told: signal.Signals | None = None
        self._told_at = 0.0
        self._has_started = False
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "django", "runworker", *post.flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Elsewhere than the code: `-m` puts this folder before all of PYTHONPATH.
                cwd=log.parent,
                env={**os.environ, **python_path(), **env, **post.env},
                start_new_session=True,
                preexec_fn=ends_with_keeper(signal.SIGKILL),
            )

    @property
    def pid(self) -> int:
        """The process id, which is also in the worker's name."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Everything it has said."""
        return self.log.read_text(errors="replace")

    @property
    def is_working(self) -> bool:
        """It has said that it started, and nobody told it to end."""
        # Read once: a log grows, and this is asked all the time.
        self._has_started = self._has_started or " started: " in self.output
        return self._has_started and self.told is None and self.exit_code is None

    @property
    def hangs(self) -> bool:
        """It was told to end, and had its time."""
        gone_by = self._told_at + _LONGEST_GOODBYE
        return self.told is not None and self.exit_code is None and time.monotonic() > gone_by

    def tell(self, number: signal.Signals) -> None:
        """Send a signal that ends it."""
        self.told, self._told_at = number, time.monotonic()
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        """Send a signal that does not."""
        self._process.send_signal(number)

    def ask_to_stop(self) -> None:
        """SIGTERM, once it listens: before, it would end like any young Python process."""
        wait_until(lambda: self.is_working or self.exit_code is not None, timeout=60)
        self.tell(signal.SIGTERM)

    def wait(self) -> None:
        """Return when it has ended, or hangs."""
        wait_until(lambda: self.exit_code is not None or self.hangs, timeout=_LONGEST_GOODBYE * 2)

    def kill(self) -> None:
        """End it now, in whatever state it is."""
        self._process.kill()
        self._process.wait()

    def tail(self) -> str:
        """The end of its output, under a title."""
        lines = self.output.splitlines()[-_TAIL_LINES:]
        return "\n".join([f"--- worker {self.pid}, exit code {self.exit_code}", *lines])


class Crew:
    """A worker for each post. `ends` counts how workers ended: `SIGKILL`, `SIGTERM`, …"""

    def __init__(self, posts: Sequence[Post], *, folder: Path, env: Mapping[str, str]) -> None:
        self.ends: Counter[str] = Counter()
        self._posts = posts
        self._folder = folder
        self._env = env
        self._workers: list[WorkerProcess] = []

    def begin(self) -> None:
        """Start everybody, and wait until all work."""
        for post in self._posts:
            self._workers.append(self._started(post))
        wait_until(self._all_work, timeout=60, message="The workers did not start.")

    def look_after(self) -> None:
        """Replace who is gone. Raises `WorkerFailed` when one should not be, or should be."""
        for place, worker in enumerate(self._workers):
            self._check(worker)
            if worker.exit_code is not None:
                self._workers[place] = self._started(worker.post)

    def working(self) -> list[WorkerProcess]:
        """Those that have started and were not told to end."""
        return [worker for worker in self._workers if worker.is_working]

    def one_to_spare(self, rng: random.Random) -> WorkerProcess | None:
        """Any of those that work, if another one goes on."""
        working = self.working()
        return rng.choice(working) if len(working) > 1 else None

    def dismiss(self) -> None:
        """Stop everybody in order, and check that they went in order."""
        for worker in self._workers:
            if worker.told is None:
                worker.ask_to_stop()
        for worker in self._workers:
            worker.wait()
            self._check(worker)
        self._workers = []

    def kill(self) -> None:
        """Leave no process behind."""
        for worker in self._workers:
            worker.kill()

    def _started(self, post: Post) -> WorkerProcess:
        number = len(list(self._folder.iterdir())) + 1
        return WorkerProcess(post, log=self._folder / f"worker-{number}.log", env=self._env)

    def _all_work(self) -> bool:
        return len(self.working()) == len(self._posts)

    def _check(self, worker: WorkerProcess) -> None:
        if worker.hangs:
            raise WorkerFailed(f"A worker does not end.\n{worker.tail()}")
        if worker.exit_code is None:
            return
        ended_by = _end_of(worker)
        if ended_by is None:
            raise WorkerFailed(f"A worker ended and nobody told it to.\n{worker.tail()}")
        if "Traceback" in worker.output:
            raise WorkerFailed(f"A worker shows a traceback.\n{worker.tail()}")
        if ended_by == "SIGTERM":
            _check_left_nothing(worker)
        self.ends[ended_by] += 1


def _end_of(worker: WorkerProcess) -> str | None:
    """The signal that ended it, when it ended as that signal asks for; else None."""
    code = worker.exit_code
    if code == -signal.SIGKILL and (worker.told == signal.SIGKILL or worker.post.kills_itself):
        return "SIGKILL"
    if code == 0 and worker.told == signal.SIGTERM:
        return "SIGTERM"
    return None


def _check_left_nothing(worker: WorkerProcess) -> None:
    # The middle of a worker's name is its process id.
    held = ProcessingJob.objects.filter(
        status=Status.PROCESSING, locked_by__contains=f":{worker.pid}:"
    )
    if left := list(held.values_list("pk", flat=True)):
        raise WorkerFailed(f"A worker that stopped in order left {left}.\n{worker.tail()}")


def python_path(*folders: Path) -> dict[str, str]:
    """The part of an environment that has modules of these folders found before ours."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.getcwd()])}
