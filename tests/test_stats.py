"""Figures for operators."""

from __future__ import annotations

import pytest

from django_jobqueue.stats import due_for_unknown_handlers
from tests.app.jobs import noop
from tests.rows import sql

pytestmark = pytest.mark.django_db


def test_due_jobs_nobody_knows_are_counted_by_handler() -> None:
    noop.enqueue()
    sql("INSERT INTO processing_jobs (handler) VALUES ('old'), ('old'), ('new')")
    sql("INSERT INTO processing_jobs (handler, available_at) VALUES ('ahead', now() + '1 day')")

    assert due_for_unknown_handlers([noop.name], queues=None, using="default") == {
        "old": 2,
        "new": 1,
    }


def test_the_count_is_bounded() -> None:
    sql("INSERT INTO processing_jobs (handler) SELECT 'old' FROM generate_series(1, 1500)")

    assert due_for_unknown_handlers([], queues=None, using="default") == {"old": 1_000}


def test_only_the_queues_asked_about_are_looked_at() -> None:
    sql("INSERT INTO processing_jobs (handler, queue) VALUES ('old', 'a'), ('old', 'b')")

    assert due_for_unknown_handlers([], queues=["a"], using="default") == {"old": 1}
