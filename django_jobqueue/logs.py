"""Log lines: receivers of the signals, on the logger `django_jobqueue`.

No line holds a payload or a result. Every line about a job starts with `Job <id> <handler>`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django_jobqueue import signals
from django_jobqueue.failure import described

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob

logger = logging.getLogger("django_jobqueue")

_FIRST_LINE = 300


def connect() -> None:
    """Called once, when the app is ready."""
    for signal, receiver in _RECEIVERS:
        signal.connect(receiver, dispatch_uid=f"django_jobqueue.logs.{receiver.__name__}")


def _name(job: ProcessingJob) -> str:
    return f"Job {job.pk} {job.handler}"


def _first_line(text: str) -> str:
    line = (text.splitlines() or [""])[0]
    return line if len(line) <= _FIRST_LINE else f"{line[:_FIRST_LINE]}…"


def job_started(*, job: ProcessingJob, **_kwargs: Any) -> None:
    logger.debug("%s started, attempt %d of %d.", _name(job), job.attempts, job.max_attempts)


def job_succeeded(*, job: ProcessingJob, outcome: Any, **_kwargs: Any) -> None:
    logger.debug("%s succeeded in %.3f s.", _name(job), outcome.seconds)


def job_failed(*, job: ProcessingJob, outcome: Any, **_kwargs: Any) -> None:
    logger.warning(
        "%s failed on attempt %d of %d, retry in %.10g s: %s",
        _name(job),
        job.attempts,
        job.max_attempts,
        outcome.delay,
        _first_line(job.last_error),
    )
    _log_traceback(job, outcome)


def job_dead_lettered(*, job: ProcessingJob, outcome: Any, **_kwargs: Any) -> None:
    logger.error(
        "%s is a dead letter after attempt %d of %d: %s",
        _name(job),
        job.attempts,
        job.max_attempts,
        _first_line(job.last_error),
    )
    if outcome is not None:
        _log_traceback(job, outcome)


def _log_traceback(job: ProcessingJob, outcome: Any) -> None:
    if outcome.failure.traceback:
        logger.debug("%s, attempt %d:\n%s", _name(job), job.attempts, outcome.failure.traceback)


def job_lost(*, job: ProcessingJob, worker: str, since: datetime, **_kwargs: Any) -> None:
    logger.warning(
        "%s was lost by worker %s, which had it since %s: taken back after attempt %d of %d.",
        _name(job),
        worker,
        since.isoformat(timespec="seconds"),
        job.attempts,
        job.max_attempts,
    )


def job_released(*, job: ProcessingJob, **_kwargs: Any) -> None:
    logger.info("%s was given back unfinished, no attempt spent.", _name(job))


def job_lock_lost(*, job: ProcessingJob, **_kwargs: Any) -> None:
    logger.warning(
        "%s: this worker lost its lock, so nothing of attempt %d was recorded.",
        _name(job),
        job.attempts,
    )


def backoff_broken(*, name: str, error: BaseException, **_kwargs: Any) -> None:
    reason = _first_line(described(error).error)
    logger.error("The backoff of %s failed, the default was used: %s", name, reason)


def jobs_requeued(*, ids: Collection[int], **_kwargs: Any) -> None:
    logger.info("%d dead letters requeued.", len(ids))


def jobs_cancelled(*, ids: Collection[int], **_kwargs: Any) -> None:
    logger.info("%d jobs cancelled.", len(ids))


def worker_started(*, options: Any, handlers: Collection[str], **_kwargs: Any) -> None:
    logger.info("Worker %s started: %s.", options.name, options.described())
    if not handlers:
        logger.warning(
            "No handler is registered, so no job can run."
            " Handlers are functions with @handler in <app>/jobs.py or <app>/tasks.py."
        )
    else:
        logger.info("Handlers: %s.", ", ".join(handlers))


def worker_stopping(*, running: int, reason: str, **_kwargs: Any) -> None:
    logger.info("Stopping (%s): %d running jobs may finish.", reason, running)


def worker_stopped(*, summary: Any, **_kwargs: Any) -> None:
    logger.info("Worker stopped: %s.", summary.described())


def worker_outage(*, error: BaseException, wait: float, **_kwargs: Any) -> None:
    logger.error(
        "The database does not answer, next try in %.1f s: %s",
        wait,
        _first_line(str(error)),
    )


def worker_step_failed(*, error: BaseException, **_kwargs: Any) -> None:
    logger.error("A step of the worker failed: %s", _first_line(described(error).error))


def worker_recovered(**_kwargs: Any) -> None:
    logger.info("The database answers again.")


def handlers_unknown(*, waiting: Mapping[str, int], **_kwargs: Any) -> None:
    for handler, count in waiting.items():
        logger.warning(
            "%d due jobs wait for the handler %r, which this worker does not know.", count, handler
        )


_RECEIVERS = (
    (signals.job_started, job_started),
    (signals.job_succeeded, job_succeeded),
    (signals.job_failed, job_failed),
    (signals.job_dead_lettered, job_dead_lettered),
    (signals.job_lost, job_lost),
    (signals.job_released, job_released),
    (signals.job_lock_lost, job_lock_lost),
    (signals.backoff_broken, backoff_broken),
    (signals.jobs_requeued, jobs_requeued),
    (signals.jobs_cancelled, jobs_cancelled),
    (signals.worker_started, worker_started),
    (signals.worker_stopping, worker_stopping),
    (signals.worker_stopped, worker_stopped),
    (signals.worker_outage, worker_outage),
    (signals.worker_step_failed, worker_step_failed),
    (signals.worker_recovered, worker_recovered),
    (signals.handlers_unknown, handlers_unknown),
)
