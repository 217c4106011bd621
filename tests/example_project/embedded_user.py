"""A process that uses an embedded server, for the tests to start and to kill.

    python embedded_user.py FOLDER

Uses the server in the folder and says `up` or the error. Then obeys lines on standard input: `use`
does the same again, `fork` starts a child that shares the hold and says its pid, `child` starts
another program that inherits all it can and says its pid. Imports the standard library only, so
that it also runs under a Python that has nothing installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from example_project.postgres.server import EmbeddedServer, EmbeddedServerError


def main() -> None:
    """Use the server, then obey."""
    server = EmbeddedServer(Path(sys.argv[1]))
    use(server)
    for line in sys.stdin:
        {"use": lambda: use(server), "fork": fork, "child": start_child}[line.strip()]()


def use(server: EmbeddedServer) -> None:
    try:
        server.ensure_running()
    except EmbeddedServerError as error:
        say(repr(str(error)))
    else:
        say("up")


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    say(str(pid))


def start_child() -> None:
    child = subprocess.Popen(
        ["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False
    )
    say(str(child.pid))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
