"""Web servers of this machine's own."""

from __future__ import annotations

import contextlib
import http.server
import socketserver
import threading
from collections.abc import Iterator
from typing import Any


class QuietHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[QuietHandler]) -> Iterator[Any]:
    """A server at `server.server_port` of 127.0.0.1, in a thread of its own."""
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield server


@contextlib.contextmanager
def in_thread(server: socketserver.BaseServer) -> Iterator[Any]:
    """The server, at work in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
