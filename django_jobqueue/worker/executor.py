"""The threads that run handlers. They do nothing else: no claim, no settle."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from django.db import close_old_connections, connections

from django_jobqueue import signals
from django_jobqueue.execution import JobContext, execute
from django_jobqueue.handlers import registry
from django_jobqueue.outcomes import Outcome, failed
from django_jobqueue.worker.atomic import execute_atomically
from django_jobqueue.worker.connection import leave_clean
from django_jobqueue.worker.watchdog import Conversation, lock_length

_CLOSE_OLD_SESSIONS_EVERY = 30.0

T = TypeVar("T")


class Executor:
    """`threads` threads take what is submitted and hand each outcome to `on_outcome`.

    `conversations` are for a watchdog: what the threads ask when they clean up after a handler.
    """

    def __init__(
        self,
        threads: int,
        *,
        database: str,
        on_outcome: Callable[[Outcome], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._work: SimpleQueue[JobContext | None] = SimpleQueue()
        self._database = database
        self._on_outcome = on_outcome
        self._on_crash = on_crash
        self._pid = os.getpid()
        self.conversations = [
            Conversation("clean-up after a handler", patience=lock_length)
            for _number in range(threads)
        ]
        # Daemons, so that a handler that hangs cannot keep the process; `stop` ends idle ones.
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(conversation,),
                name=f"jobqueue-executor-{number}",
                daemon=True,
            )
            for number, conversation in enumerate(self.conversations, start=1)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, context: JobContext) -> None:
        """Run this job on the next free thread."""
        self._work.put(context)

    def take_back_unstarted(self) -> list[JobContext]:
        """Empty the queue: these jobs will not be started."""
        return [context for context in emptied(self._work) if context is not None]

    def stop(self, *, wait: float) -> int:
        """End the idle threads, waiting `wait` seconds in all. Returns how many still hang."""
        for _thread in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + wait
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, conversation: Conversation) -> None:
        try:
            while (context := self._next()) is not None:
                self._on_outcome(self._outcome_of(context, conversation))
        except BaseException as error:
            self._on_crash(error)
        finally:
            connections.close_all()

    def _next(self) -> JobContext | None:
        """Wait for work. Sessions older than their CONN_MAX_AGE do not outlive a long wait."""
        while True:
            try:
                return self._work.get(timeout=_CLOSE_OLD_SESSIONS_EVERY)
            except Empty:
                with suppress(Exception):  # a session that cannot be closed is no reason to end
                    close_old_connections()

    def _outcome_of(self, context: JobContext, conversation: Conversation) -> Outcome:
        signals.tell(signals.job_started, type(context.claim), job=context.claim)
        try:
            # A context of its own: language, time zone and other context variables a handler
            # sets end with it.
            return contextvars.copy_context().run(self._execute, context)
        except BaseException as error:  # ours, and still this job's only
            return failed(context.claim, error)
        finally:
            context.ends()
            self._end_forked_child()
            leave_clean(conversation)

    def _execute(self, context: JobContext) -> Outcome:
        handler = registry.find(context.claim.handler)
        if handler is not None and handler.atomic:
            return execute_atomically(context, database=self._database)
        return execute(context)

    def _end_forked_child(self) -> None:
        # A child that a handler forked, and that did not end there, must not go on as a worker.
        if os.getpid() != self._pid:
            os._exit(1)


def emptied(queue: SimpleQueue[T]) -> Iterator[T]:
    """Take what is in the queue, without waiting for more."""
    with suppress(Empty):
        while True:
            yield queue.get_nowait()
