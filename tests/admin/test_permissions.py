"""Who may do what: each person × each page × each way to ask. A forged request changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_jobqueue import Status
from tests.admin.scene import (
    CANCEL,
    LIST,
    REQUEUE,
    client_of,
    count_of,
    make_jobs,
    page_of,
    person,
)

pytestmark = pytest.mark.django_db

VIEW, MAY_REQUEUE, MAY_CANCEL = (
    "view_processingjob",
    "requeue_processingjob",
    "cancel_processingjob",
)


class Case(NamedTuple):
    """What a person's requests are answered with, and which acts they may do."""

    who: str
    rights: tuple[str, ...]
    views: bool
    acts: tuple[str, ...]


CASES = [
    Case("anonymous", (), views=False, acts=()),
    Case("not staff", (), views=False, acts=()),
    Case("staff", (), views=False, acts=()),
    Case("viewer", (VIEW,), views=True, acts=()),
    Case("requeue without view", (MAY_REQUEUE,), views=False, acts=()),
    Case("requeuer", (VIEW, MAY_REQUEUE), views=True, acts=("requeue",)),
    Case("canceller", (VIEW, MAY_CANCEL), views=True, acts=("cancel",)),
    Case("superuser", (), views=True, acts=("requeue", "cancel")),
]

by_person = pytest.mark.parametrize("case", CASES, ids=[case.who for case in CASES])
by_act = pytest.mark.parametrize(
    ("act", "url"), [("requeue", REQUEUE), ("cancel", CANCEL)], ids=["requeue", "cancel"]
)


def client_for(case: Case, *, enforce_csrf_checks: bool = False) -> Client:
    user: User | None
    if case.who == "anonymous":
        user = None
    elif case.who == "superuser":
        user = User.objects.create_superuser("root")
    else:
        user = person(*case.rights)
        user.is_staff = case.who != "not staff"
        user.save()
    return client_of(user, enforce_csrf_checks=enforce_csrf_checks)


def refusal(case: Case) -> int:
    return 302 if case.who in ("anonymous", "not staff") else 403


@by_person
def test_pages_are_for_those_who_may_view(case: Case) -> None:
    client = client_for(case)
    (job,) = make_jobs(1, Status.DEAD_LETTER)
    for url in (LIST, page_of(job), f"{LIST}{job.pk}/history/"):
        assert client.get(url).status_code == (200 if case.views else refusal(case)), url


@by_act
@by_person
def test_the_confirmation_page_is_for_those_who_may_act(case: Case, act: str, url: str) -> None:
    client = client_for(case)
    (job,) = make_jobs(1, Status.DEAD_LETTER)
    for asked in (url, f"{url}?ids={job.pk}", f"{url}?queue=default"):
        expected = 200 if act in case.acts else refusal(case)
        assert client.get(asked).status_code == expected, asked
    assert count_of(Status.DEAD_LETTER) == 1


@by_act
@by_person
def test_a_hand_made_post_acts_only_for_those_who_may(case: Case, act: str, url: str) -> None:
    client = client_for(case)
    (job,) = make_jobs(1, Status.DEAD_LETTER)
    answer = client.post(url, {"ids": str(job.pk)})
    assert answer.status_code == (302 if act in case.acts else refusal(case))
    assert count_of(Status.DEAD_LETTER) == (0 if act in case.acts else 1)


@by_act
@by_person
def test_a_hand_made_post_with_a_pin_acts_only_for_those_who_may(
    case: Case, act: str, url: str
) -> None:
    client = client_for(case)
    make_jobs(1, Status.DEAD_LETTER)
    pin = {"instant": "2100-01-01T00:00:00+00:00", "max_id": str(2**62), "count": "1"}
    client.post(url, pin)
    assert count_of(Status.DEAD_LETTER) == (0 if act in case.acts else 1)


@by_act
@by_person
def test_the_action_on_the_list_is_refused_to_others(case: Case, act: str, url: str) -> None:
    client = client_for(case)
    (job,) = make_jobs(1, Status.DEAD_LETTER)
    sent = {"action": act, "_selected_action": [job.pk], "index": "0", "post": "yes"}
    answer = client.post(LIST, sent)
    if act in case.acts:
        assert answer["Location"].startswith(url)
    else:
        assert answer.status_code == refusal(case)
    assert count_of(Status.DEAD_LETTER) == 1


@by_act
@by_person
def test_without_a_csrf_token_nothing_happens(case: Case, act: str, url: str) -> None:
    client = client_for(case, enforce_csrf_checks=True)
    (job,) = make_jobs(1, Status.DEAD_LETTER)
    assert client.post(url, {"ids": str(job.pk)}).status_code in (302, 403)
    sent = {"action": act, "_selected_action": [job.pk], "index": "0"}
    assert client.post(LIST, sent).status_code in (302, 403)
    assert count_of(Status.DEAD_LETTER) == 1


def test_with_its_csrf_token_the_form_works(db: None) -> None:
    client = client_for(CASES[-1], enforce_csrf_checks=True)
    (job,) = make_jobs(1, Status.DEAD_LETTER)
    page = client.get(f"{REQUEUE}?ids={job.pk}")
    token = page.context["csrf_token"]
    client.post(REQUEUE, {"ids": str(job.pk), "csrfmiddlewaretoken": str(token)})
    assert count_of(Status.PENDING) == 1
