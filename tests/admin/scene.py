"""People with rights, rows in every status, and the way through the confirmation page."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from typing import Any

from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_jobqueue import Status
from django_jobqueue.models import ProcessingJob
from django_jobqueue.states import FINISHED

LIST = "/admin/django_jobqueue/processingjob/"
REQUEUE = f"{LIST}requeue/"
CANCEL = f"{LIST}cancel/"
LONG_AGO = datetime(2024, 1, 1, tzinfo=timezone.utc)

_numbers = itertools.count(1)


def page_of(job: ProcessingJob) -> str:
    return reverse("admin:django_jobqueue_processingjob_change", args=[job.pk])


def person(*rights: str, **fields: Any) -> User:
    """A member of the staff with exactly these rights on jobs, workers and queues."""
    user = User.objects.create_user(f"person{next(_numbers)}", is_staff=True, **fields)
    found = Permission.objects.filter(
        content_type__app_label="django_jobqueue", codename__in=rights
    )
    assert found.count() == len(rights)
    user.user_permissions.set(found)
    return user


def client_of(user: User | None, **options: Any) -> Client:
    client = Client(**options)
    if user is not None:
        client.force_login(user)
    return client


def make_jobs(
    count: int = 1, status: Status = Status.PENDING, **columns: Any
) -> list[ProcessingJob]:
    """Rows in any status, with columns that the constraints accept."""
    columns = {
        "handler": "shop.send",
        "attempts": 0,
        "max_attempts": 5,
        "created_at": LONG_AGO,
    } | columns
    if status in FINISHED:
        columns.setdefault("finished_at", LONG_AGO)
    if status == Status.DEAD_LETTER:
        columns["attempts"] = columns["max_attempts"]
    if status == Status.PROCESSING:
        columns |= {
            "locked_at": LONG_AGO,
            "locked_by": "worker-1",
            "lock_expires_at": LONG_AGO + timedelta(days=36_500),
            "lock_token": 7,
            "attempts": 1,
        }
    rows = (ProcessingJob(status=status, **columns) for _ in range(count))
    return ProcessingJob._base_manager.bulk_create(rows, batch_size=5_000)


def make_job(status: Status = Status.PENDING, **columns: Any) -> ProcessingJob:
    return make_jobs(1, status, **columns)[0]


def count_of(status: Status) -> int:
    return ProcessingJob.objects.filter(status=status).count()


class Form(HTMLParser):
    """The confirmation form of a page: where it goes and what it carries."""

    def __init__(self, page: Any) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}
        self._inside = False
        self.feed(page.content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form" and given.get("method") == "post" and "action" in given:
            self._inside = not str(given["action"]).endswith("/logout/")
            if self._inside:
                self.action = given["action"]
        if tag == "input" and self._inside and given.get("type") == "hidden":
            self.fields[str(given["name"])] = str(given["value"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._inside = False

    def send(self, client: Client) -> Any:
        assert self.action is not None, "the page has no form to confirm"
        return client.post(self.action, self.fields)


def act_on_list(
    client: Client,
    action: str,
    *,
    ids: list[int] | None = None,
    across: bool = False,
    query: str = "",
) -> Any:
    """Choose an action on the list; what comes back is the confirmation page."""
    data = {"action": action, "select_across": "1" if across else "0", "index": "0"}
    return client.post(f"{LIST}{query}", {**data, "_selected_action": ids or []}, follow=True)


def messages_of(response: Any) -> list[str]:
    return [str(message) for message in get_messages(response.wsgi_request)]


@contextmanager
def captured_sql() -> Iterator[Callable[[], list[str]]]:
    """The statements sent meanwhile."""
    with CaptureQueriesContext(connection) as captured:
        yield lambda: [query["sql"] for query in captured.captured_queries]


def writes(statements: list[str]) -> list[str]:
    """Those that change anything, the session aside."""
    changing = re.compile(r"^\s*(INSERT|UPDATE|DELETE|TRUNCATE|MERGE)\b|FOR UPDATE", re.IGNORECASE)
    return [sql for sql in statements if changing.search(sql) and "django_session" not in sql]
