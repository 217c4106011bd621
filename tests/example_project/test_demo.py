"""`manage.py demo` in real processes, on the test's database."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import global_settings
from django.db import transaction
from django.test import Client, override_settings

from django_jobqueue.models import ProcessingJob
from example_project.documents.management.commands.demo import INBOX
from example_project.documents.models import Document
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., subprocess.Popen[str]]
FILES = 60
INBOX_FILES = len(list(INBOX.iterdir()))


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start the demo; one that still runs at the end is killed."""
    env = {
        **os.environ,
        "DATABASE_URL": database_url,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "MEDIA_ROOT": str(tmp_path / "media"),
        "COLUMNS": "40",
    }
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "manage.py", "demo", *map(str, arguments)],
            cwd=INBOX.parents[1],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen[str], *, exit_code: int = 0) -> str:
    output, _errors = process.communicate(timeout=120)
    assert process.returncode == exit_code, output
    return output


def many_files(folder: Path, number: int = FILES) -> Path:
    folder.mkdir()
    for index in range(number):
        (folder / f"{index}.txt").write_text(f"file number {index}\n")
    return folder


def statuses() -> set[str]:
    return set(ProcessingJob.objects.values_list("status", flat=True))


class TestOnTheInbox:
    def test_it_shows_what_was_found_and_requeues_a_dead_letter(self, start: Start) -> None:
        output = output_of(start())
        assert f"Imported {INBOX_FILES} new documents" in output
        for finding in ("3 pages", "640 × 480 pixels", "3 entries", "application/pdf"):
            assert finding in output
        for reason in ("Broken xref table", "the file is empty", "begins like an image"):
            assert reason in output
        assert "Jobs: 60 succeeded (1 of them retried), 6 dead letters." in output
        self.assert_that_one_is_requeued(output)
        self.assert_that_it_is_plain(output)

    def test_it_works_twice_and_its_user_can_log_in(self, start: Start, client: Client) -> None:
        output_of(start())
        output = output_of(start())
        assert f"{INBOX_FILES} files had been imported before" in output
        assert "Jobs: 60 succeeded (1 of them retried), 6 dead letters." in output
        assert Document.objects.count() == INBOX_FILES
        self.assert_that_one_is_requeued(output)
        assert "manage.py runserver" in output
        assert "http://127.0.0.1:8000/admin/ - user demo, password demo" in output
        with override_settings(PASSWORD_HASHERS=global_settings.PASSWORD_HASHERS):
            assert client.login(username="demo", password="demo")

    def assert_that_one_is_requeued(self, output: str) -> None:
        requeued = re.search(
            r"Requeued the dead letter job (\d+) .* status = pending, attempts = 0", output
        )
        assert requeued
        job = ProcessingJob.objects.get(pk=requeued[1])
        assert (job.status, job.attempts) == ("pending", 0)

    def assert_that_it_is_plain(self, output: str) -> None:
        assert "\x1b" not in output
        assert "\r" not in output


class TestOnOtherFolders:
    def test_rows_are_capped_and_the_rest_counted(self, start: Start, tmp_path: Path) -> None:
        output = output_of(start(many_files(tmp_path / "many")))
        assert "… and 20 more documents." in output
        assert "Jobs: 120 succeeded" in output
        assert "no dead letter to requeue" in output

    def test_odd_names_are_data(self, start: Start, tmp_path: Path) -> None:
        folder = tmp_path / "odd"
        folder.mkdir()
        for name in (b"caf\xe9.txt", b"[red].txt", b"[.nope].png", b"\x1b[2J"):
            Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_bytes(b"x")
        os.mkfifo(folder / "pipe")
        output = output_of(start(folder))
        for shown in (r"caf\udce9.txt", "[red].txt", "[.nope].png", r"\x1b[2J", "a pipe (pipe)"):
            assert shown in output

    def test_an_empty_folder_is_told(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        output = output_of(start(tmp_path / "empty"))
        assert "There is no file to import" in output

    @pytest.mark.parametrize(
        ("folder", "message"),
        [
            ("no/such/folder", "There is no folder"),
            ("manage.py", "not a folder"),
            ("", "no folder"),
        ],
    )
    def test_what_is_no_folder_is_one_clear_error(
        self, start: Start, folder: str, message: str
    ) -> None:
        output = output_of(start(folder), exit_code=1)
        assert message in output
        assert len(output.splitlines()) == 1


class TestInterrupted:
    def interrupted(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        output = output_of(process, exit_code=128 + number)
        assert "Traceback" not in output
        assert output.splitlines()[-1].startswith("Interrupted.")
        assert "processing" not in statuses()

    def test_while_it_imports(self, start: Start, tmp_path: Path) -> None:
        folder = many_files(tmp_path / "many")
        process = start(folder)
        wait_until(Document.objects.exists, timeout=60)
        process.send_signal(signal.SIGINT)
        self.interrupted(process, signal.SIGINT)
        assert "Jobs: 120 succeeded" in output_of(start(folder))
        assert Document.objects.count() == FILES

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_while_it_works(self, start: Start, tmp_path: Path, number: signal.Signals) -> None:
        folder = many_files(tmp_path / "many")
        process = start(folder)
        wait_until(lambda: Document.objects.count() == FILES, timeout=60)
        with transaction.atomic():
            # Its jobs cannot end before this does, so the demo is still at work.
            Document.objects.select_for_update().latest("pk")
            wait_until(ProcessingJob.objects.filter(status="succeeded").exists, timeout=60)
            process.send_signal(number)
        self.interrupted(process, number)
        assert "Jobs: 120 succeeded" in output_of(start(folder))
        assert Document.objects.count() == FILES
