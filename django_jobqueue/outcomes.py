"""How one attempt ended: what `execute` returns and `settle` records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from django_jobqueue.failure import Failure

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """The handler returned. `result` is JSON, or None for nothing to keep."""

    job: ProcessingJob
    result: Any = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler raised: a retry after `delay` seconds, or a dead letter without attempts left."""

    job: ProcessingJob
    failure: Failure
    delay: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No retry can help: the job becomes a dead letter now, whatever attempts are left."""

    job: ProcessingJob
    failure: Failure
    seconds: float = 0.0


Outcome = Union[Succeeded, Failed, Refused]  # noqa: UP007 - evaluated at run time on Python 3.10
