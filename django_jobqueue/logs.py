"""Log lines: receivers of the signals, on the logger `django_jobqueue`.

No line holds a payload or a result. Every line about a job starts with `Job <id> <handler>`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_jobqueue import signals
from django_jobqueue.failure import described

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob

logger = logging.getLogger("django_jobqueue")

_FIRST_LINE = 300
_SAY_AGAIN_AFTER = 60.0


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


def after_commit_failed(*, job: ProcessingJob, failure: Any, **_kwargs: Any) -> None:
    logger.warning(
        "%s is committed, and what came after failed: %s", _name(job), _first_line(failure.error)
    )
    _log_traceback(job, failure)


def job_failed(*, job: ProcessingJob, outcome: Any, **_kwargs: Any) -> None:
    logger.warning(
        "%s failed on attempt %d of %d, retry in %.10g s: %s",
        _name(job),
        job.attempts,
        job.max_attempts,
        outcome.delay,
        _first_line(job.last_error),
    )
    _log_traceback(job, outcome.failure)


def job_dead_lettered(*, job: ProcessingJob, outcome: Any, **_kwargs: Any) -> None:
    logger.error(
        "%s is a dead letter after attempt %d of %d: %s",
        _name(job),
        job.attempts,
        job.max_attempts,
        _first_line(job.last_error),
    )
    if outcome is not None:
        _log_traceback(job, outcome.failure)


def _log_traceback(job: ProcessingJob, failure: Any) -> None:
    if failure.traceback:
        logger.debug("%s, attempt %d:\n%s", _name(job), job.attempts, failure.traceback)


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


def job_left_behind(*, job: ProcessingJob, **_kwargs: Any) -> None:
    logger.warning("%s could not be given back: it runs again when its lock runs out.", _name(job))


def handler_came_back(*, job: ProcessingJob, seconds: float, **_kwargs: Any) -> None:
    logger.warning(
        "%s: attempt %d came back after %.1f s, past its timeout. Its slot is free again.",
        _name(job),
        job.attempts,
        seconds,
    )


def job_lock_lost(*, job: ProcessingJob, **_kwargs: Any) -> None:
    logger.warning(
        "%s: this worker lost its lock, so nothing of attempt %d was recorded.",
        _name(job),
        job.attempts,
    )


class _RowRefused:
    """Says it once a minute for each job: every claim and every rescue meets the row again."""

    __name__ = "row_refused"

    def __init__(self) -> None:
        self._said: dict[int, float] = {}

    def __call__(self, *, job_id: int, error: BaseException, **_kwargs: Any) -> None:
        now = time.monotonic()
        if now - self._said.get(job_id, -_SAY_AGAIN_AFTER) < _SAY_AGAIN_AFTER:
            return
        self._said = {pk: at for pk, at in self._said.items() if now - at < _SAY_AGAIN_AFTER}
        self._said[job_id] = now
        logger.error(
            "Job %d stays where it is, a trigger or constraint refuses to change its row: %s",
            job_id,
            _first_line(str(error)),
        )


row_refused = _RowRefused()


def backoff_broken(*, name: str, error: BaseException, **_kwargs: Any) -> None:
    reason = _first_line(described(error).error)
    logger.error("The backoff of %s failed, the default was used: %s", name, reason)


def jobs_requeued(*, ids: Collection[int], **_kwargs: Any) -> None:
    logger.info("%d dead letters requeued.", len(ids))


def jobs_cancelled(*, ids: Collection[int], **_kwargs: Any) -> None:
    logger.info("%d jobs cancelled.", len(ids))


def worker_started(*, options: Any, handlers: Collection[str], **_kwargs: Any) -> None:
    logger.info("Worker %s started: %s.", options.name, options.described())
    size = _pool_size(options.database)
    if size is not None and size < options.threads:
        logger.warning(
            "The connection pool of %r has %d connections for %d threads: handlers that use the"
            " database will wait for each other. Set its max_size to %d or more.",
            options.database,
            size,
            options.threads,
            options.threads,
        )
    if not handlers:
        logger.warning(
            "No handler is registered, so no job can run. Handlers are functions with @handler in"
            " jobs.py or tasks.py of an app in INSTALLED_APPS."
        )
    else:
        logger.info("Handlers: %s.", ", ".join(handlers))


def _pool_size(alias: str) -> int | None:
    # Not of `connections[alias]`: the coordinator has its own there, without the pool.
    pool = connections.settings[alias]["OPTIONS"].get("pool")
    if not pool:
        return None
    sizes = pool if isinstance(pool, dict) else {}
    # psycopg_pool's defaults: four, and no more than at the start.
    return int(sizes.get("max_size") or sizes.get("min_size", 4))


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


def heartbeat_failed(*, error: BaseException, wait: float, **_kwargs: Any) -> None:
    logger.error(
        "The heartbeat gets no answer, so no new job is claimed. Next try in %.1f s: %s",
        wait,
        _first_line(str(error)),
    )


def worker_unanswered(*, role: str, seconds: float, **_kwargs: Any) -> None:
    logger.error(
        "The database has not answered the %s for %.1f s: the statement is given up.",
        role,
        seconds,
    )


def worker_hangs(*, contexts: Collection[Any], **_kwargs: Any) -> None:
    logger.critical(
        "All slots (%d) hang, so no job can start: %s. Restart this worker, unless"
        " --restart-when-hung does.",
        len(contexts),
        ", ".join(f"{_name(one.claim)} for {one.ran_for:.0f} s" for one in contexts),
    )


def worker_step_failed(*, error: BaseException, **_kwargs: Any) -> None:
    logger.error("A step of the worker failed: %s", _first_line(described(error).error))


def worker_recovered(**_kwargs: Any) -> None:
    logger.warning("The database answers again.")


def handlers_unknown(*, waiting: Mapping[str, int], **_kwargs: Any) -> None:
    for handler, count in waiting.items():
        logger.warning(
            "%d due jobs wait for the handler %r, which this worker does not know.", count, handler
        )


def process_started(*, pid: int, **_kwargs: Any) -> None:
    logger.info("Worker process %d started.", pid)


def process_ended(*, pid: int, **_kwargs: Any) -> None:
    logger.info("Worker process %d ended.", pid)


def process_died(*, pid: int, reason: str, wait: float | None, **_kwargs: Any) -> None:
    then = "" if wait is None else f", another starts in {wait:.10g} s"
    logger.error("Worker process %d ended (%s)%s.", pid, reason, then)


def parent_stopping(*, running: int, reason: str, **_kwargs: Any) -> None:
    logger.info("Stopping (%s): %d worker processes.", reason, running)


def parent_stopped(**_kwargs: Any) -> None:
    logger.info("All worker processes have ended.")


_RECEIVERS = (
    (signals.job_started, job_started),
    (signals.job_succeeded, job_succeeded),
    (signals.after_commit_failed, after_commit_failed),
    (signals.job_failed, job_failed),
    (signals.job_dead_lettered, job_dead_lettered),
    (signals.job_lost, job_lost),
    (signals.job_released, job_released),
    (signals.job_left_behind, job_left_behind),
    (signals.handler_came_back, handler_came_back),
    (signals.job_lock_lost, job_lock_lost),
    (signals.row_refused, row_refused),
    (signals.backoff_broken, backoff_broken),
    (signals.jobs_requeued, jobs_requeued),
    (signals.jobs_cancelled, jobs_cancelled),
    (signals.worker_started, worker_started),
    (signals.worker_stopping, worker_stopping),
    (signals.worker_stopped, worker_stopped),
    (signals.worker_outage, worker_outage),
    (signals.heartbeat_failed, heartbeat_failed),
    (signals.worker_unanswered, worker_unanswered),
    (signals.worker_hangs, worker_hangs),
    (signals.worker_step_failed, worker_step_failed),
    (signals.worker_recovered, worker_recovered),
    (signals.handlers_unknown, handlers_unknown),
    (signals.process_started, process_started),
    (signals.process_ended, process_ended),
    (signals.process_died, process_died),
    (signals.parent_stopping, parent_stopping),
    (signals.parent_stopped, parent_stopped),
)
