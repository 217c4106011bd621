"""Handlers with `atomic=True`: what they write, their result and the job's end commit together."""

from __future__ import annotations

import dataclasses

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobqueue.execution import JobContext, execute
from django_jobqueue.models import ProcessingJob
from django_jobqueue.outcomes import Outcome, Succeeded, failed


class _NotCommitted(Exception):
    """Leaves a transaction that must not be committed."""


def execute_atomically(context: JobContext, *, database: str) -> Outcome:
    """Run the handler of a claimed job in one transaction with the record of its success.

    The check of the lock comes last, and holds the row up to the commit: a worker that lost its
    lock rolls back all that the handler wrote. So does a handler that fails in whatever way; its
    failure is recorded afterwards, by the worker, over another connection.
    """
    connection = connections[database]
    if not connection.get_autocommit():
        connection.set_autocommit(True)  # or `atomic` leaves the commit to somebody else
    outcome: Outcome | None = None
    try:
        with transaction.atomic(using=database, durable=True):
            # Its release proves that the transaction is still this one, and that nothing broke it.
            savepoint = connection.savepoint()
            assert savepoint is not None, "inside a transaction there is one"
            outcome = execute(context)
            if not isinstance(outcome, Succeeded):
                raise _NotCommitted
            _check_no_block_is_open(connection)
            connection.savepoint_commit(savepoint)
            context.check()
            ProcessingJob.objects.using(database).settle_in_transaction(outcome)
        _check_committed(connection)
    except _NotCommitted:
        assert outcome is not None
        return outcome
    except BaseException as error:
        return dataclasses.replace(failed(context.claim, error), seconds=context.ran_for)
    return outcome


def _check_no_block_is_open(connection: BaseDatabaseWrapper) -> None:
    """Or Django would take the end of this transaction for the end of that block."""
    if len(connection.atomic_blocks) != 1:
        raise RuntimeError("The handler left a block of `transaction.atomic` open.")


def _check_committed(connection: BaseDatabaseWrapper) -> None:
    session = connection.connection
    if session is not None and session.info.transaction_status:
        raise RuntimeError("The transaction of this atomic handler was not committed.")
