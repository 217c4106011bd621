"""What a person may do to jobs from here: two acts, each a move of the manager, with its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.db import router, transaction
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_jobqueue import states
from django_jobqueue.models import ProcessingJob
from django_jobqueue.queue import JobQuerySet
from django_jobqueue.states import Status

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

#: In place of a status: the job was deleted …
GONE = ""
#: … or there are too many to tell them apart.
VARIOUS = "various"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A move that people make. The texts with `%(count)s` follow its plural."""

    name: str
    """In its URL, in its permission `<name>_processingjob`."""
    sources: tuple[Status, ...]
    perform: Callable[[JobQuerySet, Collection[int]], list[int]]
    title: StrOrPromise
    question: StrOrPromise
    nothing: StrOrPromise
    confirm: StrOrPromise
    done: StrOrPromise
    skipped: StrOrPromise
    logged: StrOrPromise
    skipped_as: Mapping[str, StrOrPromise] = field(default_factory=dict)
    """In place of `skipped`, by status."""

    @property
    def permission(self) -> str:
        """The permission a person needs for it."""
        return f"{ProcessingJob._meta.app_label}.{self.name}_{ProcessingJob._meta.model_name}"


REQUEUE = Act(
    name="requeue",
    sources=states.REQUEUE.sources,
    perform=JobQuerySet.requeue_many,
    title=_("Requeue dead letters"),
    question=ngettext_lazy(
        "%(count)d dead letter will be pending again: due at once, with all its attempts.",
        "%(count)d dead letters will be pending again: due at once, with all their attempts.",
        "count",
    ),
    nothing=_("None of the selected jobs is a dead letter: there is nothing to requeue."),
    confirm=ngettext_lazy(
        "Yes, requeue %(count)d dead letter", "Yes, requeue %(count)d dead letters", "count"
    ),
    done=ngettext_lazy(
        "%(count)d dead letter requeued.", "%(count)d dead letters requeued.", "count"
    ),
    skipped=_("%(count)s skipped: %(status)s, not a dead letter."),
    logged=_("Requeued."),
)

CANCEL = Act(
    name="cancel",
    sources=states.CANCEL.sources,
    perform=JobQuerySet.cancel_many,
    title=_("Cancel jobs"),
    question=ngettext_lazy(
        "%(count)d job will be cancelled: it will not run, and cannot be requeued.",
        "%(count)d jobs will be cancelled: they will not run, and cannot be requeued.",
        "count",
    ),
    nothing=_("None of the selected jobs is waiting or a dead letter: there is nothing to cancel."),
    confirm=ngettext_lazy("Yes, cancel %(count)d job", "Yes, cancel %(count)d jobs", "count"),
    done=ngettext_lazy("%(count)d job cancelled.", "%(count)d jobs cancelled.", "count"),
    skipped=_("%(count)s skipped: %(status)s, too late to cancel."),
    logged=_("Cancelled."),
    skipped_as={
        Status.CANCELLED: _("%(count)s skipped: already cancelled."),
        VARIOUS: _("%(count)s skipped: processing, succeeded or already cancelled."),
    },
)

ACTS = (REQUEUE, CANCEL)


@dataclass(slots=True, kw_only=True)
class Report:
    """How an act went: what really changed, and where the others stand."""

    done: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def carry_out(act: Act, chunks: Iterable[list[int]], *, user_id: Any) -> Report:
    """Make the move for each chunk of ids in a transaction of its own, with its log entries."""
    report = Report()
    for ids in chunks:
        moved = _carry_out_chunk(act, ids, user_id)
        report.done += len(moved)
        report.skipped += statuses_of(set(ids).difference(moved))
    return report


def statuses_of(ids: Collection[int]) -> Counter[str]:
    """How many of these jobs have which status; `GONE` counts ids without a job."""
    if not ids:
        return Counter()
    counted = Counter(jobs().filter(pk__in=ids).values_list("status", flat=True))
    counted[GONE] = len(ids) - sum(counted.values())
    return +counted


def jobs() -> JobQuerySet:
    """Every job, read where it is written: a replica may be behind what was just done."""
    return JobQuerySet(ProcessingJob, using=router.db_for_write(ProcessingJob))


def _carry_out_chunk(act: Act, ids: list[int], user_id: Any) -> list[int]:
    # A move and its log entries become durable together. Where a router puts the admin's log in
    # another database there are two commits, jobs first: only a crash between them could lose
    # entries of one chunk.
    with (
        transaction.atomic(using=router.db_for_write(LogEntry)),
        transaction.atomic(using=router.db_for_write(ProcessingJob)),
    ):
        moved = act.perform(jobs(), ids)
        if moved:
            _log(act, moved, user_id)
    return moved


def _log(act: Act, ids: list[int], user_id: Any) -> None:
    # One entry for each job, however many: the history of a job must show who did this to it.
    changed = jobs().filter(pk__in=ids).only("pk", "handler").order_by("pk")
    LogEntry.objects.log_actions(user_id, changed, CHANGE, change_message=str(act.logged))
