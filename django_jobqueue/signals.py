"""What happens to jobs and workers, told to whoever listens. The log lines are such listeners.

A job's signal is sent by the process that moved it, after the statement that did; when the move was
part of a caller's transaction, before that transaction commits. A receiver that raises is logged
and changes nothing. Most receivers run in the worker's deciding thread, those of `job_started` on
the handler's, those about the heartbeat and the watchdog on theirs: keep all of them short.

`sender` is the `ProcessingJob` class, or a part of the worker for the worker's signals.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError
from typing import Any

from django.dispatch import Signal

job_enqueued = Signal()  #: job
job_started = Signal()  #: job; sent on the thread that runs the handler
job_succeeded = Signal()  #: job, outcome
#: job, failure; of an atomic handler, whose work is done and committed: job_succeeded follows
after_commit_failed = Signal()
job_failed = Signal()  #: job, outcome; it will be retried at job.available_at
job_dead_lettered = Signal()  #: job, outcome (None: its worker was lost)
#: job, worker, since; a rescue took it back (a dead letter sends job_dead_lettered too)
job_lost = Signal()
job_released = Signal()  #: job
#: job; a worker that ends could not give it back: it runs again when its lock runs out
job_left_behind = Signal()
#: job, seconds; a handler returned after its timeout
handler_came_back = Signal()
job_lock_lost = Signal()  #: job; what this worker had of it was not recorded
#: job_id, error; a trigger or constraint of the project keeps this row where it is
row_refused = Signal()
backoff_broken = Signal()  #: name, error; a handler's policy raised, the default one was used
jobs_requeued = Signal()  #: ids
jobs_cancelled = Signal()  #: ids

worker_started = Signal()  #: options, handlers
worker_stopping = Signal()  #: running, reason
worker_stopped = Signal()  #: summary
worker_outage = Signal()  #: error, wait (seconds)
heartbeat_failed = Signal()  #: error, wait (seconds); meanwhile the worker claims nothing
worker_unanswered = Signal()  #: role, seconds; the statement is cancelled
worker_hangs = Signal()  #: contexts; one for each slot, of a handler past its timeout
worker_step_failed = Signal()  #: error; the worker goes on
worker_recovered = Signal()
handlers_unknown = Signal()  #: waiting (mapping of handler name to a bounded count)

process_started = Signal()  #: pid; the parent of several worker processes started one
process_ended = Signal()  #: pid; it was asked to, or had done what it was started for
#: pid, reason, wait (seconds until another starts; None: the parent is stopping)
process_died = Signal()
parent_stopping = Signal()  #: running (worker processes), reason
parent_stopped = Signal()


def tell(signal: Signal, sender: Any, **news: Any) -> None:
    """Send a signal; nothing a receiver raises reaches the sender, `SystemExit` included."""
    try:
        signal.send_robust(sender, **news)
    except (SystemExit, GeneratorExit, CancelledError):
        logging.getLogger("django_jobqueue").exception("A signal receiver tried to end the worker.")
