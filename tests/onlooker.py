"""Counts database sessions from beside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.db import connection

from tests.run_database import connection_params


class Onlooker:
    """Counts the sessions that the test's database has now and did not have at first."""

    def __init__(self) -> None:
        params = {**connection_params(), "dbname": connection.settings_dict["NAME"]}
        self._session = psycopg.connect(**params, autocommit=True)
        connection.ensure_connection()  # the test's own
        self._known = self._pids() | {self._session.info.backend_pid}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most = 0

    def sessions(self) -> int:
        return len(self._pids() - self._known)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._session.close()

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self.sessions())

    def _pids(self) -> set[int]:
        rows = self._session.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        return {pid for (pid,) in rows}


@contextmanager
def looking_on() -> Iterator[Onlooker]:
    """Look on for as long as the block takes."""
    onlooker = Onlooker()
    onlooker.start()
    try:
        yield onlooker
    finally:
        onlooker.close()
