"""An act changes what its page showed and what is still so: no more, and it says what was skipped.

The races are stepped: the page is opened, somebody else changes rows, the form is sent.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test import Client

from django_jobqueue import Status
from django_jobqueue.admin.selection import MOST_IDS
from django_jobqueue.models import ProcessingJob
from tests.admin.scene import (
    CANCEL,
    LIST,
    REQUEUE,
    Form,
    act_on_list,
    captured_sql,
    client_of,
    count_of,
    make_job,
    make_jobs,
    messages_of,
    person,
    writes,
)
from tests.rows import sql

pytestmark = pytest.mark.django_db


def make_many_dead_letters(count: int, queue: str) -> None:
    sql(
        """
        INSERT INTO processing_jobs
            (handler, queue, status, attempts, finished_at, created_at, last_error)
        SELECT 'shop.send', %s, 'dead_letter', 5, now() - interval '1 hour',
               now() - interval '1 day', 'Boom'
        FROM generate_series(1, %s)
        """,
        queue,
        count,
    )


def ids_of(jobs: list[ProcessingJob]) -> list[int]:
    return [job.pk for job in jobs]


def logged_ids() -> set[int]:
    return {int(str(entry.object_id)) for entry in LogEntry.objects.all()}


def test_ticked_dead_letters_are_requeued_after_a_page_that_shows_them(
    operator: User, operators_client: Client
) -> None:
    dead, untouched = make_jobs(3, Status.DEAD_LETTER), make_job(Status.DEAD_LETTER)
    page = act_on_list(operators_client, "requeue", ids=ids_of(dead))
    assert page.request["PATH_INFO"] == REQUEUE
    assert b"3 dead letters will be pending again" in page.content
    assert count_of(Status.PENDING) == 0

    done = Form(page).send(operators_client)

    assert messages_of(done) == ["3 dead letters requeued."]
    rows = ProcessingJob.objects.filter(pk__in=ids_of(dead)).values_list("status", "attempts")
    assert set(rows) == {(Status.PENDING, 0)}
    untouched.refresh_from_db()
    assert untouched.status == Status.DEAD_LETTER
    assert logged_ids() == set(ids_of(dead))
    assert {entry.user for entry in LogEntry.objects.all()} == {operator}


def test_ticked_jobs_are_cancelled(operators_client: Client) -> None:
    waiting = [make_job(), make_job(Status.FAILED, attempts=1), make_job(Status.DEAD_LETTER)]
    running, done = make_job(Status.PROCESSING), make_job(Status.SUCCEEDED)
    page = act_on_list(operators_client, "cancel", ids=ids_of([*waiting, running, done]))
    assert page.request["PATH_INFO"] == CANCEL
    assert b"3 jobs will be cancelled" in page.content
    assert b"1 skipped: processing, too late to cancel." in page.content
    assert b"1 skipped: succeeded, too late to cancel." in page.content
    assert sorted(messages_of(Form(page).send(operators_client))) == [
        "1 skipped: processing, too late to cancel.",
        "1 skipped: succeeded, too late to cancel.",
        "3 jobs cancelled.",
    ]
    assert count_of(Status.CANCELLED) == 3
    assert logged_ids() == set(ids_of(waiting))


@pytest.mark.parametrize("across", [False, True])
def test_of_500_selected_the_fine_ones_are_requeued_and_every_other_has_a_reason(
    operators_client: Client, across: bool
) -> None:
    jobs = make_jobs(500, Status.DEAD_LETTER)
    ids = ids_of(jobs)
    page = act_on_list(operators_client, "requeue", ids=ids, across=across)
    assert b"500 dead letters will be pending again" in page.content
    ProcessingJob.objects.filter(pk__in=ids[:2]).delete()
    ProcessingJob.objects.requeue_many(ids[2:7])
    ProcessingJob.objects.cancel_many(ids[7:10])

    done = Form(page).send(operators_client)

    assert done.status_code == 302
    assert sorted(messages_of(done)) == [
        "2 skipped: deleted meanwhile.",
        "3 skipped: cancelled, not a dead letter.",
        "490 dead letters requeued.",
        "5 skipped: pending, not a dead letter.",
    ]
    assert logged_ids() == set(ids[10:])


def test_all_25_000_of_a_filter_are_requeued_and_nothing_that_died_meanwhile(
    operators_client: Client,
) -> None:
    make_many_dead_letters(25_000, "mail")
    make_many_dead_letters(100, "reports")
    waiting = make_jobs(10, queue="mail")
    query = "?queue=mail&status__exact=dead_letter"
    ticked = list(ProcessingJob.objects.filter(queue="mail").values_list("pk", flat=True)[:100])
    page = act_on_list(operators_client, "requeue", ids=ticked, across=True, query=query)
    assert b"25000 dead letters will be pending again" in page.content
    assert len(page.content) < 50_000

    # Ten jobs that waited when the page was made die, and so do ten new ones.
    ProcessingJob.objects.filter(pk__in=ids_of(waiting)).update(
        status=Status.DEAD_LETTER, attempts=F("max_attempts"), finished_at=Now()
    )
    make_jobs(10, Status.DEAD_LETTER, queue="mail")
    with captured_sql() as statements:
        done = Form(page).send(operators_client)

    assert done["Location"] == f"{LIST}{query}"
    assert messages_of(done) == ["25000 dead letters requeued."]
    dead = ProcessingJob.objects.filter(status=Status.DEAD_LETTER)
    assert dead.filter(queue="mail").count() == 20
    assert dead.filter(queue="reports").count() == 100
    assert count_of(Status.PENDING) == LogEntry.objects.count() == 25_000
    updates = [statement for statement in statements() if statement.startswith("UPDATE")]
    assert len([statement for statement in updates if "processing_jobs" in statement]) == 25
    assert max(len(statement) for statement in updates) < 30_000


@pytest.mark.django_db(transaction=True)
def test_every_thousand_commits_by_itself(
    operators_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_many_dead_letters(2_500, "mail")
    page = Form(operators_client.get(REQUEUE))
    committed = []
    atomic_exit = transaction.Atomic.__exit__

    def counting_exit(self: Any, *error: Any) -> None:
        atomic_exit(self, *error)
        if not transaction.get_connection().in_atomic_block:
            committed.append(count_of(Status.PENDING))

    monkeypatch.setattr(transaction.Atomic, "__exit__", counting_exit)
    page.send(operators_client)
    assert [n for n in dict.fromkeys(committed) if n] == [1_000, 2_000, 2_500]


def test_what_changed_behind_the_filters_is_counted_as_skipped(operators_client: Client) -> None:
    make_many_dead_letters(MOST_IDS + 500, "mail")
    page = act_on_list(
        operators_client, "requeue", ids=[1], across=True, query="?status__exact=dead_letter"
    )
    for pk in ProcessingJob.objects.values_list("pk", flat=True)[:7]:
        ProcessingJob.objects.cancel(pk)
    assert sorted(messages_of(Form(page).send(operators_client))) == [
        f"{MOST_IDS + 493} dead letters requeued.",
        "7 skipped: changed or deleted since the page was shown.",
    ]


@pytest.mark.parametrize("count", [5, MOST_IDS + 5])
def test_what_was_enqueued_meanwhile_is_not_cancelled(operators_client: Client, count: int) -> None:
    make_jobs(count)
    page = act_on_list(operators_client, "cancel", ids=[1], across=True)
    new = make_jobs(3, created_at=Now())
    assert messages_of(Form(page).send(operators_client)) == [f"{count} jobs cancelled."]
    assert set(ids_of(new)) == set(
        ProcessingJob.objects.filter(status=Status.PENDING).values_list("pk", flat=True)
    )


def test_select_all_without_a_tick_means_all(operators_client: Client) -> None:
    make_jobs(3, Status.DEAD_LETTER)
    page = act_on_list(operators_client, "requeue", across=True)
    assert messages_of(Form(page).send(operators_client)) == ["3 dead letters requeued."]


def test_nothing_selected_does_nothing(operators_client: Client) -> None:
    make_jobs(3, Status.DEAD_LETTER)
    page = act_on_list(operators_client, "requeue")
    assert page.request["PATH_INFO"] == LIST
    page = operators_client.get(f"{REQUEUE}?ids=")
    assert Form(page).action is None
    operators_client.post(REQUEUE, {"ids": ""})
    operators_client.post(REQUEUE)
    assert count_of(Status.DEAD_LETTER) == 3


def test_filters_and_search_are_kept_through_the_page(operators_client: Client) -> None:
    job = make_job(Status.DEAD_LETTER, queue="mail & more", idempotency_key="a=b&c")
    make_job(Status.DEAD_LETTER, queue="mail & more")
    query = "?queue=mail+%26+more&q=a%3Db%26c"
    page = act_on_list(operators_client, "requeue", ids=[job.pk], across=True, query=query)
    assert b"1 dead letter will be pending again" in page.content
    done = Form(page).send(operators_client)
    assert done["Location"] == f"{LIST}{query}"
    assert operators_client.get(done["Location"]).status_code == 200
    assert logged_ids() == {job.pk}


def test_the_page_names_the_first_jobs_and_counts_the_others(operators_client: Client) -> None:
    make_jobs(30, Status.DEAD_LETTER, handler="<script>alert(1)</script>")
    make_jobs(4, Status.SUCCEEDED)
    page = operators_client.get(REQUEUE).content.decode()
    assert page.count("&lt;script&gt;alert(1)") == 20
    assert "<script>alert" not in page
    assert "… and 10 more." in page
    assert "4 skipped: succeeded, not a dead letter." in page


def test_the_page_shows_the_start_of_each_error(operators_client: Client) -> None:
    job = make_job(Status.DEAD_LETTER, last_error="ValueError: <no card>\n" + "x" * 1_000)
    for url in (f"{REQUEUE}?ids={job.pk}", f"{CANCEL}?queue=default"):
        page = operators_client.get(url).content.decode()
        assert "ValueError: &lt;no card&gt;</td>" in page
        assert "xxx" not in page


def test_what_is_cancelled_is_not_called_too_late_to_cancel(operators_client: Client) -> None:
    jobs = [make_job(), make_job(Status.CANCELLED)]
    page = act_on_list(operators_client, "cancel", ids=ids_of(jobs))
    assert b"1 skipped: already cancelled." in page.content
    assert "1 skipped: already cancelled." in messages_of(Form(page).send(operators_client))


def test_a_page_with_nothing_to_do_has_no_form(operators_client: Client) -> None:
    job = make_job(Status.SUCCEEDED)
    page = operators_client.get(f"{REQUEUE}?ids={job.pk},999999")
    assert b"there is nothing to requeue" in page.content
    assert b"1 skipped: succeeded, not a dead letter." in page.content
    assert b"1 skipped: deleted meanwhile." in page.content
    assert Form(page).action is None


def test_requeueing_does_not_touch_the_lock_token(operators_client: Client) -> None:
    job = make_job(Status.DEAD_LETTER, lock_token=41)
    Form(operators_client.get(f"{REQUEUE}?ids={job.pk}")).send(operators_client)
    job.refresh_from_db()
    assert job.lock_token == 41


def test_the_history_of_a_job_shows_who_requeued_it(
    operator: User, operators_client: Client
) -> None:
    job = make_job(Status.DEAD_LETTER)
    Form(operators_client.get(f"{REQUEUE}?ids={job.pk}")).send(operators_client)
    history = operators_client.get(f"{LIST}{job.pk}/history/").content.decode()
    assert "Requeued." in history
    assert operator.username in history


def test_a_job_that_is_not_moved_has_no_log_entry(operators_client: Client) -> None:
    job = make_job(Status.PENDING)
    done = operators_client.post(REQUEUE, {"ids": str(job.pk)})
    assert messages_of(done) == [
        "0 dead letters requeued.",
        "1 skipped: pending, not a dead letter.",
    ]
    assert logged_ids() == set()


def test_a_move_without_its_log_entry_is_undone(
    operators_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(Status.DEAD_LETTER)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the log is full")

    monkeypatch.setattr(type(LogEntry.objects), "log_actions", refuse)
    with pytest.raises(RuntimeError):
        operators_client.post(REQUEUE, {"ids": str(job.pk)})
    job.refresh_from_db()
    assert job.status == Status.DEAD_LETTER


GARBAGE = [
    "x",
    "-1",
    "1;2",
    "1,,2",
    "\x00",
    "9" * 30,
    "9" * 5_000,
    "\uff17",
    ",".join(map(str, range(MOST_IDS + 1))),
]


@pytest.mark.parametrize("ids", GARBAGE)
def test_ids_that_are_none_change_nothing(operators_client: Client, ids: str) -> None:
    make_jobs(3, Status.DEAD_LETTER)
    answers = [
        operators_client.get(REQUEUE, {"ids": ids}),
        operators_client.post(REQUEUE, {"ids": ids}),
        act_on_list(operators_client, "requeue", ids=[ids]),  # type: ignore[list-item]
    ]
    assert all(answer.status_code in (200, 302, 400) for answer in answers)
    assert count_of(Status.DEAD_LETTER) == 3


@pytest.mark.parametrize("action", ["requeue", "cancel"])
@pytest.mark.parametrize("ticks", [[""], ["", ""], ["1", ""], ["1,2"], [" 1"]])
def test_ticks_that_are_no_ids_are_refused(
    operators_client: Client, action: str, ticks: list[str]
) -> None:
    make_jobs(3, Status.DEAD_LETTER)
    answer = act_on_list(operators_client, action, ids=ticks)  # type: ignore[arg-type]
    assert answer.status_code == 200
    assert b"The selection could not be read. Nothing was changed." in answer.content
    assert count_of(Status.DEAD_LETTER) == 3


PIN = {"instant": "2100-01-01T00:00:00+00:00", "max_id": "9000000000000000000", "count": "3"}


@pytest.mark.parametrize(
    "tampered",
    [
        *({**PIN, name: value} for name in PIN for value in ("", "x", "\x00", "-1", "9" * 5_000)),
        {**PIN, "instant": "2026-01-01T00:00:00"},
        {**PIN, "instant": "2026-13-99T00:00:00+00:00"},
        {**PIN, "instant": "0001-01-01T00:00:00+14:00"},
        {"instant": PIN["instant"]},
        {"max_id": PIN["max_id"]},
    ],
)
def test_a_tampered_pin_changes_nothing(operators_client: Client, tampered: dict[str, str]) -> None:
    make_jobs(3, Status.DEAD_LETTER)
    assert operators_client.post(REQUEUE, tampered).status_code == 302
    assert count_of(Status.DEAD_LETTER) == 3


@pytest.mark.parametrize(
    "query", ["q=%00", "queue=%00", "id=abc", "p=99", "p=x", "e=1", "payload__x=1", "nonsense=1"]
)
@pytest.mark.parametrize("url", [REQUEUE, CANCEL])
def test_garbled_filters_never_widen_the_selection(
    operators_client: Client, url: str, query: str
) -> None:
    make_jobs(3, Status.DEAD_LETTER, queue="mail")
    queue = "&queue=elsewhere"
    assert operators_client.get(f"{url}?{query}{queue}").status_code < 500
    assert operators_client.post(f"{url}?{query}{queue}", PIN).status_code < 500
    assert count_of(Status.DEAD_LETTER) == 3


def test_ids_of_another_model_change_nothing_of_it(
    operators_client: Client, operator: User
) -> None:
    done = operators_client.post(REQUEUE, {"ids": f"{operator.pk + 10_000_000}"})
    assert messages_of(done)[1:] == ["1 skipped: deleted meanwhile."]


def test_asking_writes_nothing(operators_client: Client) -> None:
    jobs = make_jobs(3, Status.DEAD_LETTER)
    with captured_sql() as statements:
        act_on_list(operators_client, "requeue", ids=ids_of(jobs))
        act_on_list(operators_client, "cancel", across=True)
        operators_client.head(REQUEUE)
        operators_client.put(f"{REQUEUE}?ids={jobs[0].pk}")
    assert writes(statements()) == []


def test_the_pages_break_no_strict_content_security_policy(operators_client: Client) -> None:
    job = make_job(Status.DEAD_LETTER)
    for url in (LIST, f"{LIST}{job.pk}/change/", REQUEUE):
        page = operators_client.get(url).content.decode()
        assert "style=" not in page.replace("<style", "")
        assert "<style" not in page
        assert "<script>" not in page
        assert " onclick=" not in page


def test_a_right_that_ended_while_the_page_was_open_is_refused(
    operators_client: Client, operator: User
) -> None:
    job = make_job(Status.DEAD_LETTER)
    page = Form(operators_client.get(f"{REQUEUE}?ids={job.pk}"))
    operator.user_permissions.remove(
        *operator.user_permissions.filter(codename="requeue_processingjob")
    )
    assert page.send(operators_client).status_code == 403
    job.refresh_from_db()
    assert job.status == Status.DEAD_LETTER


def test_the_list_offers_only_acts_that_the_person_may_do(db: None) -> None:
    make_job(Status.DEAD_LETTER)
    for rights, offered in (
        ((), set()),
        (("requeue_processingjob",), {"requeue"}),
        (("cancel_processingjob",), {"cancel"}),
    ):
        page = client_of(person("view_processingjob", *rights)).get(LIST).content.decode()
        assert {
            name for name in ("requeue", "cancel") if f'<option value="{name}">' in page
        } == offered
        assert "delete_selected" not in page
