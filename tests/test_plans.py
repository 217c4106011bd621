"""Plans that cannot flip: each hot statement on its index, whatever the statistics say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from django_jobqueue import queue
from django_jobqueue.models import ProcessingJob
from tests.rows import sql

pytestmark = pytest.mark.django_db(transaction=True)

jobs = ProcessingJob.objects

INSERT = "INSERT INTO processing_jobs (handler, queue, status, finished_at, available_at)"
TABLES = {
    "one queue, all due": f"{INSERT} SELECT 'h', 'q', 'pending', NULL, now() - '1h'::interval"
    " FROM generate_series(1, 20000)",
    "mostly finished": f"{INSERT} SELECT 'h', 'q', CASE WHEN i %% 400 = 0 THEN 'pending'"
    " ELSE 'succeeded' END, CASE WHEN i %% 400 = 0 THEN NULL ELSE now() END, now()"
    " FROM generate_series(1, 40000) AS i",
    "a huge queue beside": f"{INSERT} SELECT 'h', CASE WHEN i %% 1000 = 0 THEN 'q' ELSE 'huge' END,"
    " 'pending', NULL, now() - '1h'::interval FROM generate_series(1, 40000) AS i",
}


@pytest.fixture(params=TABLES)
def analysed_when(request: pytest.FixtureRequest) -> Iterator[str]:
    """The table is filled; the parameter of the same name says when it was analysed."""
    sql("ALTER TABLE processing_jobs SET (autovacuum_enabled = false)")
    sql("ANALYZE processing_jobs")
    sql(TABLES[request.param])
    yield request.param
    connection.close()
    sql("ALTER TABLE processing_jobs RESET (autovacuum_enabled)")


def plan_of(statement: str, *params: Any) -> str:
    return "\n".join(line for (line,) in sql(f"EXPLAIN {statement}", *params))


def plan_of_a_claim(queues: list[str] | None) -> str:
    with transaction.atomic():
        due = jobs.all()._due(queues, ["h", "other"])
        free, params = jobs.all()._free(due, 10)
        return plan_of(free, *params)


@pytest.mark.parametrize("analyse_again", [True, False])
class TestClaim:
    def test_of_one_queue_reads_that_queues_part_of_the_index(
        self, analysed_when: str, analyse_again: bool
    ) -> None:
        if analyse_again:
            sql("ANALYZE processing_jobs")

        plan = plan_of_a_claim(["q"])

        assert "Seq Scan on processing_jobs" not in plan, plan
        assert "processing_jobs_claim" in plan, plan
        if analyse_again:
            assert "Sort" not in plan, plan

    def test_of_every_queue_reads_the_index_without_a_queue(
        self, analysed_when: str, analyse_again: bool
    ) -> None:
        if analyse_again:
            sql("ANALYZE processing_jobs")

        plan = plan_of_a_claim(None)

        assert "Seq Scan on processing_jobs" not in plan, plan
        assert "processing_jobs_claim_any" in plan, plan
        assert "Sort" not in plan, plan


@pytest.mark.parametrize("name", ["_EXTEND", "_RELEASE", "_SETTLE"])
def test_what_ends_or_extends_claims_finds_its_rows_by_primary_key(
    analysed_when: str, name: str
) -> None:
    """Nobody was processing when the statistics were taken: they must not lead anywhere else."""
    sql("ANALYZE processing_jobs")
    ids = list(range(1, 201))
    params = {
        "_EXTEND": (ids, 60, "{}"),
        "_RELEASE": (ids, "{}"),
        "_SETTLE": ("{}", ids),
    }[name]

    plan = plan_of(getattr(queue, name), *params)

    assert "processing_jobs_pkey" in plan, plan
    assert "processing_jobs_locked" not in plan, plan
    assert "Seq Scan on processing_jobs" not in plan, plan


def test_a_rescue_probes_the_index_of_what_is_locked(analysed_when: str) -> None:
    sql("ANALYZE processing_jobs")

    plan = plan_of(queue._RESCUE.replace("{which}", ""), 100, "x")

    assert "processing_jobs_locked" in plan, plan
    assert "Seq Scan on processing_jobs" not in plan, plan


def test_a_prune_reads_the_oldest_finished_rows(analysed_when: str) -> None:
    sql("ANALYZE processing_jobs")

    plan = plan_of(queue._PRUNE.format(statuses="'succeeded', 'cancelled'"), 3600, 1_000)

    assert "processing_jobs_prunable" in plan, plan
    assert "Seq Scan on processing_jobs" not in plan, plan
