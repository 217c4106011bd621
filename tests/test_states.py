"""The diagram as data, held against what the statements really do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_jobqueue import LockLost, NotDeadLetter, Status, states
from django_jobqueue.models import ProcessingJob
from tests.app.jobs import noop
from tests.rows import WORKER_A, make_stale

pytestmark = pytest.mark.django_db

jobs = ProcessingJob.objects


def in_status(status: Status) -> ProcessingJob:
    """A job that came to this status by the moves, as the worker that claimed it has it."""
    noop.using(max_attempts=1 if status == Status.DEAD_LETTER else 5).enqueue()
    if status == Status.PENDING:
        return ProcessingJob.objects.get()
    job = jobs.dequeue(worker=WORKER_A)
    if status == Status.SUCCEEDED:
        jobs.complete(job)
    elif status in (Status.FAILED, Status.DEAD_LETTER):
        jobs.fail(job, "broken")
    elif status == Status.CANCELLED:
        jobs.release([job])
        jobs.cancel(job.pk)
    assert jobs.status(job.pk) == status
    return job


def claim(job: ProcessingJob) -> None:
    ProcessingJob.objects.filter(pk=job.pk).update(available_at=job.created_at)
    jobs.claim(worker=WORKER_A, limit=1)


def rescue(job: ProcessingJob) -> None:
    if jobs.status(job.pk) == Status.PROCESSING:
        make_stale(job)
    jobs.rescue_stale_locks()


MOVES: dict[str, tuple[states.Move, Callable[[ProcessingJob], Any]]] = {
    "claim": (states.CLAIM, claim),
    "complete": (states.COMPLETE, lambda job: jobs.complete(job)),
    "fail": (states.FAIL, lambda job: jobs.fail(job, "broken")),
    "rescue": (states.RESCUE, rescue),
    "release": (states.RELEASE, lambda job: jobs.release([job])),
    "requeue": (states.REQUEUE, lambda job: jobs.requeue_dead_letter(job.pk)),
    "cancel": (states.CANCEL, lambda job: jobs.cancel(job.pk)),
}


def test_every_move_of_the_diagram_is_tried() -> None:
    declared = [move for move in vars(states).values() if isinstance(move, states.Move)]

    assert [move for move, _act in MOVES.values()] == declared


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("name", MOVES)
def test_a_move_leaves_its_sources_for_its_targets_and_every_other_status_alone(
    name: str, status: Status
) -> None:
    move, act = MOVES[name]
    job = in_status(status)

    try:
        act(job)
    except (LockLost, NotDeadLetter):
        assert status not in move.sources

    allowed = move.targets if status in move.sources else (status,)
    assert jobs.status(job.pk) in allowed
