"""Workers can be looked at; a queue can be paused by those who may change queues."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.test import Client

from django_jobqueue.models import Queue, Worker
from tests.admin.scene import client_of, make_jobs, person

pytestmark = pytest.mark.django_db

WORKERS = "/admin/django_jobqueue/worker/"
QUEUES = "/admin/django_jobqueue/queue/"


def make_worker(name: str, **columns: Any) -> Worker:
    return Worker.objects.create(name=name, host="box", pid=4711, version="0.1", slots=8, **columns)


def test_the_workers_show_what_they_serve_and_their_last_sign() -> None:
    make_worker("fresh", queues=["mail", "reports"], busy_slots=3)
    make_worker("old", heartbeat_at=Now() - timedelta(minutes=10))
    page = client_of(person("view_worker")).get(WORKERS).content.decode()
    for text in ("mail, reports", "3 / 8", "every queue", "s ago: lost?", "s ago<"):
        assert text in page


def test_a_worker_without_a_free_slot_shows_since_when_and_which_slots_hang() -> None:
    make_worker("full", busy_slots=8, hung_slots=2, full_since=Now() - timedelta(minutes=3))
    page = client_of(person("view_worker")).get(WORKERS).content.decode()
    assert "8 / 8, hanging: 2, no free slot for 18" in page


def test_workers_are_only_looked_at() -> None:
    worker = make_worker("fresh")
    client = client_of(person("view_worker"))
    url = f"{WORKERS}{worker.pk}/change/"
    assert client.get(url).status_code == 200
    assert client.post(url, {"name": "other"}).status_code == 403
    assert client.get(f"{WORKERS}add/").status_code == 403
    assert client.post(f"{WORKERS}{worker.pk}/delete/", {"post": "yes"}).status_code == 403


@pytest.mark.parametrize("url", [WORKERS, QUEUES])
def test_both_need_their_own_right(url: str) -> None:
    assert client_of(person("view_processingjob")).get(url).status_code == 403


def test_who_may_change_queues_can_pause_one_and_let_it_run_again() -> None:
    client = client_of(person("view_queue", "change_queue"))
    client.post(f"{QUEUES}add/", {"name": "mail", "paused": "on"})
    assert Queue.objects.get().paused
    client.post(f"{QUEUES}mail/change/", {"name": "other"})
    assert list(Queue.objects.values_list("name", "paused")) == [("mail", False)]


def test_the_list_of_queues_says_in_words_which_are_paused() -> None:
    Queue.objects.create(name="mail", paused=True)
    Queue.objects.create(name="reports")
    page = client_of(person("view_queue")).get(QUEUES).content.decode()
    assert ">paused</span>" in page
    assert ">running</span>" in page
    assert "django_jobqueue/admin.css" in page


def test_who_adds_a_queue_is_told_which_names_there_are() -> None:
    make_jobs(1, queue="<b>mail")
    page = client_of(person("view_queue", "change_queue")).get(f"{QUEUES}add/").content.decode()
    assert "To pause a queue" in page
    assert "&lt;b&gt;mail" in page
    assert "<b>mail" not in page


def test_who_may_only_view_queues_changes_nothing() -> None:
    Queue.objects.create(name="mail", paused=True)
    client = client_of(person("view_queue"))
    assert client.get(f"{QUEUES}mail/change/").status_code == 200
    assert client.post(f"{QUEUES}mail/change/", {"paused": ""}).status_code == 403
    assert client.post(f"{QUEUES}add/", {"name": "x"}).status_code == 403
    assert Queue.objects.get().paused


def test_nobody_deletes_a_queue(admin_client: Client) -> None:
    Queue.objects.create(name="mail")
    assert admin_client.post(f"{QUEUES}mail/delete/", {"post": "yes"}).status_code == 403
