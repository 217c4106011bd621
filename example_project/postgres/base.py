"""The engine `example_project.postgres`: Django's PostgreSQL engine on an embedded server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.db.backends.postgresql import base
from django.db.utils import OperationalError

from example_project.postgres.server import EmbeddedServer, EmbeddedServerError

SERVERS: dict[Path, EmbeddedServer] = {}
"""One for each folder: the hold on a server belongs to the process, not to a connection."""


class DatabaseWrapper(base.DatabaseWrapper):
    """Starts the server in the folder `HOST` when the first connection is made.

    Every way to a connection (Django's own, its pool, a plain psycopg connection for LISTEN) asks
    for the parameters first, and nothing else does: a command that never connects starts nothing.
    """

    def get_connection_params(self) -> dict[str, Any]:
        """Django's parameters, pointed at the server's socket, after making sure that it runs."""
        server = server_in(Path(self.settings_dict["HOST"]))
        try:
            server.ensure_running()
        except EmbeddedServerError as error:
            raise OperationalError(str(error)) from error
        return {**super().get_connection_params(), **server.connection_params()}


def server_in(folder: Path) -> EmbeddedServer:
    """This process's server object for a folder."""
    return SERVERS.setdefault(folder, EmbeddedServer(folder))
