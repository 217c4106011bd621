"""A network between workers and server that does what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable

from tests.chaos.server import HOST

_CHUNK = 65_536
_SERVER_NOTICES_AFTER = 2.0


class Proxy:
    """Forwards TCP connections from one port to another. All faults may be called by any thread."""

    def __init__(self, port: int, *, target: int, rng: random.Random) -> None:
        self._port = port
        self._target = target
        self._rng = rng
        self._links: set[_Link] = set()
        self._count = 0
        self._delay = 0.0
        self._loop = asyncio.new_event_loop()
        # A daemon for the case that the driver is killed; `stop` joins it.
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._listening = threading.Event()

    def start(self) -> None:
        """Return when it listens."""
        self._thread.start()
        if not self._listening.wait(10):
            raise RuntimeError(f"The proxy does not listen on port {self._port}.")

    def stop(self) -> None:
        """Close every connection and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # --- faults --------------------------------------------------------------------------------

    def reset(self, share: float) -> None:
        """Cut some connections without a goodbye: RST at both ends."""
        self._on_some(share, lambda link: link.reset())

    def close(self, share: float) -> None:
        """End some connections as if each end had closed: FIN at both ends."""
        self._on_some(share, lambda link: link.close())

    def half_open(self, share: float) -> None:
        """Swallow what either side says on some connections, for good, and tell nobody."""
        self._on_some(share, lambda link: link.go_silent())

    def delay(self, seconds: float) -> None:
        """Deliver everything so much later, until told otherwise."""
        self._delay = seconds

    def _on_some(self, share: float, fault: Callable[[_Link], None]) -> None:
        def strike() -> None:
            # Sorted, or the seed would not say which ones.
            for link in sorted(self._links, key=lambda link: link.number):
                if self._rng.random() < share:
                    fault(link)

        self._loop.call_soon_threadsafe(strike)

    # --- forwarding ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._listen())
            self._loop.run_forever()
        finally:
            self._end_tasks()
            self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, HOST, self._port)
        self._listening.set()

    def _end_tasks(self) -> None:
        self._server.close()
        for link in list(self._links):
            link.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_server = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.close()
            return
        self._count += 1
        link = _Link(self._count, client=(reader, writer), server=to_server)
        self._links.add(link)
        # Cancelled by `stop`; asyncio would show that as an error.
        with contextlib.suppress(asyncio.CancelledError):
            await link.forward(delay=lambda: self._delay)
        self._links.discard(link)


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection through the proxy."""

    def __init__(self, number: int, *, client: _Stream, server: _Stream) -> None:
        self.number = number
        self._client = client
        self._server = server
        self._is_silent = False

    async def forward(self, *, delay: Callable[[], float]) -> None:
        """Until one end closes; then so does the other, at once or as a lost peer is noticed."""
        there = asyncio.ensure_future(self._pump(self._client[0], self._server[1], delay))
        back = asyncio.ensure_future(self._pump(self._server[0], self._client[1], delay))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            if self._is_silent:
                # The client gave up. The server hears nothing of that; its keepalive would tell it.
                await there
                await asyncio.sleep(_SERVER_NOTICES_AFTER)
        finally:
            self.close()
            there.cancel()
            back.cancel()

    def reset(self) -> None:
        """RST at both ends."""
        for _reader, writer in (self._client, self._server):
            with contextlib.suppress(OSError):
                _end_by_reset(writer)
            writer.transport.abort()

    def close(self) -> None:
        """FIN at both ends."""
        for _reader, writer in (self._client, self._server):
            writer.close()

    def go_silent(self) -> None:
        """Swallow what comes, until the client gives up or the time is over."""
        self._is_silent = True

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        delay: Callable[[], float],
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if delay():
                    await asyncio.sleep(delay())
                if not self._is_silent:
                    writer.write(data)
                    await writer.drain()


def _end_by_reset(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
