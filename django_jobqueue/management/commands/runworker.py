"""`manage.py runworker`: flags, operating-system signals and the screen around a coordinator."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, ProgrammingError, connections

from django_jobqueue.values import checked_name
from django_jobqueue.worker import Coordinator, Summary, WorkerOptions

_UNDEFINED_TABLE = "42P01"
_LEVELS = {0: logging.ERROR, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


class Command(BaseCommand):
    help = (
        "Runs jobs until it is stopped. SIGTERM or Ctrl-C lets running jobs finish;"
        " a second one gives them back at once and exits with code 1."
    )

    _coordinator: Coordinator | None = None

    def run_from_argv(self, argv: list[str]) -> None:
        """As a program of its own: the process ends although a handler hangs."""
        code = 1
        try:
            super().run_from_argv(argv)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            raise
        finally:
            self._leave_hung_handlers(code)

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
            help="Jobs to run at a time. Default: the setting THREADS.",
        )
        parser.add_argument(
            "--burst",
            action="store_true",
            help="Exit as soon as nothing is due.",
        )
        parser.add_argument(
            "--max-jobs",
            type=_positive,
            metavar="N",
            help="Exit after N jobs.",
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

    def handle(self, *, verbosity: int, **flags: Any) -> None:
        options = _worker_options(**flags)
        _check_vendor(options.database)
        coordinator = self._coordinator = Coordinator(options)
        with self._log_lines_on_screen(verbosity), _stopped_by_signals(coordinator.stop):
            summary = _run(coordinator)
        if summary.at_once:
            sys.exit(1)

    def _leave_hung_handlers(self, code: int) -> None:
        # Python's own end waits for threads that a hung handler may have started, for ever.
        if self._coordinator is None or not self._coordinator.summary.hung:
            return
        if code and (error := sys.exc_info()[1]) and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    @contextmanager
    def _log_lines_on_screen(self, verbosity: int) -> Iterator[None]:
        """Show log lines here, unless the project has said where they go."""
        logger = logging.getLogger("django_jobqueue")
        if logger.hasHandlers():
            self._tell_what_is_hidden(logger, _LEVELS[verbosity])
            yield
            return
        lines = logging.StreamHandler(self.stdout)
        lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
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
    names = ("queues", "threads", "burst", "max_jobs", "shutdown_timeout", "database")
    given = {name: flags[name] for name in names if flags[name] is not None}
    if "queues" in given:
        given["queues"] = tuple(dict.fromkeys(given["queues"]))
    try:
        return WorkerOptions(**given)
    except ValueError as error:
        raise CommandError(str(error)) from None


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


@contextmanager
def _stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`; what handled them before does again afterwards.

    Only the main thread may install handlers: elsewhere, whoever started the worker stops it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _queue(text: str) -> str:
    try:
        return checked_name(text, what="queue")
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"a whole number of at least 1 is wanted, not {text!r}.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"seconds, 0 or more, are wanted, not {text!r}.")
    return seconds
