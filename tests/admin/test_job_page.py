"""The page of a job shows all of it, whatever its size, and changes nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from django_jobqueue import Status
from django_jobqueue.models import JobAttempt, ProcessingJob, Queue, Worker
from tests.admin.scene import (
    CANCEL,
    LIST,
    LONG_AGO,
    REQUEUE,
    Form,
    captured_sql,
    client_of,
    make_job,
    page_of,
    person,
    writes,
)

pytestmark = pytest.mark.django_db

SCRIPT = "<script>alert(1)</script>"


def make_attempt(job: ProcessingJob, number: int, **columns: Any) -> JobAttempt:
    columns = {
        "outcome": JobAttempt.Outcome.FAILED,
        "worker": "worker-1",
        "lock_token": number,
    } | columns
    return JobAttempt.objects.create(
        job=job,
        number=number,
        started_at=LONG_AGO,
        ended_at=LONG_AGO + timedelta(minutes=1),
        **columns,
    )


def test_it_shows_payload_result_errors_and_tracebacks(operators_client: Client) -> None:
    job = make_job(
        Status.DEAD_LETTER,
        payload={"order": {"id": 7}},
        result=[1],
        last_error="ValueError: second",
        idempotency_key="receipt-7",
    )
    make_attempt(job, 1, error="ValueError: first", traceback="Traceback …\n  line 1")
    make_attempt(job, 2, outcome=JobAttempt.Outcome.LOST, error="Worker lost: worker-1 …")
    page = operators_client.get(page_of(job)).content.decode()
    assert "{\n    &quot;order&quot;: {\n        &quot;id&quot;: 7\n    }\n}" in page
    for text in (
        "ValueError: first",
        "ValueError: second",
        "Traceback …\n  line 1",
        "receipt-7",
        "5 / 5",
    ):
        assert text in page
    assert '<span class="jobqueue-badge jobqueue-lost">lost</span>' in page
    assert "<details>" in page
    assert page.index("Worker lost") < page.index("ValueError: first")


def test_its_times_are_to_the_second(operators_client: Client) -> None:
    job = make_job(Status.PROCESSING)
    make_attempt(job, 1)
    page = operators_client.get(page_of(job)).content.decode()
    assert page.count("2024-01-01 00:00:00") >= 3  # created, locked, the attempt started
    assert "<td>2024-01-01 00:01:00</td>" in page


def test_what_a_name_alone_does_not_say_is_explained(operators_client: Client) -> None:
    page = operators_client.get(page_of(make_job(Status.FAILED, attempts=1))).content.decode()
    for text in (
        "A failed job waits for its retry.",
        "Equal for failures of one cause.",
        "Rises with every claim.",
    ):
        assert text in page


def test_everything_in_it_is_escaped(operators_client: Client) -> None:
    job = make_job(
        Status.DEAD_LETTER,
        handler=SCRIPT,
        queue=SCRIPT,
        payload={SCRIPT: SCRIPT},
        result=SCRIPT,
        last_error=SCRIPT,
        error_fingerprint=SCRIPT[:16],
        idempotency_key=SCRIPT,
    )
    make_attempt(job, 1, worker=SCRIPT, error=SCRIPT, traceback=SCRIPT)
    page = operators_client.get(page_of(job)).content.decode()
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") >= 9


def test_large_values_stay_in_the_database(operators_client: Client) -> None:
    job = make_job(
        Status.SUCCEEDED,
        payload={"text": "p" * 3_000_000},
        result="r" * 3_000_000,
        last_error="e" * 3_000_000,
    )
    for number in range(1, 61):
        make_attempt(job, number, error="x", traceback="t" * 100_000)
    page = operators_client.get(page_of(job))
    assert len(page.content) < 2_000_000
    assert page.content.count(b"Cut: these are the first 20000 of") == 3
    assert b"Older attempts are not shown." in page.content


def test_a_page_needs_few_queries_however_many_attempts(operators_client: Client) -> None:
    job = make_job(Status.DEAD_LETTER)
    for number in range(1, 31):
        make_attempt(job, number, error="x", traceback="t")
    with captured_sql() as statements:
        operators_client.get(page_of(job))
    assert len(statements()) <= 15


@pytest.mark.parametrize("status", Status)
def test_it_offers_the_acts_that_the_status_allows(
    operators_client: Client, status: Status
) -> None:
    page = operators_client.get(page_of(make_job(status))).content.decode()
    assert (REQUEUE in page) == (status == Status.DEAD_LETTER)
    assert (CANCEL in page) == (status in (Status.PENDING, Status.FAILED, Status.DEAD_LETTER))


@pytest.mark.parametrize(
    ("right", "offered"),
    [
        ("requeue_processingjob", {REQUEUE}),
        ("cancel_processingjob", {CANCEL}),
        (None, set()),
    ],
)
def test_it_offers_the_acts_that_the_person_may_do(
    db: None, right: str | None, offered: set[str]
) -> None:
    client = client_of(person("view_processingjob", *([right] if right else [])))
    page = client.get(page_of(make_job(Status.DEAD_LETTER))).content.decode()
    assert {url for url in (REQUEUE, CANCEL) if url in page} == offered


def test_its_button_requeues_the_job_and_leads_back_to_the_filtered_list(
    operators_client: Client,
) -> None:
    job, other = make_job(Status.DEAD_LETTER), make_job(Status.DEAD_LETTER)
    page = operators_client.get(f"{page_of(job)}?_changelist_filters=queue%3Ddefault%26p%3D3")
    url = next(act["url"] for act in page.context["acts"] if act["url"].startswith(REQUEUE))
    done = Form(operators_client.get(url)).send(operators_client)
    assert done["Location"] == f"{LIST}?queue=default"
    job.refresh_from_db()
    other.refresh_from_db()
    assert (job.status, job.attempts) == (Status.PENDING, 0)
    assert other.status == Status.DEAD_LETTER


def test_no_page_opened_writes_anything(admin_client: Client) -> None:
    job = make_job(Status.PROCESSING, lock_token=7)
    before = ProcessingJob.objects.filter(pk=job.pk).values().get()
    Queue.objects.create(name="mail")
    worker = Worker.objects.create(name="w", host="h", pid=1, version="1", slots=4)
    urls = [
        "/admin/",
        LIST,
        f"{LIST}?status__exact=processing",
        page_of(job),
        f"{page_of(job)[:-7]}history/",
        f"{REQUEUE}?ids={job.pk}",
        CANCEL,
        "/admin/django_jobqueue/queue/",
        "/admin/django_jobqueue/queue/mail/change/",
        "/admin/django_jobqueue/worker/",
        f"/admin/django_jobqueue/worker/{worker.pk}/change/",
    ]
    for url in urls:
        with captured_sql() as statements:
            assert admin_client.get(url).status_code == 200, url
        assert writes(statements()) == []
    assert ProcessingJob.objects.filter(pk=job.pk).values().get() == before


def test_not_even_a_superuser_can_add_change_or_delete_a_job(admin_client: Client) -> None:
    job = make_job(Status.PROCESSING)
    before = ProcessingJob.objects.filter(pk=job.pk).values().get()
    sent = {
        "status": "succeeded",
        "lock_token": "0",
        "handler": "x",
        "_save": "Save",
        "post": "yes",
    }
    assert admin_client.post(f"{LIST}add/", sent).status_code == 403
    assert admin_client.post(page_of(job), sent).status_code == 403
    assert admin_client.post(page_of(job).replace("change", "delete"), sent).status_code == 403
    data = {"action": "delete_selected", "_selected_action": [job.pk], "post": "yes", "index": "0"}
    admin_client.post(LIST, data)
    assert ProcessingJob.objects.filter(pk=job.pk).values().get() == before


@pytest.mark.parametrize("pk", ["0", "abc", "%00", "-1", "1,2", "9" * 30, "9" * 5_000, "_00"])
def test_a_page_of_no_job_is_no_server_error(operators_client: Client, pk: str) -> None:
    assert operators_client.get(f"{LIST}{pk}/change/").status_code in (302, 404)
    assert operators_client.get(f"{LIST}{pk}/history/").status_code in (302, 404)


@pytest.mark.parametrize(
    "result", ["null", "0", '""', "[]", "9" * 9_000, "[" * 5_000 + "]" * 5_000]
)
def test_whatever_json_a_result_is_it_can_be_shown(operators_client: Client, result: str) -> None:
    job = make_job(Status.SUCCEEDED)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE processing_jobs SET result = %s::jsonb", [result])
    assert operators_client.get(page_of(job)).status_code == 200
