"""The queue in a second database: not one statement goes to `default`, which does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.projects import environment, project_settings, run_python

ONLY_THE_QUEUE = """
DATABASES = {"default": {}, "queue": DATABASES["default"]}
"""

SCRIPT = """
import django; django.setup()

from django.core.management import call_command
from django_jobqueue.models import ProcessingJob
from tests.app.jobs import add, fail_at_once

jobs = ProcessingJob.objects.using("queue")
jobs.all().delete()
job = jobs.enqueue(add, {"a": 1}, idempotency_key="k")
assert jobs.enqueue(add, {"a": 1}, idempotency_key="k").pk == job.pk
made = jobs.enqueue_many({"handler": add, "payload": {"a": a}} for a in range(3))
claimed = jobs.claim(worker="w", limit=2)
assert len(jobs.extend_locks(claimed)) == 2
jobs.complete(claimed[0], 1)
jobs.release([claimed[1]])
dead = jobs.enqueue(fail_at_once, max_attempts=1)
call_command("runworker", "--burst", "--database", "queue")
assert jobs.status(dead.pk) == "dead_letter"
assert jobs.requeue_dead_letter(dead.pk)._state.db == "queue"
assert jobs.requeue_dead_letters() == 0
assert jobs.cancel(dead.pk)
assert jobs.rescue_stale_locks().failed == 0
assert jobs.prune(older_than=0) == 5
print("ended")
"""


@pytest.mark.django_db(transaction=True)
def test_every_move_and_the_worker_stay_in_the_named_database(
    tmp_path: Path, database_url: str
) -> None:
    settings = project_settings(tmp_path, ONLY_THE_QUEUE)
    env = environment(tmp_path, settings=settings, database_url=database_url)

    ended = run_python("-c", SCRIPT, env=env)

    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.endswith("ended\n"), ended.stdout
