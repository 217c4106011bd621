"""Which functions become handlers, under which name, and how a handler is found again."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from django_jobqueue import DuplicateHandler, InvalidPayload, UnknownHandler, handler
from django_jobqueue.handlers import Registry, registry
from django_jobqueue.models import ProcessingJob
from tests.app import jobs, tasks


def plain() -> str:
    return "ran"


def at_top_level(name: str = "plain") -> Any:
    """A fresh function that says it stands at the top level of this module."""

    def function() -> str:
        return "ran"

    function.__qualname__ = function.__name__ = name
    return function


# --- names -------------------------------------------------------------------------------------


def test_a_handler_is_named_after_its_module_and_function() -> None:
    assert jobs.add.name == "tests.app.jobs.add"
    assert registry.get("tests.app.jobs.add") is jobs.add


def test_a_handler_may_have_a_name_of_its_own(handlers: Registry) -> None:
    made = handler(name="mails")(at_top_level())

    assert handlers.names() == ["mails"]
    assert handlers.get("mails") is made


@pytest.mark.parametrize("name", ["", "x" * 201, "a\x00b", "\ud800", 7])
def test_a_name_that_cannot_be_stored_is_refused(handlers: Registry, name: Any) -> None:
    with pytest.raises(ValueError, match="The handler name "):
        handler(name=name)(at_top_level())

    assert len(handlers) == 0


def test_two_functions_cannot_have_one_name(handlers: Registry) -> None:
    handler(name="mails")(at_top_level("one"))

    with pytest.raises(DuplicateHandler) as caught:
        handler(name="mails")(at_top_level("other"))

    assert str(caught.value) == (
        "The handler name 'mails' belongs to tests.test_handlers.one already."
        " Give tests.test_handlers.other another one: @handler(name=…)."
    )


def test_a_module_that_is_loaded_again_replaces_its_handlers() -> None:
    before = registry.get(tasks.found_in_tasks.name)

    importlib.reload(tasks)

    assert registry.get(before.name) is tasks.found_in_tasks
    assert tasks.found_in_tasks is not before


def test_names_are_sorted(handlers: Registry) -> None:
    for name in ("b", "c", "a"):
        handler(name=name)(at_top_level(name))

    assert handlers.names() == ["a", "b", "c"]
    assert {one.name for one in handlers} == {"a", "b", "c"}


# --- which functions ---------------------------------------------------------------------------


class Klass:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    def __call__(self) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


NO_FUNCTIONS: dict[str, Any] = {
    "a class": Klass,
    "an object with __call__": Klass(),
    "a bound method": Klass().method,
    "a class method": Klass.of_class,
    "a classmethod object": vars(Klass)["of_class"],
    "a staticmethod object": vars(Klass)["static"],
    "a partial": functools.partial(plain),
    "a lambda": lambda: None,
    "a built-in": len,
    "a handler": jobs.add,
    "a name": "plain",
    "a number": 0,
}


@pytest.mark.parametrize("kind", NO_FUNCTIONS)
@pytest.mark.parametrize("decorate", [handler, handler(name="named")], ids=["plain", "named"])
def test_what_is_no_plain_function_is_refused(
    handlers: Registry, decorate: Callable[[Any], Any], kind: str
) -> None:
    with pytest.raises(TypeError, match="@handler goes on a plain function, not on "):
        decorate(NO_FUNCTIONS[kind])


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_is_refused_because_calling_it_runs_nothing(
    handlers: Registry, function: Any
) -> None:
    with pytest.raises(TypeError, match="is a generator: calling it would run nothing"):
        handler(function)


def test_a_function_that_no_worker_can_import_is_refused(handlers: Registry) -> None:
    def nested() -> None: ...

    with pytest.raises(TypeError, match=r"No worker can import .+\.<locals>\.nested: .+ jobs\.py"):
        handler(nested)
    with pytest.raises(
        TypeError, match=r"No worker can import tests\.test_handlers\.Klass\.method"
    ):
        handler(Klass.method)


def test_a_function_of_the_main_module_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from django_jobqueue import handler\n\n@handler\ndef job(): ...\n")

    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=PROJECT, env=IMPORTS
    )

    assert ran.returncode == 1
    assert "TypeError: No worker can import __main__.job" in ran.stderr


def test_a_nested_function_with_a_name_of_its_own_is_accepted(handlers: Registry) -> None:
    @handler(name="nested")
    def nested() -> str:
        return "ran"

    assert handlers.get("nested")() == "ran"


def test_a_decorated_function_shows_the_signature_of_the_one_inside(handlers: Registry) -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    made = handler(name="logged")(logged(jobs.add.function))

    made.check_payload({"a": 1})
    with pytest.raises(InvalidPayload):
        made.check_payload({"c": 1})


def test_a_handler_can_still_be_called_as_the_function_it_is() -> None:
    assert jobs.add(1, b=2) == 3
    assert jobs.add.__name__ == "add"
    assert jobs.add.__doc__ == "The plainest handler with a result."
    assert jobs.add.__module__ == "tests.app.jobs"


async def awaited(coroutine: Any) -> Any:
    return await coroutine


def test_an_async_handler_can_still_be_awaited() -> None:
    coroutine = jobs.add_async(1, b=2)

    with pytest.raises(StopIteration) as finished:
        awaited(coroutine).send(None)

    assert finished.value.value == 3


# --- options -----------------------------------------------------------------------------------


def test_options_default_to_the_default_queue_and_the_settings() -> None:
    assert (jobs.add.queue, jobs.add.priority) == ("default", 0)
    assert jobs.add.max_attempts is None
    assert jobs.add.backoff is None
    assert jobs.add.takes_context is False


def test_options_are_kept() -> None:
    assert (jobs.mail.queue, jobs.mail.priority, jobs.mail.max_attempts) == ("mail", 10, 2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"queue": ""}, "The queue is empty"),
        ({"queue": "x" * 201}, "has 201 characters"),
        ({"priority": 101}, "priority must be from -100 to 100, not 101"),
        ({"priority": 1.5}, "priority must be a whole number, not 1.5"),
        ({"max_attempts": 0}, "max_attempts must be from 1 to 32767, not 0"),
        ({"backoff": 0}, "backoff must be a function .+ not 0"),
        ({"backoff": 30}, "For a fixed wait: lambda attempts: 30"),
        ({"backoff": "30"}, "backoff must be a function"),
    ],
    ids=repr,
)
def test_a_bad_option_is_refused_at_declaration(
    handlers: Registry, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        handler(**options)(at_top_level())

    assert len(handlers) == 0


def test_one_attempt_and_priority_zero_are_values_like_any_other(handlers: Registry) -> None:
    made = handler(max_attempts=1, priority=0)(at_top_level())

    assert (made.max_attempts, made.priority) == (1, 0)


# --- signatures --------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [{"a": 1}, {"a": 1, "b": 2}, {"a": None}])
def test_a_payload_that_fits_is_accepted(payload: dict[str, Any]) -> None:
    jobs.add.check_payload(payload)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({}, "missing a required argument: 'a'"),
        ({"b": 1}, "missing a required argument: 'a'"),
        ({"a": 1, "c": 2}, "got an unexpected keyword argument 'c'"),
        ({"a": 1, "self": 2}, "got an unexpected keyword argument 'self'"),
        ({"A": 1}, "missing a required argument: 'a'"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_with_the_signature(
    payload: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidPayload) as caught:
        jobs.add.check_payload(payload)

    assert str(caught.value) == (f"The payload does not fit tests.app.jobs.add(a, b=1): {problem}.")


def test_a_handler_with_keyword_arguments_takes_any_name(handlers: Registry) -> None:
    @handler(name="any")
    def takes_any(**everything: Any) -> None: ...

    takes_any.check_payload({"self": 1, "handler": 2, "payload": 3, "not an identifier": 4})


def test_a_positional_only_parameter_is_refused(handlers: Registry) -> None:
    def positional(a: int, /) -> None: ...

    with pytest.raises(TypeError, match="'a' is positional-only, but a payload is keyword"):
        handler(name="positional")(positional)


def test_the_context_is_not_part_of_the_payload() -> None:
    jobs.touch.check_payload({"path": "file"})

    with pytest.raises(InvalidPayload, match="unexpected keyword argument 'context'"):
        jobs.touch.check_payload({"path": "file", "context": 1})


def test_the_context_may_be_positional_only(handlers: Registry) -> None:
    @handler(name="context", takes_context=True)
    def takes(context: Any, /, a: int) -> None: ...

    takes.check_payload({"a": 1})


def without_parameters() -> None: ...
def with_keyword_only(*, context: Any) -> None: ...
def with_keywords(**context: Any) -> None: ...


@pytest.mark.parametrize("function", [without_parameters, with_keyword_only, with_keywords])
def test_a_context_without_a_parameter_to_pass_it_to_is_refused(
    handlers: Registry, function: Callable[..., None]
) -> None:
    with pytest.raises(TypeError, match="takes a context, but has no first parameter"):
        handler(name="context", takes_context=True)(function)


# --- finding -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("tests.app.jobs.ad", "tests.app.jobs.add"),
        ("tests.app.job.echo", "tests.app.jobs.echo"),
        ("echo", "tests.app.jobs.echo"),
        ("kil_worker", "tests.app.jobs.kill_worker"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one(asked: str, meant: str) -> None:
    with pytest.raises(UnknownHandler) as caught:
        registry.get(asked)

    assert str(caught.value) == (
        f"No handler named {asked!r}. Did you mean {meant!r}?"
        " Handlers are functions with @handler in <app>/jobs.py or <app>/tasks.py."
    )


@pytest.mark.parametrize(
    "asked",
    ["", "os.system", "builtins.eval", "x" * 10**6, "\x00", "\ud800", None, 7, ["a"], {}],
    ids=lambda asked: ascii(asked)[:20],
)
def test_a_name_like_none_of_ours_is_answered_without_a_guess(asked: Any) -> None:
    with pytest.raises(UnknownHandler, match=r"^No handler named .+ Handlers are") as caught:
        registry.get(asked)

    assert "Did you mean" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["os.system", "tests.app.jobs._query", "tests.app.jobs.Path"])
def test_a_name_never_leads_to_a_function_that_was_not_declared(name: str) -> None:
    assert registry.find(name) is None


def test_asking_for_a_name_imports_nothing() -> None:
    loaded = set(sys.modules)

    assert registry.find("antigravity.fly") is None
    with pytest.raises(UnknownHandler):
        ProcessingJob.objects.enqueue("antigravity.fly", {})

    assert set(sys.modules) == loaded


# --- pickling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_handler_is_pickled_by_name(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(jobs.add, protocol)) is jobs.add


def test_a_copy_of_a_handler_is_the_handler() -> None:
    assert copy.copy(jobs.add) is jobs.add
    assert copy.deepcopy({"job": jobs.add}) == {"job": jobs.add}


def test_a_handler_runs_in_a_spawned_process_pool(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from django_jobqueue import Retry\n"
        "from tests.app.jobs import add, again\n"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    with ProcessPoolExecutor(1, mp_context=spawn) as pool:\n"
        "        print(pool.submit(add, 1, 2).result())\n"
        "        error = pool.submit(again, 7).exception()\n"
        "        print(type(error) is Retry, error.after)\n"
    )

    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=PROJECT, env=IMPORTS
    )

    assert (ran.stdout, ran.stderr) == ("3\nTrue 7\n", "")


# --- calls -------------------------------------------------------------------------------------


def test_an_unknown_option_of_a_call_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"add\.using\(\) has no option 'que'. Known are: queue, "):
        jobs.add.using(que="mail", zzz=1)


@pytest.mark.django_db
def test_a_call_carries_its_options_and_its_payload() -> None:
    job = jobs.mail.using(queue="slow", priority=0, max_attempts=1).enqueue(to="a@example.com")

    job.refresh_from_db()
    assert (job.queue, job.priority, job.max_attempts) == ("slow", 0, 1)
    assert job.payload == {"to": "a@example.com"}


@pytest.mark.django_db
def test_a_call_can_be_made_again() -> None:
    call = jobs.noop.using(priority=5)

    assert call.enqueue().pk != call.enqueue().pk


@pytest.mark.django_db
def test_a_handler_enqueues_with_its_own_defaults() -> None:
    job = jobs.mail.enqueue(to="a@example.com")

    assert (job.handler, job.queue, job.priority) == ("tests.app.jobs.mail", "mail", 10)
    assert job.max_attempts == 2


@pytest.mark.django_db
def test_payload_names_never_collide_with_our_own(handlers: Registry) -> None:
    @handler(name="any")
    def takes_any(**everything: Any) -> None: ...

    payload = {"self": 1, "handler": 2, "payload": 3, "queue": 4, "priority": 5}

    assert takes_any.enqueue(**payload).payload == payload


# --- autodiscovery -----------------------------------------------------------------------------

PROJECT = Path(__file__).resolve().parents[1]
IMPORTS = {"PYTHONPATH": str(PROJECT), "DJANGO_SETTINGS_MODULE": ""}
LIST_HANDLERS = """
import sys
from django.conf import settings
settings.configure(
    INSTALLED_APPS=sys.argv[1:],
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "none"}},
)
import django
django.setup()
from django_jobqueue.handlers import registry
print(*registry.names(), sep="\\n")
"""


def discovered(folder: Path, *apps: str) -> list[str]:
    """The handlers that a fresh process knows after `django.setup()`."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIST_HANDLERS, *apps],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{PROJECT}"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def write(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


DECLARATION = "from django_jobqueue import handler\n\n@handler\ndef run(): ...\n"


def test_handlers_are_found_in_jobs_and_in_tasks() -> None:
    names = registry.names()

    assert "tests.app.jobs.add" in names
    assert "tests.app.tasks.found_in_tasks" in names


@pytest.mark.parametrize("entry", ["shop", "shop.apps.ShopConfig", "shop.apps.Relabelled"])
def test_handlers_are_found_by_module_by_config_and_under_another_label(
    tmp_path: Path, entry: str
) -> None:
    write(tmp_path / "shop" / "__init__.py")
    write(tmp_path / "shop" / "jobs.py", DECLARATION)
    write(
        tmp_path / "shop" / "apps.py",
        "from django.apps import AppConfig\n"
        "class ShopConfig(AppConfig):\n    name = 'shop'\n    default = True\n"
        "class Relabelled(AppConfig):\n    name = 'shop'\n    label = 'other'\n",
    )

    assert discovered(tmp_path, "django_jobqueue", entry) == ["shop.jobs.run"]
    assert discovered(tmp_path, entry, "django_jobqueue") == ["shop.jobs.run"]


def test_handlers_are_found_in_packages_and_what_they_import(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "__init__.py")
    write(tmp_path / "shop" / "tasks" / "__init__.py", "from shop.tasks import mails\n")
    write(tmp_path / "shop" / "tasks" / "mails.py", DECLARATION)

    assert discovered(tmp_path, "django_jobqueue", "shop") == ["shop.tasks.mails.run"]


def test_an_app_without_handlers_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "__init__.py")

    assert discovered(tmp_path, "django_jobqueue", "shop") == []


def test_handlers_may_import_models_wherever_the_app_stands_in_the_list(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "__init__.py")
    write(
        tmp_path / "shop" / "models.py",
        "from django.db import models\n"
        "class Order(models.Model):\n    id = models.BigAutoField(primary_key=True)\n",
    )
    write(tmp_path / "shop" / "jobs.py", f"from shop.models import Order\n{DECLARATION}")

    assert discovered(tmp_path, "django_jobqueue", "shop") == ["shop.jobs.run"]


def test_an_error_in_a_jobs_module_is_not_swallowed(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "__init__.py")
    write(tmp_path / "shop" / "jobs.py", "import no_such_module\n")

    with pytest.raises(AssertionError, match="No module named 'no_such_module'"):
        discovered(tmp_path, "django_jobqueue", "shop")


def test_every_handler_of_the_tests_can_be_imported_back_to_itself() -> None:
    for one in registry:
        module, _, name = one.name.rpartition(".")
        assert inspect.unwrap(getattr(importlib.import_module(module), name)) is one.function
