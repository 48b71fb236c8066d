"""Local web servers."""

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
    """Yield a server at `server.server_port` of 127.0.0.1, in its own thread."""
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield server


@contextlib.contextmanager
def in_thread(server: socketserver.BaseServer) -> Iterator[Any]:
    """Yield the server while it runs in its own thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
