"""What `manage.py check` says, and that neither it nor an import needs a database."""

from __future__ import annotations

import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.checks.registry import registry
from django.core.management import call_command

import django_jobqueue
from django_jobqueue.checks import check_databases, check_settings

PROJECT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    one.name for one in pkgutil.walk_packages(django_jobqueue.__path__, "django_jobqueue.")
)
#: Nothing that needs the app registry.
BEFORE_SETUP = (
    *("exceptions", "states", "values", "payload", "failure", "outcomes", "backoff", "conf"),
    *("signals", "handlers", "new_job", "queue", "execution", "checks", "logs", "apps"),
)


def ran(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python process in which warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), **(environment or {})},
    )


# --- settings ----------------------------------------------------------------------------------


def test_good_settings_are_no_problem(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"THREADS": 2}

    assert check_settings() == []


def test_each_problem_of_the_settings_is_an_error(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"THREAD": 2, "POLL_INTERVAL": 0}

    errors = check_settings()

    assert [error.id for error in errors] == ["django_jobqueue.E001", "django_jobqueue.E001"]
    assert "Did you mean 'THREADS'?" in errors[0].msg
    assert "POLL_INTERVAL" in errors[1].msg


def test_values_that_contradict_each_other_are_an_error(settings: Any) -> None:
    settings.DJANGO_JOBQUEUE = {"STALE_LOCK_AFTER": 5, "HEARTBEAT_INTERVAL": 5}

    (error,) = check_settings()

    assert error.id == "django_jobqueue.E001"
    assert "HEARTBEAT_INTERVAL" in error.msg


def test_manage_py_check_runs_both_checks() -> None:
    assert {check_settings, check_databases} <= set(registry.get_checks())


# --- databases ---------------------------------------------------------------------------------

CHECK = """
import sys
from django.conf import settings

engine, alias, *missing = sys.argv[1:]
for module in missing:
    sys.modules[module] = None  # any import of it is now an ImportError

postgresql = {"ENGINE": "django.db.backends.postgresql", "NAME": "none"}
settings.configure(
    INSTALLED_APPS=["django_jobqueue"],
    DATABASES={"default": postgresql, alias: {"ENGINE": engine, "NAME": "none"}},
    DATABASE_ROUTERS=["__main__.Router"],
)

class Router:
    def db_for_write(self, model, **hints):
        return alias

import django
django.setup()
from django_jobqueue.checks import check_databases
for message in check_databases():
    print(message.id, message.msg, message.hint, sep="|")
"""
POSTGRESQL = "django.db.backends.postgresql"
SQLITE = "django.db.backends.sqlite3"
MYSQL = "django.db.backends.mysql"


def checked(engine: str, alias: str = "default", *, missing: tuple[str, ...] = ()) -> list[str]:
    """What the check says in a process where jobs are routed to such a database."""
    result = ran("-c", CHECK, engine, alias, *missing)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_another_database_than_the_default_one_may_hold_the_jobs() -> None:
    assert checked(POSTGRESQL, "jobs") == []


def test_the_database_of_the_tests_is_no_problem() -> None:
    assert check_databases() == []


def test_sqlite_is_an_error() -> None:
    (line,) = checked(SQLITE)

    code, message, hint = line.split("|")
    assert code == "django_jobqueue.E002"
    assert message == "Jobs would be written to the database 'default', which is sqlite."
    assert "needs PostgreSQL and psycopg 3" in hint
    assert "DATABASE_ROUTERS" in hint


@pytest.mark.parametrize(
    ("engine", "missing", "error"),
    [
        (MYSQL, ("MySQLdb",), "Error loading MySQLdb module"),
        (POSTGRESQL, ("psycopg", "psycopg2"), "Error loading psycopg2 or psycopg module"),
    ],
    ids=["mysql", "postgresql"],
)
def test_a_database_without_its_driver_is_the_same_error_and_no_crash(
    engine: str, missing: tuple[str, ...], error: str
) -> None:
    # Asked directly: for some databases Django's own checks of models fail first.
    (line,) = checked(engine, "jobs", missing=missing)

    code, message, hint = line.split("|")
    assert code == "django_jobqueue.E002"
    assert message == (
        f"Jobs would be written to the database 'jobs', which cannot be used: {error}."
    )
    assert "needs PostgreSQL and psycopg 3" in hint


def test_psycopg_2_is_an_error() -> None:
    (line,) = checked(POSTGRESQL, missing=("psycopg",))

    code, message, hint = line.split("|")
    assert code == "django_jobqueue.E003"
    assert message == "Django uses psycopg 2 here, and django-jobqueue needs psycopg 3."
    assert "pip install 'psycopg[binary]'" in hint


# --- nothing starts by itself ------------------------------------------------------------------

IMPORT_ALL = """
import importlib, signal, sys, threading

handled = [signal.getsignal(number) for number in signal.valid_signals()]
for name in sys.argv[1:]:
    importlib.import_module(name)

assert threading.active_count() == 1, threading.enumerate()
assert [signal.getsignal(number) for number in signal.valid_signals()] == handled
"""
SET_UP = """
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django_jobqueue",
    ],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "none",
            "HOST": "127.0.0.1",
            "PORT": "1",
        }
    },
)
django.setup()
"""
NOT_CONNECTED = """
from django.db import connections
assert all(connection.connection is None for connection in connections.all())
"""


def test_what_needs_no_models_can_be_imported_before_django_is_set_up() -> None:
    result = ran("-c", IMPORT_ALL, *(f"django_jobqueue.{name}" for name in BEFORE_SETUP))

    assert (result.returncode, result.stderr) == (0, "")


def test_importing_everything_starts_no_thread_no_query_and_no_signal_handler() -> None:
    result = ran("-c", SET_UP + IMPORT_ALL + NOT_CONNECTED, *MODULES)

    assert (result.returncode, result.stderr) == (0, "")


def test_everything_can_be_imported_without_the_optional_packages() -> None:
    block = "import sys\nfor name in ('psycopg2', 'environ', 'rich'): sys.modules[name] = None\n"

    result = ran("-c", block + SET_UP + IMPORT_ALL, *MODULES)

    assert (result.returncode, result.stderr) == (0, "")


@pytest.fixture
def silent_port() -> Iterator[tuple[socket.socket, int]]:
    """A port at which a database could be, and which tells whether anyone called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server, server.getsockname()[1]


def anyone_called(server: socket.socket) -> bool:
    try:
        server.accept()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("command", ["check", "--help", "runworker --help"])
def test_a_command_that_needs_no_database_calls_none(
    command: str, silent_port: tuple[socket.socket, int]
) -> None:
    server, port = silent_port
    url = f"postgres://nobody@127.0.0.1:{port}/none"

    result = ran("manage.py", *command.split(), environment={"DATABASE_URL": url})

    assert result.returncode == 0, result.stderr
    assert not anyone_called(server)


@pytest.mark.parametrize("command", ["check", "runworker --help"])
def test_a_command_that_needs_no_database_starts_no_embedded_one(
    command: str, tmp_path: Path
) -> None:
    folder = tmp_path / "postgres"

    result = ran(
        "manage.py", *command.split(), environment={"EMBEDDED_POSTGRES_FOLDER": str(folder)}
    )

    assert result.returncode == 0, result.stderr
    assert not folder.exists()


def test_check_says_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("check")

    assert "no issues" in capsys.readouterr().out
