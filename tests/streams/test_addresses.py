"""Why an address did not open."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator

import pytest

from remtta.errors import StreamError, UsageError
from remtta.streams.addresses import check_scheme, why_not_open
from remtta.streams.sources import open_stream
from tests.streams.servers import QuietHandler, serving


class _Server(QuietHandler):
    """Answers with the status in the path; /page is a page, /video claims to be one, /private wants a password."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        login = base64.b64encode(b"me:k@y").decode()
        allowed = name != "private" or self.headers["Authorization"] == f"Basic {login}"
        if name.isdecimal() or not allowed:
            self.send_response(int(name) if allowed else 401)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8" if name == "page" else "video/mp4")
        self.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    with serving(_Server) as web:
        yield f"127.0.0.1:{web.server_port}"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/404", "the server answers 404 Not Found"),
        ("/799", "the server answers 799"),
        ("/private", "the server answers 401 Unauthorized"),
        ("/page", "the server sends no video, but text/html"),
        ("/video", None),
    ],
)
def test_a_web_server_says_why(path: str, told: str | None, server: str) -> None:
    assert why_not_open(f"http://{server}{path}") == told


def test_a_password_in_the_address_is_used(server: str) -> None:
    assert why_not_open(f"http://me:k%40y@{server}/private") is None
    assert why_not_open(f"http://me:no@{server}/private") == "the server answers 401 Unauthorized"


def test_the_reason_is_told_without_the_password(server: str) -> None:
    told = rf"^http://\*\*\*@{server}/404 cannot be opened as a video \(the server answers 404 Not Found\); check"
    with pytest.raises(StreamError, match=told):
        next(open_stream(f"http://me:secret@{server}/404").frames)


@pytest.mark.parametrize("scheme", ["http", "rtsp", "rtmp"])
def test_a_refused_connection_is_told_as_such(scheme: str) -> None:
    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        told = why_not_open(f"{scheme}://127.0.0.1:{unused.getsockname()[1]}/live")
    assert told == "the connection is refused: is the port right, and the server running?"


def test_addresses_that_tell_nothing_are_no_error() -> None:
    assert why_not_open("udp://@:1234") is None
    assert why_not_open("http://host:port/") == "it is no valid address"


def test_an_unknown_protocol_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r'^htp://host/x: unknown protocol "htp"; use rtsp://'):
        open_stream("htp://host/x")
    check_scheme("RTSP://host/x", "")
