"""Handlers: the functions that run jobs, registered by name.

A row never chooses code to import: a name that is not registered here does not run.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict, TypeVar, overload

from django.apps import apps
from django.utils.module_loading import autodiscover_modules

from django_jobqueue.backoff import Backoff
from django_jobqueue.conf import jobqueue_settings
from django_jobqueue.exceptions import DuplicateHandler, InvalidPayload, UnknownHandler
from django_jobqueue.signals import backoff_broken, tell
from django_jobqueue.values import (
    checked_delay,
    checked_max_attempts,
    checked_name,
    checked_priority,
    checked_span,
    shown,
)

if TYPE_CHECKING:
    from django_jobqueue.models import ProcessingJob
    from django_jobqueue.queue import JobQuerySet

DEFAULT_QUEUE = "default"

P = ParamSpec("P")
R = TypeVar("R")


class EnqueueOptions(TypedDict, total=False):
    """What a single call may choose, with the names `ProcessingJob.objects.enqueue` uses."""

    queue: str
    priority: int
    delay: float | timedelta
    available_at: datetime
    max_attempts: int
    idempotency_key: str


class Handler(Generic[P, R]):
    """A registered function. Calling it runs it here and now; `enqueue` makes a job of the call."""

    __name__: str  # the function's

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str,
        queue: str,
        priority: int,
        max_attempts: int | None,
        backoff: Backoff | None,
        takes_context: bool,
        timeout: float | timedelta | None,
        atomic: bool,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = checked_name(name, what="handler name")
        self.queue = checked_name(queue, what="queue")
        self.priority = checked_priority(priority)
        self.max_attempts = None if max_attempts is None else checked_max_attempts(max_attempts)
        self.backoff = _checked_backoff(backoff)
        self.takes_context = takes_context
        self.timeout = None if timeout is None else checked_span(timeout, what="timeout")
        self.atomic = atomic
        self._signature = _payload_signature(function, takes_context)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Handler {self.name}>"

    def __reduce__(self) -> str:
        return self.function.__qualname__  # pickled by name, like the function it stands for

    def check_payload(self, payload: dict[str, Any]) -> None:
        """Raise `InvalidPayload` unless the function can be called with this payload."""
        try:
            self._signature.bind(**payload)
        except TypeError as error:
            raise InvalidPayload(
                f"The payload does not fit {self.name}{self._signature}: {error}."
            ) from None

    def using(self, **options: Any) -> Call:
        """The same handler with options for one call: see `EnqueueOptions`."""
        if unknown := options.keys() - EnqueueOptions.__annotations__.keys():
            raise TypeError(
                f"{self.name}.using() has no option {min(unknown)!r}."
                f" Known are: {', '.join(EnqueueOptions.__annotations__)}."
            )
        return Call(self, options)

    def enqueue(self, /, *unnamed: object, **payload: Any) -> ProcessingJob:
        """Insert a job in the caller's transaction, with this handler's defaults. → pending"""
        if unnamed:
            raise TypeError(
                f"A payload has names: pass {self.name}{self._signature} its arguments by name."
            )
        return self.using().enqueue(**payload)

    async def aenqueue(self, /, **payload: Any) -> ProcessingJob:
        """`enqueue` for async code."""
        return await self.using().aenqueue(**payload)


class Call:
    """A handler with options for one call."""

    def __init__(self, handler: Handler[..., Any], options: dict[str, Any]) -> None:
        self._handler = handler
        self._options = options

    def enqueue(self, /, **payload: Any) -> ProcessingJob:
        """Insert a job in the caller's transaction. → pending"""
        return _jobs().enqueue(self._handler, payload, **self._options)

    async def aenqueue(self, /, **payload: Any) -> ProcessingJob:
        """`enqueue` for async code."""
        return await _jobs().aenqueue(self._handler, payload, **self._options)


class Registry:
    """Every handler of this process by name. Filled while modules load, only read after that."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler[..., Any]] = {}

    def __iter__(self) -> Iterator[Handler[..., Any]]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._handlers)

    def add(self, handler: Handler[..., Any]) -> None:
        """Register. Raises `DuplicateHandler` when another function has the name."""
        known = self._handlers.get(handler.name)
        if known is not None and not _same_function(known, handler):
            raise DuplicateHandler(
                f"The handler name {handler.name!r} belongs to {_path(known)} already."
                f" Give {_path(handler)} another one: @handler(name=…)."
            )
        self._handlers[handler.name] = handler

    def get(self, name: str) -> Handler[..., Any]:
        """The handler of this name. Raises `UnknownHandler`."""
        try:
            return self._handlers[name]
        except (KeyError, TypeError):
            raise UnknownHandler(self._unknown(name)) from None

    def find(self, name: str) -> Handler[..., Any] | None:
        """The handler of this name, or None."""
        return self._handlers.get(name)

    def _unknown(self, name: str) -> str:
        nearest = self._nearest(str(name))
        advice = f" Did you mean {nearest!r}?" if nearest else ""
        return (
            f"No handler named {shown(name)}.{advice}"
            " Handlers are functions with @handler in <app>/jobs.py or <app>/tasks.py."
        )

    def _nearest(self, name: str) -> str | None:
        # The function's name alone is the commonest slip, and far from the full one.
        by_function = {known.rpartition(".")[2]: known for known in self._handlers}
        by_any_name = by_function | {known: known for known in self._handlers}
        near: list[str] = difflib.get_close_matches(name, by_any_name, n=1)
        return by_any_name[near[0]] if near else None


registry = Registry()


@overload
def handler(function: Callable[P, R], /) -> Handler[P, R]: ...


@overload
def handler(
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    takes_context: bool = False,
    timeout: float | timedelta | None = None,
    atomic: bool = False,
) -> Callable[[Callable[P, R]], Handler[P, R]]: ...


def handler(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    max_attempts: int | None = None,
    backoff: Backoff | None = None,
    takes_context: bool = False,
    timeout: float | timedelta | None = None,
    atomic: bool = False,
) -> Handler[P, R] | Callable[[Callable[P, R]], Handler[P, R]]:
    """Make a function the handler of jobs: `@handler`, or with defaults `@handler(queue="mail")`.

    `name` defaults to `<module>.<function>`. `max_attempts` and `backoff` (a function from the
    number of the failed attempt to seconds) default to the settings. With `takes_context=True` the
    function gets a `JobContext` as its first argument. An attempt that runs longer than `timeout`
    (seconds or a `timedelta`) has failed: a coroutine is cancelled, a thread keeps its slot until
    it comes back. With `atomic=True` the function runs in a transaction that commits together with
    its result and the job's end, or not at all. Raises `DuplicateHandler`, `ValueError` for
    a bad option and `TypeError` for what is no plain function.
    """

    def register(function: Callable[P, R]) -> Handler[P, R]:
        _check_plain_function(function)
        if atomic and inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{_path(function)} is async, and Django has no transactions for async code:"
                " atomic=True goes on a plain function."
            )
        made = Handler(
            function,
            name=_importable_name(function) if name is None else name,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            backoff=backoff,
            takes_context=takes_context,
            timeout=timeout,
            atomic=atomic,
        )
        registry.add(made)
        return made

    return register if function is None else register(function)


def autodiscover() -> None:
    """Import `jobs.py` and `tasks.py` of every installed app, which registers their handlers."""
    autodiscover_modules("jobs", "tasks")


def retry_delay(name: str, attempts: int) -> float:
    """Seconds a job of this handler waits after its failed attempt number `attempts`.

    A policy that raises or returns no span of time must not keep the failure from being recorded:
    the default policy answers instead, and `backoff_broken` is sent.
    """
    default = jobqueue_settings().backoff
    known = registry.find(name)
    if known is None or known.backoff is None:
        return default(attempts)
    try:
        return checked_delay(known.backoff(attempts), what=f"backoff of {name}")
    except BaseException as error:
        tell(backoff_broken, Handler, name=name, error=error)
        return default(attempts)


def _jobs() -> JobQuerySet:
    return apps.get_model("django_jobqueue", "ProcessingJob").objects.all()


def _importable_name(function: Callable[..., Any]) -> str:
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise TypeError(
            f"No worker can import {_path(function)}: it is not at the top level of a module."
            " Move the function to an app's jobs.py."
        )
    return _path(function)


def _check_plain_function(function: Callable[..., Any]) -> None:
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise TypeError(f"@handler goes on a plain function, not on {function!r}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{_path(function)} is a generator: calling it would run nothing.")


def _checked_backoff(backoff: object) -> Backoff | None:
    if backoff is not None and not callable(backoff):
        raise ValueError(
            "backoff must be a function from the number of the failed attempt to seconds, not"
            f" {shown(backoff)}. For a fixed wait: lambda attempts: {shown(backoff)}."
        )
    return backoff


def _payload_signature(function: Callable[..., Any], takes_context: bool) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if takes_context:
        if not parameters or parameters[0].kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        ):
            raise TypeError(
                f"{_path(function)} takes a context, but has no first parameter to pass it to."
            )
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(
                f"{_path(function)}: the parameter {parameter.name!r} is positional-only,"
                " but a payload is keyword arguments."
            )
    # Without annotations: it is only shown, and they make an error hard to read.
    return inspect.Signature([one.replace(annotation=one.empty) for one in parameters])


def _same_function(one: Handler[..., Any], other: Handler[..., Any]) -> bool:
    return _path(one) == _path(other)  # the module was loaded again


def _path(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"
