"""`python -m tests.chaos [--short] [--only NAME] [--seed N]`: break things, then count.

Exits with 1 when a promise was broken, and shows what was found. The seed decides what is done to
whom and about when; how the processes meet is up to the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import django
from rich.console import Console

from example_project.postgres.folders import SHARED_BASE
from example_project.postgres.keeper import open_locked
from example_project.postgres.server import folder_mode
from tests.chaos.server import PASSWORD, free_ports, places

_PREFIX = "jobqueue-chaos-"
_WIDTH = 120
_INTERRUPTED = 130


def main() -> int:
    """Run the scenarios that the flags ask for. Returns the exit code."""
    flags = _flags()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    console.print(f"Seed {flags.seed}")
    try:
        with _run_folder() as folder:
            return 0 if _all_hold(flags, folder, console) else 1
    except KeyboardInterrupt:
        console.print(f"Interrupted, seed {flags.seed}")
        return _INTERRUPTED


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), metavar="N")
    parser.add_argument("--short", action="store_true", help="about a minute, for make check")
    parser.add_argument("--only", metavar="NAME", help="only scenarios with this in their names")
    return parser.parse_args()


def _all_hold(flags: argparse.Namespace, folder: Path, console: Console) -> bool:
    server, standby, proxy = free_ports(3)
    _set_up_django([server, standby])
    # Not before: they import models.
    from tests.chaos.run import Run
    from tests.chaos.scenario import Ports

    ports = Ports(server=server, standby=standby, proxy=proxy)
    return Run(**vars(flags), folder=folder, ports=ports, console=console).play_all()


def _set_up_django(ports: list[int]) -> None:
    """The driver's own connections know every server, and go around the proxy."""
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
        "CHAOS_PASSWORD": PASSWORD,
        "CHAOS_ROLE": "chaos driver",
        **places("CHAOS", ports),
    }
    django.setup()


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    """A folder for this run, gone afterwards, as are those of runs that were killed."""
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_BASE))
    lock = open_locked(folder / "lock", fcntl.LOCK_EX)
    folder.chmod(folder_mode())
    try:
        yield folder
    finally:
        # From here on a second Ctrl-C would leave files behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_leftovers() -> None:
    for folder in SHARED_BASE.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            os.close(open_locked(folder / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB))
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
