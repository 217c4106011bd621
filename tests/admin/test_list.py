"""The list answers at the same speed over any number of jobs, and only the questions it offers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from django_jobqueue import Status
from django_jobqueue.admin.jobs import ProcessingJobAdmin
from django_jobqueue.models import Queue
from tests.admin.scene import LIST, LONG_AGO, captured_sql, make_job, make_jobs
from tests.rows import sql

pytestmark = pytest.mark.django_db

LARGE_COLUMNS = ('"payload"', '"result"', '"traceback"')


@pytest.fixture
def many_jobs() -> None:
    make_jobs(1_000, Status.DEAD_LETTER, queue="mail", last_error="Boom: " + "x" * 5_000)
    sql(
        """
        INSERT INTO processing_jobs (handler, queue, status, finished_at, result)
        SELECT 'shop.send', 'reports', 'succeeded', now(), '"done"' FROM generate_series(1, 19000)
        """
    )


def rows_of(page: Any) -> list[int]:
    return [job.pk for job in page.context["cl"].result_list]


@pytest.mark.parametrize(
    "query",
    ["", "?status__exact=dead_letter", "?queue=mail", "?handler=shop.send", "?q=12", "?p=3"],
)
def test_a_list_of_20_000_jobs_needs_few_queries_and_no_large_column(
    many_jobs: None, operators_client: Client, query: str
) -> None:
    with captured_sql() as statements:
        assert operators_client.get(f"{LIST}{query}").status_code == 200
    on_jobs = [query for query in statements() if "processing_jobs" in query]
    assert len(statements()) <= 15
    assert not [query for query in on_jobs if any(column in query for column in LARGE_COLUMNS)]
    assert all(
        'LEFT("processing_jobs"."last_error"' in query for query in on_jobs if "last_error" in query
    )
    assert all("LIMIT" in query or '"idempotency_key" IN' in query for query in on_jobs)


def test_the_number_of_queries_does_not_depend_on_the_page_size(
    operators_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_jobs(60, Status.DEAD_LETTER, last_error="Boom")
    counted = []
    for size in (1, 50):
        monkeypatch.setattr(ProcessingJobAdmin, "list_per_page", size)
        with captured_sql() as statements:
            assert len(rows_of(operators_client.get(LIST))) == size
        counted.append(len(statements()))
    assert counted[0] == counted[1] <= 15


def test_the_count_stops_at_ten_thousand_and_says_so(
    many_jobs: None, operators_client: Client
) -> None:
    with captured_sql() as statements:
        page = operators_client.get(LIST)
    assert [query for query in statements() if "COUNT(" in query and "LIMIT 10001" in query]
    assert b"There are more than 10000" in page.content
    assert b"Select all jobs, more than 10000" in page.content
    assert b"More than 10000 results" in page.content
    assert b"10000 results" not in page.content.replace(b"More than 10000 results", b"")
    assert page.context["cl"].paginator.num_pages == 100


def test_an_exact_count_is_shown_while_it_is_small(
    many_jobs: None, operators_client: Client
) -> None:
    page = operators_client.get(f"{LIST}?status__exact=dead_letter")
    assert b"more than" not in page.content
    assert page.context["cl"].result_count == 1_000


def test_a_row_shows_status_in_words_attempts_and_the_start_of_the_error(
    operators_client: Client,
) -> None:
    job = make_job(Status.DEAD_LETTER, last_error="ValueError: no such card\n" + "x" * 1_000)
    page = operators_client.get(LIST).content.decode()
    assert f">{job.pk}</a>" in page
    assert ">dead letter</span>" in page
    assert "5 / 5" in page
    assert "ValueError: no such card</td>" in page


def test_a_handler_may_be_broken_at_its_dots(operators_client: Client) -> None:
    make_job(handler="shop.jobs.send_receipt")
    page = operators_client.get(LIST).content.decode()
    assert page.count("shop.<wbr>jobs.<wbr>send_receipt<wbr>") == 2  # the row and the filter


def test_times_are_local_and_to_the_second(operators_client: Client, settings: Any) -> None:
    make_job(Status.SUCCEEDED, available_at=LONG_AGO, finished_at=LONG_AGO + timedelta(seconds=63))
    settings.TIME_ZONE = "Asia/Tokyo"
    page = operators_client.get(LIST).content.decode()
    assert "2024-01-01 09:00:00</td>" in page
    assert "2024-01-01 09:01:03</td>" in page


def test_an_error_that_a_job_got_over_is_not_in_the_list(operators_client: Client) -> None:
    make_job(Status.SUCCEEDED, last_error="Boom")
    make_job(Status.FAILED, last_error="Crash", attempts=1)
    page = operators_client.get(LIST).content.decode()
    assert "Boom" not in page
    assert "Crash" in page


def test_the_newest_job_comes_first(operators_client: Client) -> None:
    ids = [job.pk for job in make_jobs(3)]
    assert rows_of(operators_client.get(LIST)) == ids[::-1]


@pytest.mark.parametrize("order", ["3", "-4", "6.2", "99", "x", "-"])
def test_no_order_but_the_id_can_be_asked_for(operators_client: Client, order: str) -> None:
    make_jobs(2)
    with captured_sql() as statements:
        operators_client.get(f"{LIST}?o={order}")
    ordered = [query for query in statements() if "error_start" in query]
    assert ordered
    assert all('ORDER BY "processing_jobs"."id" DESC' in query for query in ordered)


def test_filters_offer_what_is_declared_and_what_new_jobs_have(operators_client: Client) -> None:
    Queue.objects.create(name="paused-one", paused=True)
    make_job(queue="ad-hoc", handler="old.release.gone")
    page = operators_client.get(f"{LIST}?queue=typed-by-hand").content.decode()
    for query in (
        "queue=paused-one",
        "queue=ad-hoc",
        "queue=typed-by-hand",
        "handler=old.release.gone",
    ):
        assert query in page


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("status__exact=dead_letter", {"dead"}),
        ("status=dead_letter", {"dead"}),
        ("queue=mail", {"mail"}),
        ("handler=shop.other", {"other"}),
        ("queue=mail&status__exact=dead_letter", set()),
        ("queue=", set()),
        ("handler=nobody", set()),
    ],
)
def test_filters_filter(operators_client: Client, query: str, expected: set[str]) -> None:
    named = {
        make_job(Status.DEAD_LETTER).pk: "dead",
        make_job(queue="mail").pk: "mail",
        make_job(handler="shop.other").pk: "other",
    }
    found = rows_of(operators_client.get(f"{LIST}?{query}"))
    assert {named[pk] for pk in found} == expected


def test_search_finds_an_exact_id_and_an_exact_key_and_nothing_similar(
    operators_client: Client,
) -> None:
    job = make_job(idempotency_key="receipt-7")
    make_job(idempotency_key="receipt-77", handler="7")
    assert rows_of(operators_client.get(f"{LIST}?q={job.pk}")) == [job.pk]
    assert rows_of(operators_client.get(f"{LIST}?q=receipt-7")) == [job.pk]
    assert rows_of(operators_client.get(f"{LIST}?q=+receipt-7+")) == [job.pk]
    assert rows_of(operators_client.get(f"{LIST}?q=receipt")) == []


def test_search_looks_into_two_unique_indexes(many_jobs: None, operators_client: Client) -> None:
    with captured_sql() as statements:
        operators_client.get(f"{LIST}?q=7")
    (search,) = [query for query in statements() if "error_start" in query]
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE processing_jobs")
        cursor.execute(f"EXPLAIN {search}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Seq Scan" not in plan
    assert "processing_jobs_idempotency_key" in plan


@pytest.mark.parametrize(
    "lookup",
    [
        "payload__x__startswith",
        "payload",
        "payload__has_key",
        "result__x",
        "last_error__contains",
        "error_start__startswith",
        "history__traceback__contains",
        "idempotency_key__startswith",
        "lock_token__gt",
        "queue__startswith",
        "handler__regex",
        "status__in",
        "id__gt",
        "no_such_field",
    ],
)
def test_no_lookup_but_the_offered_filters_is_answered(viewers_client: Client, lookup: str) -> None:
    make_job(payload={"x": "secret"})
    assert viewers_client.get(f"{LIST}?{lookup}=s").status_code == 400


@pytest.mark.parametrize(
    "query",
    [
        "q=%00",
        "q=a%00b",
        "q=99999999999999999999999999",
        "q=" + "9" * 5_000,
        "q=-1",
        "q=%C2%B2",
        "q=%EF%BC%97",
        "q='%20OR%201=1",
        "queue=%00",
        "handler=%00",
        "status__exact=%00",
        "status__exact=nonsense",
        "id=%00",
        "id=abc",
        "id=99999999999999999999999999",
        "id=" + "9" * 5_000,
        "id=1&id=abc",
        "p=abc",
        "p=-1",
        "p=999999999999999999999",
        "o=999999999999999999999",
        "all=",
        "e=1",
        "e=1&id=abc",
        "_facets=1",
        "_popup=1",
        "_to_field=payload",
        "%00=1",
        "_changelist_filters=%00",
    ],
)
def test_a_garbled_query_string_is_no_server_error(operators_client: Client, query: str) -> None:
    make_job()
    assert operators_client.get(f"{LIST}?{query}").status_code < 500


def test_what_a_row_holds_is_escaped(operators_client: Client) -> None:
    script = "<script>alert(1)</script>"
    make_job(Status.DEAD_LETTER, handler=script, queue=script, last_error=script)
    for url in (LIST, f"{LIST}?queue={script}&handler={script}"):
        assert script not in operators_client.get(url).content.decode()
