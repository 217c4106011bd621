"""The shape of the code, read from its imports and calls: who may know whom, and who does what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from django_jobqueue import states
from django_jobqueue.models import ProcessingJob
from django_jobqueue.states import Move, Status

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "django_jobqueue"

#: A module imports, at load time, only from what stands before it. A package stands for what is in
#: it. Whoever adds a module decides here what it may know.
ORDER = (
    "exceptions",
    "states",
    "values",
    "payload",
    "failure",
    "backoff",
    "conf",
    "signals",
    "handlers",
    "outcomes",
    "new_job",
    "sqlstates",
    "queue",
    "models",
    "stats",
    "execution",
    "schedule",
    "worker",
)
#: What meets the outside. Nobody knows them, not even each other.
EDGES = ("apps", "checks", "logs", "backend", "testing", "metrics", "admin", "management")
#: Django finds these by name; they hold what the models were.
ASIDE = ("migrations",)

# `worker/connection.py` gives a session back as new, which is a command and not a query.
RAW_SQL = {"queue", "listener", "connection"}
NO_NAMES = {"utils", "util", "helpers", "services", "managers", "common", "misc", "base", "core"}


def module_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if place_of(path) not in ASIDE]


def place_of(path: Path) -> str:
    """The entry of ORDER or EDGES that a file belongs to; "" for the package's own `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def in_words(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def load_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs when the module is imported: no function's body, nothing for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from load_time_nodes(child)


def all_nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(tree_of(path))


def imported_names(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full dotted names, as `from a import b` may mean the module `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def places_imported_by(path: Path) -> set[str]:
    """Which of our places a file imports when it is loaded."""
    ours = (
        name.split(".")[1]
        for name in imported_names(load_time_nodes(tree_of(path)))
        if name.startswith("django_jobqueue.")
    )
    return {place for place in ours if place in (*ORDER, *EDGES, *ASIDE)} - {place_of(path)}


def called_methods(path: Path) -> set[str]:
    return {
        node.func.attr
        for node in all_nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def called_functions(path: Path) -> set[str]:
    return {
        node.func.id
        for node in all_nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


every_module = pytest.mark.parametrize("path", module_files(), ids=in_words)


# --- who knows whom ----------------------------------------------------------------------------


@every_module
def test_a_module_has_a_place(path: Path) -> None:
    assert place_of(path) in ("", *ORDER, *EDGES)


@every_module
def test_a_module_imports_only_what_stands_before_it(path: Path) -> None:
    place = place_of(path)
    before = ORDER[: ORDER.index(place)] if place in ORDER else ORDER

    assert places_imported_by(path) <= set(before)


@every_module
def test_nobody_imports_an_edge(path: Path) -> None:
    assert not places_imported_by(path) & set(EDGES)


def test_the_package_itself_imports_no_models() -> None:
    known = places_imported_by(PACKAGE / "__init__.py")

    assert not known & {"models", "queue", "worker", *EDGES}


def test_within_the_worker_no_modules_import_each_other_in_a_circle() -> None:
    files = {path.stem: path for path in (PACKAGE / "worker").glob("*.py")}
    knows = {
        name: {
            full.split(".")[2]
            for full in imported_names(load_time_nodes(tree_of(path)))
            if full.startswith("django_jobqueue.worker.")
        }
        for name, path in files.items()
    }

    while leaves := [name for name, known in knows.items() if not known & knows.keys()]:
        for name in leaves:
            del knows[name]

    assert not knows


# --- who does what -----------------------------------------------------------------------------


@every_module
def test_only_conf_reads_the_settings(path: Path) -> None:
    reads = any(name.startswith("django.conf") for name in imported_names(all_nodes(path)))

    assert reads == (place_of(path) == "conf")


@every_module
def test_only_the_queue_and_the_listener_hold_sql(path: Path) -> None:
    if path.stem in RAW_SQL:
        return

    methods = called_methods(path)
    assert not methods & {"cursor", "execute", "executemany", "raw", "extra", "copy_expert"}
    assert "RawSQL" not in called_functions(path)


@every_module
def test_only_the_queue_writes_a_status(path: Path) -> None:
    if place_of(path) == "queue":
        return

    writes = [
        node
        for node in all_nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"update", "create", "bulk_create", "bulk_update", "aupdate"}
        and any(keyword.arg == "status" for keyword in node.keywords)
    ]
    assert not writes


@every_module
def test_only_commands_read_flags_handle_signals_and_print(path: Path) -> None:
    if place_of(path) == "management":
        return

    roots = {name.split(".")[0] for name in imported_names(all_nodes(path))}
    assert not roots & {"argparse", "signal", "optparse", "getopt"}
    assert not called_functions(path) & {"print", "input"}
    assert not any(
        isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr", "argv"}
        for node in all_nodes(path)
    )


@every_module
def test_execution_and_words_know_no_database(path: Path) -> None:
    words = ORDER[: ORDER.index("handlers")]
    if place_of(path) not in (*words, "execution"):
        return

    names = {name for name in imported_names(all_nodes(path)) if name.startswith("django.db")}
    assert names <= {"django.db.models.TextChoices"}


@every_module
def test_no_process_is_forked(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_names(all_nodes(path))}

    assert "multiprocessing" not in roots
    assert "fork" not in called_methods(path)


@every_module
def test_a_module_is_named_after_what_it_is(path: Path) -> None:
    assert not {*path.relative_to(PACKAGE).parent.parts, path.stem} & NO_NAMES


@every_module
def test_a_module_says_what_it_is_for(path: Path) -> None:
    if path.read_text():
        assert ast.get_docstring(tree_of(path)) or place_of(path) == "management"


# --- the states --------------------------------------------------------------------------------

MOVES = {name.lower(): one for name, one in vars(states).items() if isinstance(one, Move)}


def test_the_moves_are_the_arrows_of_the_diagram() -> None:
    arrows = {
        name: (set(move.sources), set(move.targets))  # as plain text, to be read beside the diagram
        for name, move in MOVES.items()
    }

    assert arrows == {
        "claim": ({"pending", "failed"}, {"processing"}),
        "complete": ({"processing"}, {"succeeded"}),
        "fail": ({"processing"}, {"failed", "dead_letter"}),
        "rescue": ({"processing"}, {"failed", "dead_letter"}),
        "release": ({"processing"}, {"pending"}),
        "requeue": ({"dead_letter"}, {"pending"}),
        "cancel": ({"pending", "failed", "dead_letter"}, {"cancelled"}),
    }


@pytest.mark.parametrize("name", MOVES)
def test_the_diagram_names_every_move(name: str) -> None:
    in_diagram = {"rescue": "lost"}.get(name, name)

    assert in_diagram in str(states.__doc__)


@pytest.mark.parametrize("status", Status.values)
def test_the_diagram_names_every_status(status: str) -> None:
    assert status in str(states.__doc__)


def test_every_status_is_reached_from_pending() -> None:
    reached = {Status.PENDING}
    while (
        more := {
            target
            for move in MOVES.values()
            if reached & set(move.sources)
            for target in move.targets
        }
        - reached
    ):
        reached |= more

    assert reached == set(Status)


def test_what_has_finished_moves_only_when_a_person_says_so() -> None:
    by_people = {"requeue", "cancel"}

    for name in MOVES.keys() - by_people:
        assert not set(MOVES[name].sources) & set(states.FINISHED)


def test_what_may_be_pruned_has_finished_and_cannot_come_back() -> None:
    assert set(states.PRUNABLE) < set(states.FINISHED)
    assert not {s for move in MOVES.values() for s in move.sources} & set(states.PRUNABLE)


def test_every_job_is_claimable_running_or_finished() -> None:
    groups = [set(states.CLAIMABLE), {Status.PROCESSING}, set(states.FINISHED)]

    assert set.union(*groups) == set(Status)
    assert sum(map(len, groups)) == len(Status)


def test_the_model_knows_these_statuses_and_no_others() -> None:
    field = ProcessingJob._meta.get_field("status")

    assert [value for value, _label in field.choices or ()] == Status.values
