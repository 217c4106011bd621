"""`manage.py runworker`: flags, operating-system signals and the screen around a coordinator."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import traceback
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, ProgrammingError, connections

from django_jobqueue.management.processes import (
    HUNG,
    MOST_PROCESSES,
    Parent,
    obeying_parent,
    own_command_line,
)
from django_jobqueue.values import checked_name
from django_jobqueue.worker import Coordinator, Summary, WorkerOptions
from django_jobqueue.worker.watchdog import beside

_UNDEFINED_TABLE = "42P01"
#: How long Python's own end may take past the worker's time.
_LEAVE_AFTER = 0.5
_LOOK_EVERY = 0.1
_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


class Command(BaseCommand):
    help = (
        "Runs jobs until it is stopped. SIGTERM or Ctrl-C lets running jobs finish;"
        " a second one gives them back at once and exits with code 1."
    )

    _argv: list[str] | None = None
    _coordinator: Coordinator | None = None
    _is_program = False

    def run_from_argv(self, argv: list[str]) -> None:
        """As a program of its own: the process ends whatever a handler left running."""
        self._argv = argv
        self._is_program = True
        code = 1
        try:
            super().run_from_argv(argv)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            raise
        finally:
            self._bound_the_end(code)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            type=_queue,
            metavar="NAME",
            help="Run jobs of this queue only. Repeat it for several. Default: every queue.",
        )
        parser.add_argument(
            "--threads",
            type=_positive,
            metavar="N",
            help="Jobs that each process runs at a time. Default: the setting THREADS.",
        )
        parser.add_argument(
            "--processes",
            type=_processes,
            default=1,
            metavar="N",
            help="Worker processes. From 2 on, a parent starts another one when one dies."
            " Default: %(default)s.",
        )
        parser.add_argument(
            "--restart-when-hung",
            action="store_true",
            help="Start a new process when every slot holds a handler past its timeout.",
        )
        # How the parent tells a worker process that it is one.
        parser.add_argument("--lifeline", type=int, help=SUPPRESS)
        parser.add_argument(
            "--burst",
            action="store_true",
            help="Exit as soon as nothing is due.",
        )
        parser.add_argument(
            "--max-jobs",
            type=_positive,
            metavar="N",
            help="Exit after N jobs; with --processes, each after N.",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=_seconds,
            metavar="S",
            help="Seconds that running jobs get to finish on exit. Default: SHUTDOWN_TIMEOUT.",
        )
        parser.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            choices=tuple(connections),
            metavar="ALIAS",
            help="The database whose jobs to run. Default: %(default)s.",
        )

    def handle(self, *, verbosity: int, processes: int, lifeline: int | None, **flags: Any) -> None:
        options = _worker_options(**flags)
        _check_vendor(options.database)
        with self._log_lines_on_screen(verbosity):
            if lifeline is None and (processes > 1 or options.restart_when_hung):
                code = self._run_processes(options, processes)
            else:
                code = self._run_worker(options, lifeline)
        if code:
            sys.exit(code)

    def _run_processes(self, options: WorkerOptions, processes: int) -> int:
        parent = Parent(own_command_line(self._argv), options, processes=processes)
        _leave_when(lambda: parent.should_be_gone_at, code=1)
        with self._stopped_by_signals(parent.stop):
            return 0 if parent.run() else 1

    def _run_worker(self, options: WorkerOptions, lifeline: int | None) -> int:
        leave = self._leave_now if self._is_program else None
        coordinator = self._coordinator = Coordinator(options, leave=leave)
        stop = coordinator.stop if lifeline is None else obeying_parent(lifeline, coordinator.stop)
        with self._stopped_by_signals(stop):
            return _exit_code(_run(coordinator))

    def _bound_the_end(self, code: int) -> None:
        """Python's own end waits for every thread that a handler has started, for ever."""
        if (coordinator := self._coordinator) is None:
            return
        if coordinator.summary.hung:
            if (error := sys.exc_info()[1]) and not isinstance(error, SystemExit):
                traceback.print_exception(error)
            _leave(code)
        gone_at = time.monotonic() + coordinator.seconds_left + _LEAVE_AFTER
        _leave_when(lambda: gone_at, code=code)

    def _leave_now(self) -> None:
        if self._coordinator is not None:
            _leave(_exit_code(self._coordinator.summary))

    @contextmanager
    def _stopped_by_signals(self, stop: Callable[[str], None]) -> Iterator[None]:
        """SIGTERM and SIGINT call `stop`; what handled them before does again afterwards. In a
        program nothing does: a signal that comes late must not change how it ended.

        Only the main thread may install handlers: elsewhere, whoever started the worker stops it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _frame: FrameType | None) -> None:
            stop(signal.Signals(number).name)

        previous = {
            number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_IGN if self._is_program else handler)

    @contextmanager
    def _log_lines_on_screen(self, verbosity: int) -> Iterator[None]:
        """Show log lines here, unless the project has said where they go."""
        logger = logging.getLogger("django_jobqueue")
        if logger.hasHandlers():
            self._tell_what_is_hidden(logger, _LEVELS[verbosity])
            yield
            return
        lines = logging.StreamHandler(self.stdout)
        lines.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)-7s %(message)s"))
        level = logger.level
        logger.addHandler(lines)
        logger.setLevel(_LEVELS[verbosity])
        try:
            yield
        finally:
            logger.removeHandler(lines)
            logger.setLevel(level)

    def _tell_what_is_hidden(self, logger: logging.Logger, level: int) -> None:
        if not logger.isEnabledFor(level):
            name = logging.getLevelName(level)
            self.stderr.write(f"LOGGING hides {name} lines of the logger django_jobqueue.")


def _worker_options(**flags: Any) -> WorkerOptions:
    """The flags that were given; the others have their defaults in `WorkerOptions`."""
    names = {field.name for field in dataclasses.fields(WorkerOptions)}
    given = {name: value for name, value in flags.items() if name in names and value is not None}
    if "queues" in given:
        given["queues"] = tuple(dict.fromkeys(given["queues"]))
    try:
        return WorkerOptions(**given)
    except ValueError as error:
        raise CommandError(str(error)) from None


def _exit_code(summary: Summary) -> int:
    if summary.at_once:
        return 1
    return HUNG if summary.hangs else 0


def _leave(code: int) -> None:
    beside(_flush_output)
    os._exit(code)


def _leave_when(moment: Callable[[], float], *, code: int) -> None:
    """End the process at this moment (`time.monotonic`), which may change, if it is still there."""

    def watch() -> None:
        while time.monotonic() < moment():
            time.sleep(_LOOK_EVERY)
        _leave(code)

    # A daemon that nobody joins: it goes with the process. It starts now, since a signal handler
    # that started a thread could wait for a lock of what it interrupted.
    threading.Thread(target=watch, name="jobqueue-leave", daemon=True).start()


def _flush_output() -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stdout.flush()
        sys.stderr.flush()


def _check_vendor(alias: str) -> None:
    if (vendor := connections[alias].vendor) != "postgresql":
        raise CommandError(f"The database {alias!r} is {vendor}. Jobs are kept in PostgreSQL.")


def _run(coordinator: Coordinator) -> Summary:
    try:
        return coordinator.run()
    except ProgrammingError as error:
        if getattr(error.__cause__, "sqlstate", None) != _UNDEFINED_TABLE:
            raise
        alias = coordinator.options.database
        raise CommandError(
            f"The tables of django_jobqueue are missing in the database {alias!r}."
            f" Run: manage.py migrate --database {alias}"
        ) from error


def _queue(text: str) -> str:
    try:
        return checked_name(text, what="queue")
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number of at least 1 is wanted, not {text!r}.")
    return int(text)


def _processes(text: str) -> int:
    count = _positive(text)
    if count > MOST_PROCESSES:
        raise ArgumentTypeError(f"at most {MOST_PROCESSES} are possible, not {count}.")
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"seconds, 0 or more, are wanted, not {text!r}.")
    return seconds
