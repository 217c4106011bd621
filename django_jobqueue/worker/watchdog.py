"""What a thread cannot do for itself: notice that the database does not answer it.

A half-open socket, a session that was stopped or a table that is locked for an hour keep a thread
inside the driver, where it sees neither its deadline nor a request to stop. The watchdog cancels
such a statement, then closes the socket under it, and the thread gets an error that it treats as
any other outage. A worker that cannot end by itself is ended.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db.backends.base.base import BaseDatabaseWrapper

from django_jobqueue import signals
from django_jobqueue.conf import jobqueue_settings

_LOOK_EVERY = 0.1
#: How long an answer may take when the worker should have ended.
_LAST_PATIENCE = 0.5
_MOMENT = 0.1
_CANCEL_WITHIN = 5.0
#: How long a cancelled statement has to end by itself.
_CUT_AFTER = 0.2
#: How long after its time a worker may still be here: "within a second", less Python's own end.
_LEAVE_AFTER = 0.9


def beside(act: Callable[[], None]) -> None:
    """Do this on a thread of its own, and wait for it no longer than a moment.

    What keeps a worker may be the reader of its log lines.
    """
    thread = threading.Thread(target=act, name="jobqueue-last-words", daemon=True)
    thread.start()
    thread.join(timeout=_MOMENT)


def lock_length() -> float:
    """The patience for most answers: later, what they say about locks is worth nothing."""
    return jobqueue_settings().STALE_LOCK_AFTER


class Conversation:
    """One thread's talk with a database. `patience`: the seconds an answer may take."""

    def __init__(self, role: str, *, patience: Callable[[], float]) -> None:
        self.role = role
        self._patience = patience
        self._guard = threading.Lock()  # guards the rest between the thread and the watchdog
        self._connection: BaseDatabaseWrapper | None = None
        self._since = 0.0
        self._cancelled_at: float | None = None

    @contextmanager
    def asking(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        """Within, this thread waits for answers over this connection."""
        with self._guard:
            self._connection = connection
        self.asks_again()
        try:
            yield
        finally:
            with self._guard:
                self._connection = None

    def asks_again(self) -> None:
        """The last answer came, and the next question begins."""
        with self._guard:
            self._since, self._cancelled_at = time.monotonic(), None

    def end_when_unanswered(self, *, patience: float | None = None) -> None:
        """Cancel what takes longer than its patience; if it is still there later, cut it off."""
        with self._guard:
            unanswered = 0.0 if self._connection is None else time.monotonic() - self._since
            if self._connection is None or unanswered <= (patience or self._patience()):
                return
            session = self._connection.connection
            cancelled_at = self._cancelled_at
            self._cancelled_at = cancelled_at or time.monotonic()
        if cancelled_at is None:
            # On a thread of its own: a cancel needs a new connection, which may hang too.
            threading.Thread(target=_cancel, args=(session,), daemon=True).start()
            told = {"role": self.role, "seconds": unanswered}
            beside(lambda: signals.tell(signals.worker_unanswered, self, **told))
        elif time.monotonic() - cancelled_at > _CUT_AFTER:
            _cut(session)


class Watchdog:
    """Looks at conversations until stopped.

    `time_is_up` answers when (`time.monotonic`) the worker should have ended, infinity while it
    need not; from then on nothing is waited for, and `leave` is called, once, when it is still here
    a second later. `on_crash` is told when the thread ends by an error of its own.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        *,
        time_is_up: Callable[[], float],
        leave: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._conversations = conversations
        self._time_is_up = time_is_up
        self._leave = leave
        self._has_left = False
        self._on_crash = on_crash
        self._stopped = threading.Event()
        # A daemon: `stop` ends it, and joins it.
        self._thread = threading.Thread(target=self._run, name="jobqueue-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end and wait for it."""
        self._stopped.set()
        self._thread.join(timeout=1)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(_LOOK_EVERY):
                self._look()
        except BaseException as error:
            self._on_crash(error)

    def _look(self) -> None:
        overdue = time.monotonic() - self._time_is_up()
        for conversation in self._conversations:
            conversation.end_when_unanswered(patience=_LAST_PATIENCE if overdue > 0 else None)
        if overdue > _LEAVE_AFTER and not self._has_left:
            self._has_left = True
            self._leave()


def _cancel(session: Any) -> None:
    # Before libpq 17 a cancel blocks the whole interpreter until it has its connection, so that a
    # dead network would stop the heartbeat too. The socket is then cut off without one.
    if not psycopg.capabilities.has_cancel_safe():
        return
    try:
        session.cancel_safe(timeout=_CANCEL_WITHIN)
    except Exception:  # not connected yet, closed meanwhile, or out of reach: it is cut off next
        return


def _cut(session: Any) -> None:
    try:
        # A second descriptor of the same socket; the driver closes its own when it reads the end.
        with socket.socket(fileno=os.dup(session.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)
    except Exception:  # not connected yet, or closed meanwhile
        return
