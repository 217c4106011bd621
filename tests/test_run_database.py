"""Test runs beside and after each other on one server: none touches what another one uses."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests import run_database
from tests.waiting import wait_until

PROJECT = Path(__file__).resolve().parents[1]

OTHER_RUN = """
import os, sys, psycopg
from tests import run_database

with run_database.run_lock():
    with psycopg.connect(**run_database.connection_params(), autocommit=True) as connection:
        for suffix in ("", "_gw0"):
            connection.execute(f"CREATE DATABASE {run_database.database_name()}{suffix}")
    print("made", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def connection() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(**run_database.connection_params(), autocommit=True) as connection:
        yield connection


@contextlib.contextmanager
def other_run(run_id: str) -> Iterator[subprocess.Popen[str]]:
    """Another test run, which has made its databases."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PROJECT,
        env={**os.environ, run_database.RUN_ID: run_id, "PYTHONPATH": str(PROJECT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        try:
            yield process
        finally:
            process.kill()


def databases_of(connection: psycopg.Connection[Any], run_id: str) -> list[str]:
    names = run_database.run_databases(connection)
    return [name for name in names if run_database.run_of(name) == run_id]


@pytest.mark.parametrize("first_digit", ["0", "f"])
def test_what_a_killed_run_left_is_dropped_at_the_next_start(
    connection: psycopg.Connection[Any], first_digit: str
) -> None:
    # A lock's key is a signed number: low and high ids become different signs.
    run_id = first_digit + secrets.token_hex(4)[1:]
    with other_run(run_id) as process:
        run_database.drop_databases_left_behind(connection)
        assert len(databases_of(connection, run_id)) == 2
        process.kill()

    def dropped() -> bool:
        # The server needs a moment to notice that the run's session is gone.
        run_database.drop_databases_left_behind(connection)
        return not databases_of(connection, run_id)

    wait_until(dropped)


def test_a_run_that_ends_drops_its_databases(connection: psycopg.Connection[Any]) -> None:
    run_id = secrets.token_hex(4)
    with other_run(run_id) as process:
        process.communicate()

        assert process.returncode == 0
        assert databases_of(connection, run_id) == []


def test_databases_of_others_are_left_alone(connection: psycopg.Connection[Any]) -> None:
    name = f"test_jobqueue_mine{secrets.token_hex(4)}"
    connection.execute(f"CREATE DATABASE {name}")
    try:
        run_database.drop_databases_left_behind(connection)
    finally:
        connection.execute(f"DROP DATABASE {name}")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgres://u@:5433//run/pg/app", "postgres://u@:5433//run/pg/other%2Fone"),
        ("postgres:////run/pg/app", "postgres:////run/pg/other%2Fone"),
        ("postgres://u:p@db/app?sslmode=require", "postgres://u:p@db/other%2Fone?sslmode=require"),
    ],
)
def test_the_url_of_another_database_on_the_same_server(
    monkeypatch: pytest.MonkeyPatch, url: str, expected: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", url)

    assert run_database.url_of("other/one") == expected


@pytest.mark.django_db
def test_database_url_leads_a_subprocess_to_this_database(database_url: str) -> None:
    from django.db import connection

    shown = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", SHOW_DATABASE],
        cwd=PROJECT,
        env={
            **os.environ,
            "DATABASE_URL": database_url,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        },
        capture_output=True,
        text=True,
        check=True,
    )

    assert shown.stdout.strip() == connection.settings_dict["NAME"]


SHOW_DATABASE = """
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("SELECT current_database()")
    print(cursor.fetchone()[0])
"""
