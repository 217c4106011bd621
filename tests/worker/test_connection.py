"""The worker's own connections, and what a handler leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import Error, connection, connections, transaction

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob
from django_jobqueue.sqlstates import is_outage
from django_jobqueue.worker.connection import bookkeeping_connection, leave_clean
from django_jobqueue.worker.watchdog import Conversation
from tests.racing import in_thread
from tests.rows import sql

pytestmark = pytest.mark.django_db(transaction=True)


class TestBookkeepingConnection:
    def test_it_is_another_session_with_a_name_and_closed_afterwards(self) -> None:
        usual = sql("SELECT pg_backend_pid()")

        with bookkeeping_connection("default", "coordinator"):
            own = sql("SELECT pg_backend_pid()")
            name = sql("SELECT current_setting('application_name')")

        assert own != usual
        assert name == [("django_jobqueue coordinator",)]
        assert sql("SELECT pg_backend_pid()") == usual

    def test_what_requests_do_with_transactions_is_not_done_here(
        self, request_settings: dict[str, Any]
    ) -> None:
        request_settings.update(
            AUTOCOMMIT=False,
            ATOMIC_REQUESTS=True,
            OPTIONS={"isolation_level": 3},  # psycopg's number for SERIALIZABLE
        )

        with bookkeeping_connection("default", "coordinator"):
            level = sql("SELECT current_setting('transaction_isolation')")
            sql("INSERT INTO processing_jobs (handler) VALUES ('x')")
            seen = in_thread(lambda: ProcessingJob.objects.filter(status=Status.PENDING).exists())

        assert (level, seen) == ([("read committed",)], True)


class TestLeaveClean:
    @pytest.mark.parametrize("leave_open", ["atomic", "begin", "aborted", "no autocommit"])
    def test_a_transaction_left_open_is_rolled_back_with_its_session(self, leave_open: str) -> None:
        def act() -> tuple[bool, list[Any]]:
            if leave_open == "atomic":
                transaction.atomic().__enter__()
            elif leave_open == "no autocommit":
                transaction.set_autocommit(False)
            else:
                sql("BEGIN")
            sql("INSERT INTO processing_jobs (handler) VALUES ('x')")
            if leave_open == "aborted":
                with pytest.raises(Error):
                    sql("SELECT 1/0")
            leave_clean(Conversation("test", patience=lambda: 60))
            return connections["default"].in_atomic_block, sql("SELECT 1")

        assert in_thread(act) == (False, [(1,)])
        assert not ProcessingJob.objects.exists()

    def test_a_session_that_was_closed_is_opened_again(self) -> None:
        def act() -> list[Any]:
            sql("SELECT 1")
            connections["default"].connection.close()
            leave_clean(Conversation("test", patience=lambda: 60))
            return sql("SELECT 2")

        assert in_thread(act) == [(2,)]

    def test_a_healthy_session_is_kept(self, request_settings: dict[str, Any]) -> None:
        request_settings["CONN_MAX_AGE"] = None

        def act() -> bool:
            before = sql("SELECT pg_backend_pid()")
            leave_clean(Conversation("test", patience=lambda: 60))
            return before == sql("SELECT pg_backend_pid()")

        assert in_thread(act)


class TestIsOutage:
    @pytest.mark.parametrize(
        ("statement", "outage"),
        [
            ("SELECT pg_terminate_backend(pg_backend_pid())", True),
            ("SET statement_timeout = 1; SELECT pg_sleep(1)", True),
            ("BEGIN READ ONLY; DELETE FROM processing_jobs", True),
            ("SELECT 1/0", False),
            ("SELECT * FROM nowhere", False),
            ("INSERT INTO processing_jobs (handler) VALUES ('')", False),
            ("SELECT repeat('[', 100000)::jsonb", False),
        ],
    )
    def test_an_error_that_waiting_can_heal_is_one(self, statement: str, outage: bool) -> None:
        with pytest.raises(Error) as caught:
            sql(statement)
        connection.close()

        assert is_outage(caught.value) is outage

    def test_a_refused_login_is_one(self) -> None:
        with bookkeeping_connection("default", "test") as own:
            own.settings_dict["NAME"] = "no_such_database"
            with pytest.raises(Error) as caught:
                own.ensure_connection()

        assert is_outage(caught.value)

    def test_an_error_of_other_code_is_none(self) -> None:
        assert not is_outage(ValueError("08006"))
