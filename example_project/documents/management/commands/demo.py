"""`manage.py demo`: import a folder, run the jobs that read it, show what they found."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, cast

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import InterfaceError, OperationalError, connection
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from django_jobqueue import NotDeadLetter
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.models import ProcessingJob
from django_jobqueue.worker import Coordinator, WorkerOptions
from example_project.documents import folders, importing, report
from example_project.documents.jobs import QUEUES
from example_project.documents.models import counted
from example_project.documents.progress import JobProgress, followed
from example_project.documents.reading import printable

INBOX = Path(__file__).resolve().parents[3] / "inbox"
USER = PASSWORD = "demo"
ADMIN_URL = "http://127.0.0.1:8000/admin/"

_PLAIN_WIDTH = 160
_THREADS = 8
_SHUTDOWN_TIMEOUT = 10.0
_LOOK_AGAIN_AFTER = 0.3
_WORTH_A_WORD_AFTER = 8.0
_MIGRATE_LOCK = 7_301_944


class Command(BaseCommand):
    help = "Imports a folder, runs the jobs that read its files, and shows what they found."
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "folder",
            nargs="?",
            default=str(INBOX),
            help="The folder to import, with all folders in it. Default: the example's inbox.",
        )

    def handle(self, *, folder: str, **options: Any) -> None:
        self.console = _console(cast("IO[str]", self.stdout), no_color=options["no_color"])
        self.stdout.ending = ""  # rich writes its own line ends, and some text without
        self.interruption = _Interruption()
        _check_folder(folder)
        try:
            with self.interruption.caught(), _quiet_log(unless=options["verbosity"] > 1):
                self.run(folder)
        except KeyboardInterrupt:
            self.say("Interrupted. Run the command again: it goes on where it was.")
            sys.exit(128 + self.interruption.number)
        except (OperationalError, InterfaceError) as error:
            raise CommandError(f"The database does not answer: {error}".strip()) from error

    def run(self, folder: str) -> None:
        """The whole demo, step by step."""
        self.prepare_database()
        document_ids = self.import_folder(folder)
        if not document_ids:
            self.say(f"There is no file to import in {_shown(folder)}.")
            return
        self.read(document_ids)
        self.interruption.check()
        found = report.report_on(document_ids)
        self.show(found)
        self.requeue_one(found)
        self.say_how_to_open_admin()

    def prepare_database(self) -> None:
        """Make the tables, and a user for the admin."""
        with self.console.status("Preparing the database"):
            _migrate()
            if settings.DEBUG:
                _make_user()

    def import_folder(self, folder: str) -> list[int]:
        """Make a document of every file. Returns the ids, also of files imported before."""
        with self.console.status(f"Looking through {_shown(folder)}"):
            found = folders.look_through(
                folder, without=settings.MEDIA_ROOT, after_folder=self.interruption.check
            )
        passed_over = list(found.passed_over)
        imported: list[importing.Imported] = []
        with self.bar("files") as bar:
            for file in bar.track(found.files, description="Importing"):
                self.interruption.check()
                try:
                    imported.append(importing.import_file(file))
                except folders.NotImportable as error:
                    passed_over.append(folders.PassedOver(name=file.name, reason=str(error)))
        self.say_what_was_imported(folder, imported, passed_over)
        return [document.document_id for document in imported]

    def say_what_was_imported(
        self,
        folder: str,
        imported: Sequence[importing.Imported],
        passed_over: Sequence[folders.PassedOver],
    ) -> None:
        new = sum(document.new for document in imported)
        known = len(imported) - new
        also = f" {counted(known, 'file')} had been imported before." if known else ""
        if imported:
            self.say(f"Imported {counted(new, 'new document')} from {_shown(folder)}.{also}")
        reasons = Counter(entry.reason for entry in passed_over)
        for reason, count in reasons.most_common():
            example = next(entry.name for entry in passed_over if entry.reason == reason)
            self.say(f"Passed over {count:,}: {reason} ({example}{', …' * (count > 1)}).")

    def read(self, document_ids: Sequence[int]) -> None:
        """Run a worker until no job of these documents waits: retries too are seen through."""
        with self.bar("jobs") as bar:
            line = bar.add_task("Reading", total=None)
            progress = JobProgress(bar, line, document_ids)
            with followed(progress, self.console):
                left = self.work_until_finished(document_ids, progress)
        if left:
            self.say(
                f"{counted(left, 'job')} did not finish: another worker has them, or their queue"
                " is paused. Run the command again later."
            )

    def work_until_finished(self, document_ids: Sequence[int], progress: JobProgress) -> int:
        """Work in bursts until no job is left. Returns how many are.

        Gives up when nothing moves for longer than a lost worker can keep its lock.
        """
        patience = _Patience()
        total = report.job_count(document_ids)
        while left := report.unfinished(document_ids):
            self.interruption.check()
            progress.set(total=total, ended=total - left)
            if patience.is_over(left):
                return left
            if patience.is_tried():
                self.say(
                    f"{counted(left, 'job')} cannot run yet: a worker that was killed keeps its"
                    f" jobs for a while. Waiting, {patience.seconds:g} seconds at most."
                )
            self.work_while_something_is_due()
            total = report.job_count(document_ids)
            time.sleep(_LOOK_AGAIN_AFTER)
        progress.set(total=total, ended=total)
        return 0

    def work_while_something_is_due(self) -> None:
        options = WorkerOptions(
            queues=QUEUES, threads=_THREADS, burst=True, shutdown_timeout=_SHUTDOWN_TIMEOUT
        )
        worker = Coordinator(options)
        with self.interruption.stops(worker.stop):
            worker.run()

    def show(self, found: report.Report) -> None:
        """The tables, and a line that sums up."""
        plain = not self.console.is_terminal
        self.console.print(report.findings_table(found, plain=plain))
        self.say_more(len(found.documents), found.document_count, "document")
        if found.document_count > report.ROWS:
            self.console.print(report.kinds_table(found, plain=plain))
        if found.problems:
            self.console.print(report.problems_table(found, plain=plain))
            self.say_more(len(found.problems), found.problem_count, "job")
        self.say(report.counts_line(found))

    def requeue_one(self, found: report.Report) -> None:
        """Send one dead letter back, as a person does in the admin."""
        dead = found.first_dead_letter
        if dead is None:
            self.say("There is no dead letter to requeue.")
            return
        what = f"job {dead.pk} ({report.short_name(dead)} of {report.document_name(dead)})"
        try:
            job = ProcessingJob.objects.requeue_dead_letter(dead.pk)
        except NotDeadLetter as error:
            self.say(f"Did not requeue {what}: {error}")
            return
        self.say(
            f"Requeued the dead letter {what}: status = {job.status}, attempts = {job.attempts}."
            " The next worker runs it again."
        )

    def say_how_to_open_admin(self) -> None:
        self.say(f"\nOpen the admin: {_python()} manage.py runserver")
        who = _how_to_log_in() if settings.DEBUG else "Log in as a user of your own."
        self.say(f"then {ADMIN_URL} - {who}")

    def say(self, line: str) -> None:
        # Names and errors are data: a "[red]" in them is no markup, and a long one is not cut.
        self.console.print(line, markup=False, soft_wrap=True)

    def say_more(self, shown: int, count: int, what: str) -> None:
        if line := report.more_line(shown, count, what):
            self.say(line)

    def bar(self, unit: str) -> Progress:
        """A progress bar; nothing at all when the output is no terminal."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )


class _Interruption:
    """Ctrl-C or SIGTERM: a running worker stops in good order, everything else at the next check.

    An exception raised by a signal handler can come up anywhere, also where Python swallows it. So
    only the second signal raises one at once.
    """

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)
        self._asked = False
        self._stop: Callable[[str], None] | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within, `check` raises `KeyboardInterrupt` after a signal."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may install handlers
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def stops(self, stop: Callable[[str], None]) -> Iterator[None]:
        """Within, a signal calls `stop`; the check is at the end."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None
        self.check()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` when there was a signal."""
        if self._asked:
            raise KeyboardInterrupt

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again, self._asked, self.number = self._asked, True, number
        if self._stop is not None:
            self._stop(signal.Signals(number).name)
        elif again:
            raise KeyboardInterrupt


class _Patience:
    """How long a number of jobs may stay the same."""

    def __init__(self) -> None:
        options = jobqueue_settings()
        self.seconds = options.STALE_LOCK_AFTER + options.RESCUE_INTERVAL + 5
        self._left = -1
        self._since = time.monotonic()
        self._told = False

    def is_over(self, left: int) -> bool:
        """Whether the number has been the same for too long."""
        if left != self._left:
            self._left, self._since = left, time.monotonic()
        return time.monotonic() - self._since > self.seconds

    def is_tried(self) -> bool:
        """True once: when the wait has become worth a word."""
        if self._told or time.monotonic() - self._since < _WORTH_A_WORD_AFTER:
            return False
        self._told = True
        return True


@contextmanager
def _quiet_log(*, unless: bool) -> Iterator[None]:
    """The tables tell every failure; its log line would only break the progress bar."""
    logger = logging.getLogger("django_jobqueue")
    level = logger.level
    if not unless:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _console(stdout: IO[str], *, no_color: bool) -> Console:
    reconfigure = getattr(stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a screen that knows only ASCII is no error
    width = None if stdout.isatty() else _PLAIN_WIDTH
    return Console(
        file=stdout, width=width, no_color=no_color or None, highlight=False, emoji=False
    )


def _check_folder(folder: str) -> None:
    if not os.path.lexists(folder):
        raise CommandError(f"There is no folder {_shown(folder)}.")
    if not os.path.isdir(folder):
        raise CommandError(f"{_shown(folder)} is not a folder.")
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise CommandError(
            f"The folder {_shown(folder)} cannot be read: {folders.reason_of(error)}."
        ) from error


def _shown(folder: str) -> str:
    inside = os.path.relpath(folder) if folder else "''"
    return printable(folder if inside.startswith("..") else inside)


def _migrate() -> None:
    # Two demos started together would make the same tables.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [_MIGRATE_LOCK])
        try:
            call_command("migrate", verbosity=0, interactive=False)
        finally:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_MIGRATE_LOCK])


def _make_user() -> None:
    users = get_user_model()._default_manager
    if not users.filter(username=USER).exists():
        users.create_superuser(username=USER, email="", password=PASSWORD)


def _how_to_log_in() -> str:
    user = get_user_model()._default_manager.get(username=USER)
    if user.check_password(PASSWORD):
        return f"user {USER}, password {PASSWORD}."
    return f"user {USER}, with the password it was given since."


def _python() -> str:
    """The interpreter as one would type it here."""
    inside = os.path.relpath(sys.executable)
    return "python" if inside.startswith("..") else inside
