"""A way to the database that can go dead without telling either end."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from tests.run_database import connection_params

_CHUNK = 65_536


class Proxy:
    """Forwards connections to the database of the test run.

    A connection is known by its role, a text that its client sends when it begins, such as an
    `application_name`. One that is silenced stays open at both ends, and delivers nothing more.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[_Link] = []
        self._ended = False
        self._for_good = False
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def address(self) -> tuple[str, str]:
        host, port = self._listener.getsockname()
        return host, str(port)

    def silence(self, role: str) -> int:
        """Let what is connected now in this role go dead. Returns how many that were."""
        silenced = [link for link in self._links if link.is_open and role.encode() in link.greeting]
        for link in silenced:
            link.silent = True
        return len(silenced)

    def silence_all_for_good(self) -> None:
        """Nothing is delivered any more, on new connections neither."""
        self._for_good = True
        self.silence("")

    def connected(self, role: str) -> int:
        """How many live connections have this role."""
        return sum(
            link.is_open and not link.silent and role.encode() in link.greeting
            for link in self._links
        )

    def close(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()).close()  # wakes the thread
        self._thread.join()
        self._listener.close()
        for link in self._links:
            link.close()

    def _accept(self) -> None:
        while True:
            client, _address = self._listener.accept()
            if self._ended:
                client.close()
                return
            self._links.append(_Link(client, silent=self._for_good))


class _Link:
    def __init__(self, client: socket.socket, *, silent: bool) -> None:
        self.greeting = b""
        self.silent = silent
        self.is_open = True
        self._ends = (client, _to_the_server())
        self._threads = [
            threading.Thread(target=self._pump, args=pair)
            for pair in (self._ends, self._ends[::-1])
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._shut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if source is self._ends[0] and len(self.greeting) < _CHUNK:
                    self.greeting += data
                if not self.silent:
                    target.sendall(data)
        self._shut()

    def _shut(self) -> None:
        self.is_open = False
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _to_the_server() -> socket.socket:
    params = connection_params()
    host, port = str(params.get("host") or ""), int(params.get("port") or 5432)
    if not host.startswith("/"):
        return socket.create_connection((host or "127.0.0.1", port))
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(host, f".s.PGSQL.{port}"))
    return server


@contextmanager
def way_to(settings_dict: dict[str, Any]) -> Iterator[Proxy]:
    """Within, new connections with these Django settings go through a proxy."""
    proxy = Proxy()
    host, port = proxy.address
    options = {**settings_dict["OPTIONS"], "sslmode": "disable", "gssencmode": "disable"}
    before = dict(settings_dict)
    settings_dict |= {"HOST": host, "PORT": port, "OPTIONS": options}
    try:
        yield proxy
    finally:
        settings_dict.update(before)
        proxy.close()


def url_through(proxy: Proxy, database: str) -> str:
    """`DATABASE_URL` of a process that reaches a database of the test run by the proxy."""
    params = connection_params()
    who = quote(str(params.get("user") or getpass.getuser()), safe="")
    if params.get("password"):
        who += f":{quote(str(params['password']), safe='')}"
    host, port = proxy.address
    return f"postgres://{who}@{host}:{port}/{database}?sslmode=disable&gssencmode=disable"
