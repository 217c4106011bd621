"""The wheel has all that the app needs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "django_jobqueue"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel that was built from the sdist, as an index would offer them."""
    target = tmp_path_factory.mktemp("dist")
    build(PROJECT, "sdist", target)
    (sdist,) = target.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(target, filter="data")
        else:
            archive.extractall(target)
    build(target / sdist.name.removesuffix(".tar.gz"), "wheel", target)
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as archive_of_wheel:
        return archive_of_wheel.namelist()


def build(source: Path, kind: str, target: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)],
        cwd=source,
        check=True,
        capture_output=True,
    )


def test_the_wheel_is_the_package_file_for_file(wheel: list[str]) -> None:
    source = {
        path.relative_to(PROJECT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }

    assert {name for name in wheel if name.startswith("django_jobqueue/")} == source


def test_the_wheel_has_no_other_package(wheel: list[str]) -> None:
    assert {name.partition("/")[0] for name in wheel} == {
        "django_jobqueue",
        "django_jobqueue-0.1.0.dist-info",
    }


@pytest.mark.parametrize(
    "name",
    [
        "django_jobqueue/py.typed",
        "django_jobqueue/migrations/0001_initial.py",
        "django_jobqueue/management/commands/runworker.py",
        "django_jobqueue-0.1.0.dist-info/licenses/LICENSE",
    ],
)
def test_the_wheel_has_what_is_not_imported_by_the_package(wheel: list[str], name: str) -> None:
    assert name in wheel


def test_the_wheel_has_the_templates_of_the_admin(wheel: list[str]) -> None:
    assert [name for name in wheel if name.startswith("django_jobqueue/templates/")]
