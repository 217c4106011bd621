"""The threads that run handlers. They do nothing else: no claim, no settle."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from django.db import connections

from django_jobqueue import signals
from django_jobqueue.execution import JobContext, execute
from django_jobqueue.outcomes import Outcome, failed
from django_jobqueue.worker.connection import leave_clean


class Executor:
    """`threads` threads take what is submitted and hand each outcome to `on_outcome`."""

    def __init__(
        self,
        threads: int,
        *,
        on_outcome: Callable[[Outcome], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._work: SimpleQueue[JobContext | None] = SimpleQueue()
        self._on_outcome = on_outcome
        self._on_crash = on_crash
        self._pid = os.getpid()
        # Daemons, so that a handler that hangs cannot keep the process; `stop` ends idle ones.
        self._threads = [
            threading.Thread(target=self._run, name=f"jobqueue-executor-{number}", daemon=True)
            for number in range(1, threads + 1)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, context: JobContext) -> None:
        """Run this job on the next free thread."""
        self._work.put(context)

    def take_back_unstarted(self) -> list[JobContext]:
        """Empty the queue: these jobs will not be started."""
        unstarted: list[JobContext] = []
        while True:
            try:
                context = self._work.get_nowait()
            except Empty:
                return unstarted
            if context is not None:
                unstarted.append(context)

    def stop(self, *, wait: float) -> int:
        """End the idle threads, waiting `wait` seconds in all. Returns how many still hang."""
        for _thread in self._threads:
            self._work.put(None)
        deadline = time.monotonic() + wait
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            while (context := self._work.get()) is not None:
                self._on_outcome(self._outcome_of(context))
        except BaseException as error:
            self._on_crash(error)
        finally:
            connections.close_all()

    def _outcome_of(self, context: JobContext) -> Outcome:
        signals.tell(signals.job_started, type(context.claim), job=context.claim)
        try:
            # A context of its own: language, time zone and other context variables a handler
            # sets end with it.
            return contextvars.copy_context().run(execute, context)
        except BaseException as error:  # ours, and still this job's only
            return failed(context.claim, error)
        finally:
            self._end_forked_child()
            leave_clean()

    def _end_forked_child(self) -> None:
        # A child that a handler forked, and that did not end there, must not go on as a worker.
        if os.getpid() != self._pid:
            os._exit(1)
