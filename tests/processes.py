"""Real worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.projects import environment
from tests.waiting import wait_until


class WorkerProcess:
    """`manage.py runworker` with its output in a file."""

    def __init__(self, *flags: str, folder: Path, env: dict[str, str]) -> None:
        self._output = folder / f"worker-{len(list(folder.iterdir()))}.log"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "django", "runworker", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def died(self) -> bool:
        """Whether a signal ended it."""
        return (self._process.poll() or 0) < 0

    def says(self, text: str) -> None:
        """Wait until the output contains a text, while the process lives."""

        def said() -> bool:
            return text in self.output or self._process.poll() is not None

        wait_until(said, timeout=30)
        assert text in self.output, self.output

    def interrupt_group(self) -> None:
        """What Ctrl-C does in a terminal: SIGINT reaches the whole process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self, timeout: float = 30) -> int:
        """Wait for the end. Returns the exit code."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running_worker(
    *flags: str, folder: Path, database_url: str, settings: str = "tests.settings"
) -> Iterator[WorkerProcess]:
    """A worker on the test's database, killed at the end if it still runs."""
    env = environment(folder, settings=settings, database_url=database_url)
    worker = WorkerProcess(*flags, folder=folder, env=env)
    try:
        yield worker
    finally:
        worker.kill()
