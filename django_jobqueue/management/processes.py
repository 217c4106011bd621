"""Several worker processes and their parent, which starts another one when one dies.

    parent ──SIGTERM───▶ worker process: the parent's own command line, in a session of its own
           ──lifeline──▶ a pipe: its end means that the parent ended, a byte means "at once"

The parent opens no connection and runs no handler, so what brings a worker process down, a handler
or the database, does not reach it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from django.core.management.base import CommandError

from django_jobqueue import signals
from django_jobqueue.worker import WorkerOptions
from django_jobqueue.worker.shutdown import Shutdown

MOST_PROCESSES = 100

#: A worker process ends with this code when every handler it runs hangs: start another one.
HUNG = 3

_TURN = 0.2
_GRACE = 3.0  # a worker ends itself a second after its time; this also allows for a busy machine
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_STEADY_AFTER = 60.0


class Parent:
    """Keeps so many worker processes running, each on the command given with `--lifeline` added.

    `run` blocks in the calling thread until all of them have ended for good; `stop` may be called
    from any thread and from a signal handler.
    """

    def __init__(self, command: Sequence[str], options: WorkerOptions, *, processes: int) -> None:
        self._command = command
        self._shutdown = Shutdown(timeout=options.shutdown_timeout)
        # Any other worker runs until it is stopped: 0 is then the answer to a signal that
        # somebody else sent it, and no reason to go on with one process less.
        self._may_finish = options.burst or options.max_jobs is not None
        self._places = [_Place() for _number in range(processes)]
        self._inbox: SimpleQueue[str] = SimpleQueue()
        self._stopping = False
        self._all_well = True

    def stop(self, reason: str = "asked to") -> None:
        """Let the worker processes finish what runs. After a second call they end at once."""
        self._shutdown.ask()
        self._inbox.put(reason)

    @property
    def should_be_gone_at(self) -> float:
        """A moment of `time.monotonic`; infinity as long as nobody asked it to stop."""
        return self._shutdown.deadline + _GRACE + 1

    def run(self) -> bool:
        """Work until stopped, or until every worker process has done what the options ask for.

        Returns whether all was well in the end: nobody asked twice, every process ended by
        itself. Whatever ends the parent, its worker processes stop.
        """
        self._lifeline, self._lifeline_of_parent = os.pipe()
        try:
            while not self._done():
                self._turn()
        finally:
            os.close(self._lifeline_of_parent)
            os.close(self._lifeline)
        signals.tell(signals.parent_stopped, self)
        return self._all_well

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._start_what_is_due()
        self._read_inbox()
        self._notice_ends()
        self._kill_what_is_late()

    def _done(self) -> bool:
        return not self._running() and (
            self._stopping or all(place.start_at == math.inf for place in self._places)
        )

    def _start_what_is_due(self) -> None:
        if self._stopping:
            return
        for place in self._places:
            if place.process is None and time.monotonic() >= place.start_at:
                self._start(place)

    def _start(self, place: _Place) -> None:
        try:
            place.process = self._new_process()
        except OSError as error:  # no memory, or no process left
            place.pause_after(0, lived=0)
            signals.tell(signals.worker_step_failed, self, error=error)
            return
        place.started_at = time.monotonic()
        signals.tell(signals.process_started, self, pid=place.process.pid)

    def _read_inbox(self) -> None:
        """Wait for a request to stop, for the length of a turn."""
        with suppress(Empty):
            self._receive(self._inbox.get(timeout=_TURN))

    def _notice_ends(self) -> None:
        for place in self._places:
            if place.process is not None and (code := place.process.poll()) is not None:
                pid, place.process = place.process.pid, None
                self._receive_end(place, pid, code)

    def _kill_what_is_late(self) -> None:
        if time.monotonic() >= self._shutdown.deadline + _GRACE:
            for process in self._running():
                process.kill()

    # --- start and end -------------------------------------------------------------------------

    def _new_process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._command, "--lifeline", str(self._lifeline)],
            stdin=subprocess.DEVNULL,
            pass_fds=[self._lifeline],
            # Ctrl-C in a terminal reaches the parent alone, which passes it on.
            start_new_session=True,
        )

    def _receive(self, reason: str) -> None:
        if self._stopping:
            self._stop_at_once()
        else:
            self._begin_stopping(reason)

    def _begin_stopping(self, reason: str) -> None:
        self._stopping = True
        signals.tell(signals.parent_stopping, self, running=len(self._running()), reason=reason)
        for process in self._running():
            # Never SIGINT: one that is still starting would end with a traceback.
            process.terminate()

    def _stop_at_once(self) -> None:
        self._all_well = False
        # One pipe for all: each process reads one byte and no more.
        os.write(self._lifeline_of_parent, b"!" * len(self._running()))

    def _receive_end(self, place: _Place, pid: int, code: int) -> None:
        if self._stopping:
            self._note_last_end(pid, code)
        elif code == 0 and self._may_finish:
            place.start_at = math.inf
            signals.tell(signals.process_ended, self, pid=pid)
        else:
            pause = place.pause_after(code, lived=time.monotonic() - place.started_at)
            signals.tell(signals.process_died, self, pid=pid, reason=how_it_ended(code), wait=pause)

    def _note_last_end(self, pid: int, code: int) -> None:
        # SIGTERM itself ends a process that had not come as far as to handle it.
        # Asked twice, it exits with 1.
        expected = {0, -signal.SIGTERM, HUNG} | ({1} if self._shutdown.at_once else set())
        if code in expected:
            signals.tell(signals.process_ended, self, pid=pid)
            return
        self._all_well = False
        signals.tell(signals.process_died, self, pid=pid, reason=how_it_ended(code), wait=None)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [place.process for place in self._places if place.process is not None]


@dataclass(slots=True)
class _Place:
    """Where a worker process runs, and after its death the next one. Times are monotonic."""

    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0  # infinite when no other shall start
    pause: float = 0.0

    def pause_after(self, code: int, *, lived: float) -> float:
        """Set the start of the next process. Returns the seconds until then."""
        self.pause = next_pause(code, lived=lived, last_pause=self.pause)
        self.start_at = time.monotonic() + self.pause
        return self.pause


def next_pause(code: int, *, lived: float, last_pause: float) -> float:
    """Seconds to wait after a worker process that ended with this code.

    Longer and longer while they die young. After a steady life there is no reason to think that
    the next one fares badly, and none at all to wait when the last one asked for it.
    """
    if lived < _STEADY_AFTER:
        return min(max(_FIRST_PAUSE, last_pause * 2), _LONGEST_PAUSE)
    return 0.0 if code == HUNG else _FIRST_PAUSE


def how_it_ended(code: int) -> str:
    """In words, from the exit code as `subprocess` gives it: a signal's number is negative."""
    if code == HUNG:
        return f"exit code {code}: every slot hangs"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def own_command_line(argv: Sequence[str] | None) -> list[str]:
    """What starts this program again: interpreter, its options, and the arguments in `argv`.

    `argv` is what the command was run with, None when it was called by code. Raises CommandError
    unless it is the end of this process's command line: anything else would start another program.
    """
    # Not `sys.argv`, which has lost `-m`, `-c` and the options of the interpreter.
    given = sys.orig_argv[1:]
    if argv is None or not sys.executable or given[-len(argv[1:]) :] != list(argv[1:]):
        raise CommandError(
            "Worker processes repeat the command line, and this is not one that can be repeated."
            " Run `manage.py runworker` with --processes or --restart-when-hung as a program."
        )
    if os.name != "posix":
        raise CommandError("Worker processes need POSIX signals. Run several workers instead.")
    return [sys.executable, *given]


def obeying_parent(lifeline: int, stop: Callable[[str], None]) -> Callable[[str], None]:
    """In a worker process: call `stop` when the parent ends, and twice when it says "at once".

    Returns what this process's own signals shall call. All of them count as one: who signals the
    whole service, as systemd does, reaches this process once, and by its parent once more.
    """
    # What handlers start has no business with it.
    os.set_inheritable(lifeline, False)
    stop_once = _only_once(stop)

    def wait_for_parent() -> None:
        at_once = os.read(lifeline, 1)
        stop_once("its parent asked to" if at_once else "its parent ended")
        if at_once:
            stop("its parent asked to")

    # A daemon that nobody joins: it waits for as long as the process lives.
    threading.Thread(target=wait_for_parent, name="jobqueue-lifeline", daemon=True).start()
    return stop_once


def _only_once(stop: Callable[[str], None]) -> Callable[[str], None]:
    first = threading.Lock()

    def stop_once(reason: str) -> None:
        # Taken once and never given back. Nobody waits for it, so a signal handler may take it.
        if first.acquire(blocking=False):
            stop(reason)

    return stop_once
