"""The life of a job as data: its statuses, and every move between them.

enqueue → pending ──claim──▶ processing ──complete──▶ succeeded ──prune──▶ gone
             ▲                 │  │  └─fail / lost, attempts left─▶ failed ──claim──▶ processing
             │   release ◀─────┘  └──fail / lost, none left──────▶ dead_letter
             └──────────── requeue_dead_letter (attempts = 0) ◀──────┘
pending, failed, dead_letter ──cancel──▶ cancelled
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class Status(TextChoices):
    """Where a job stands."""

    PENDING = "pending", _("pending")
    PROCESSING = "processing", _("processing")
    FAILED = "failed", _("failed")
    SUCCEEDED = "succeeded", _("succeeded")
    DEAD_LETTER = "dead_letter", _("dead letter")
    CANCELLED = "cancelled", _("cancelled")


@dataclass(frozen=True, slots=True)
class Move:
    """One arrow of the diagram: `targets` has more than one status where the row decides."""

    sources: tuple[Status, ...]
    targets: tuple[Status, ...]


CLAIM = Move((Status.PENDING, Status.FAILED), (Status.PROCESSING,))
COMPLETE = Move((Status.PROCESSING,), (Status.SUCCEEDED,))
FAIL = Move((Status.PROCESSING,), (Status.FAILED, Status.DEAD_LETTER))
RESCUE = Move((Status.PROCESSING,), (Status.FAILED, Status.DEAD_LETTER))
RELEASE = Move((Status.PROCESSING,), (Status.PENDING,))
REQUEUE = Move((Status.DEAD_LETTER,), (Status.PENDING,))
CANCEL = Move((Status.PENDING, Status.FAILED, Status.DEAD_LETTER), (Status.CANCELLED,))

#: Statuses a worker may claim from, once the job is due.
CLAIMABLE = CLAIM.sources
#: Statuses of a job that nothing moves by itself any more. `finished_at` is set exactly here.
FINISHED = (Status.SUCCEEDED, Status.DEAD_LETTER, Status.CANCELLED)
#: Finished, and nobody needs to look: `prune` may delete these.
PRUNABLE = (Status.SUCCEEDED, Status.CANCELLED)
