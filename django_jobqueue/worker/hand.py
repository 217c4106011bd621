"""The claims a worker holds."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING

from django_jobqueue.execution import JobContext

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob


class Hand:
    """What is claimed and not settled. The coordinator takes and lets go, the heartbeat reads."""

    def __init__(self) -> None:
        self._claims: dict[tuple[int, int], JobContext] = {}
        self._guard = Lock()  # guards _claims between the coordinator and the heartbeat

    def __len__(self) -> int:
        return len(self._claims)

    def holds(self, job: ProcessingJob) -> bool:
        """Whether this very claim of the job is held."""
        return claim_key(job) in self._claims

    def take(self, contexts: Iterable[JobContext]) -> None:
        """These claims are held from now on. An older claim of the same job has lost its lock."""
        with self._guard:
            for context in contexts:
                for (pk, token), older in self._claims.items():
                    if pk == context.claim.pk and token < context.claim.lock_token:
                        older.lose_lock()
                self._claims[claim_key(context.claim)] = context

    def let_go(self, jobs: Iterable[ProcessingJob]) -> list[JobContext]:
        """These claims are held no more. Returns those that were."""
        with self._guard:
            gone = [self._claims.pop(claim_key(job), None) for job in jobs]
        return [context for context in gone if context is not None]

    def held(self) -> list[JobContext]:
        """Everything held at this moment."""
        with self._guard:
            return list(self._claims.values())


def claim_key(job: ProcessingJob) -> tuple[int, int]:
    """What tells this claim from every other, of the same job too."""
    return job.pk, job.lock_token
