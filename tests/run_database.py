"""The database server of a test run, and names on it that belong to this run alone.

Without DATABASE_URL a run has a server of its own, which ends with it. On a server given by
DATABASE_URL it makes databases named after its run id. For as long as it lives it holds an advisory
lock with that id, so that a later run can tell databases that were left behind from those of a run
beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import environ
import psycopg
from psycopg import sql

RUN_ID = "JOBQUEUE_TEST_RUN"
MEDIA = "JOBQUEUE_TEST_MEDIA"
LOCK_CLASS = 20_517
"""Tells our advisory locks from those of others."""
DJANGOS_OPTIONS = frozenset({"assume_role", "isolation_level", "pool", "server_side_binding"})
"""What may stand in a database URL's query and is not for libpq."""


def database_name() -> str:
    """The name of this run's test database; pytest-django adds the worker's suffix."""
    return f"test_jobqueue_{os.environ.get(RUN_ID, 'none')}"


def url_of(database: str) -> str:
    """DATABASE_URL with another database in it."""
    parts = urlsplit(os.environ["DATABASE_URL"])
    path = parts.path.rpartition("/")[0]
    # Not urlunsplit: it drops one of the slashes of a socket folder.
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}{path}/{quote(database, safe='')}{query}"


@contextlib.contextmanager
def database_for_run() -> Iterator[None]:
    """Set the environment for a run: a server, a run id, a folder for media."""
    with contextlib.ExitStack() as stack:
        os.environ[RUN_ID] = secrets.token_hex(4)
        os.environ[MEDIA] = stack.enter_context(tempfile.TemporaryDirectory(prefix="jobqueue-"))
        if not os.environ.get("DATABASE_URL"):
            stack.enter_context(own_server())
        stack.enter_context(run_lock())
        yield


@contextlib.contextmanager
def own_server() -> Iterator[None]:
    # Imported here: with DATABASE_URL the tests need nothing of the embedded server.
    from example_project.postgres.server import throwaway_server

    with throwaway_server() as server:
        os.environ["DATABASE_URL"] = server.url()
        try:
            yield
        finally:
            del os.environ["DATABASE_URL"]


@contextlib.contextmanager
def run_lock() -> Iterator[None]:
    run_id = os.environ[RUN_ID]
    with psycopg.connect(**connection_params(), autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s, %s)", [LOCK_CLASS, lock_key(run_id)])
        drop_databases_left_behind(connection)
        try:
            yield
        finally:
            # Usually gone already; not after Ctrl-C, or when a test left a process behind.
            drop_databases(connection, {run_id})


def connection_params() -> dict[str, Any]:
    """libpq's parameters for the database that DATABASE_URL names."""
    config = environ.Env.db_url_config(os.environ["DATABASE_URL"])
    params = {
        "dbname": config["NAME"],
        "host": config["HOST"],
        "port": config["PORT"],
        "user": config["USER"],
        "password": config["PASSWORD"],
        **config.get("OPTIONS", {}),
    }
    return {
        name: value for name, value in params.items() if value != "" and name not in DJANGOS_OPTIONS
    }


def lock_key(run_id: str) -> int:
    # PostgreSQL's integers are signed.
    return int(run_id, 16) - 2**31


def drop_databases_left_behind(connection: psycopg.Connection[Any]) -> None:
    """Drop the databases of runs that no longer hold their lock."""
    live_keys = {
        # pg_locks shows the locks of all databases; objid is unsigned.
        row[0]
        for row in connection.execute(
            "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND classid = %s",
            [LOCK_CLASS],
        )
    }
    runs = {run_of(name) for name in run_databases(connection)}
    drop_databases(connection, {run for run in runs if lock_key(run) % 2**32 not in live_keys})


def drop_databases(connection: psycopg.Connection[Any], runs: set[str]) -> None:
    for name in run_databases(connection):
        if run_of(name) in runs:
            # Another run may be dropping the same one.
            with contextlib.suppress(psycopg.Error):
                drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
                connection.execute(drop.format(sql.Identifier(name)))


def run_databases(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute("SELECT datname FROM pg_database ORDER BY datname")
    return [name for (name,) in rows if re.match(r"test_jobqueue_[0-9a-f]{8}(_|$)", name)]


def run_of(database: str) -> str:
    return database.split("_")[2]
