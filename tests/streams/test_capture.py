"""Why an address did not open."""

import base64
import socket
from collections.abc import Iterator
from typing import ClassVar

import pytest

from remtta.errors import StreamError, UsageError, without_password
from remtta.streams.capture import check_protocol, open_capture, why_not_open
from remtta.streams.sources import open_stream
from tests.conftest import raising
from tests.streams.servers import QuietHandler, serving


class _Server(QuietHandler):
    """Records requests, and answers with the status in the path; /page is a page, /video claims to be one, /private
    wants a password, /away redirects to /private of the server `away`.
    """

    away = ""
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        name, login = self.path.strip("/"), self.headers["Authorization"]
        self.requests.append((f"{self.connection.getsockname()[1]}{self.path}", login))
        if name == "private" and login != f"Basic {base64.b64encode(b'me:k@y').decode()}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="camera"')
        elif name == "away":
            self.send_response(302)
            self.send_header("Location", f"{self.away}/private")
        else:
            self.send_response(int(name) if name.isdecimal() else 200)
            self.send_header("Content-Type", "text/html; charset=utf-8" if name == "page" else "video/mp4")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def server() -> Iterator[str]:
    with serving(_Server) as web:
        yield f"127.0.0.1:{web.server_port}"


@pytest.mark.parametrize(
    ("login", "path", "message"),
    [
        ("", "/404", "the server answers 404 Not Found"),
        ("", "/799", "the server answers 799"),
        ("", "/private", "the server answers 401 Unauthorized"),
        ("me:no@", "/private", "the server answers 401 Unauthorized"),
        ("me:k%40y@", "/private", None),
        ("", "/page", "the server sends no picture, but text/html"),
        ("", "/video", None),
    ],
)
def test_the_response_of_a_web_server_is_reported(login: str, path: str, message: str | None, server: str) -> None:
    assert why_not_open(f"http://{login}{server}{path}") == message


def test_the_reason_is_reported_without_the_password(server: str) -> None:
    message = rf"^http://\*\*\*@{server}/404 cannot be opened as a video \(the server answers 404 Not Found\); check"
    with pytest.raises(StreamError, match=message):
        next(open_stream(f"http://me:secret@{server}/404").frames)


@pytest.mark.parametrize("scheme", ["http", "rtsp", "rtmp"])
def test_a_refused_connection_is_reported_as_such(scheme: str) -> None:
    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        message = why_not_open(f"{scheme}://127.0.0.1:{unused.getsockname()[1]}/live")
    assert message == "the connection is refused: is the port right, and the server running?"


def test_inconclusive_addresses_are_no_error() -> None:
    assert why_not_open("udp://@:1234") is None
    assert why_not_open("http://host:port/") == "it is not a valid address"


def test_an_unknown_protocol_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r'^htp://host/x: unknown protocol "htp"; use rtsp://'):
        open_stream("htp://host/x")
    check_protocol("RTSP://host/x")


def test_a_password_does_not_go_to_a_server_that_is_redirected_to(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Server, "requests", [])
    with serving(_Server) as other:
        monkeypatch.setattr(_Server, "away", f"http://127.0.0.1:{other.server_port}")
        address = f"http://admin:secret@{server}/away"
        assert why_not_open(address) == "the server answers 401 Unauthorized"
        open_capture(address).release()
    logins = [login for target, login in _Server.requests if target == f"{other.server_port}/private"]
    assert len(logins) >= 2 and set(logins) == {None}


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("rtsp://admin:secret@host/live", "rtsp://***@host/live"),
        ("rtsp://admin:p@ss@host/live", "rtsp://***@host/live"),
        ("rtsp://admin:se/cret@host:554/live", "rtsp://***@host:554/live"),
        ("http://host:80/@me/live", "http://host:80/@me/live"),
        ("http://[::1]:80/@me/live", "http://[::1]:80/@me/live"),
        ("http://host/v.cgi?user=admin&pwd=secret&rate=0", "http://host/v.cgi?user=admin&pwd=***&rate=0"),
        ("http://host/v?Token=abc#t=1", "http://host/v?Token=***#t=1"),
        ("http://host/v?monkey=1&access_key=a&sig=b", "http://host/v?monkey=1&access_key=***&sig=***"),
        ("srt://host:9000?mode=caller&passphrase=secret", "srt://host:9000?mode=caller&passphrase=***"),
        ("http://host/v?loginuse=me&loginpas=secret", "http://host/v?loginuse=me&loginpas=***"),
        ("http://host/v?X-Amz-Date=1&X-Amz-Signature=abc", "http://host/v?X-Amz-Date=1&X-Amz-Signature=***"),
        ("rtsp://host/user=me_password=secret_channel=1.sdp", "rtsp://host/user=me_password=***"),
        ("folder/user:me@home?pwd=1.png", "folder/user:me@home?pwd=1.png"),
    ],
)
def test_passwords_are_not_shown(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_a_password_is_not_shown_where_an_address_is_not_utf8() -> None:
    message = r"^http://\*\*\*@host/\udce9 cannot be opened as a video: its name is not valid UTF-8; rename it$"
    with pytest.raises(StreamError, match=message):
        open_capture("http://admin:secret@host/\udce9")


@pytest.mark.parametrize(
    ("failure", "message"),
    [(TimeoutError(), None), (OSError("no route"), None), (ValueError("port"), None), (socket.gaierror(), "host")],
    ids=str,
)
def test_of_a_failed_probe_only_an_unknown_host_is_reported(
    failure: Exception, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", raising(failure))
    found = why_not_open("rtsp://127.0.0.1:554/x")
    assert found is None if message is None else found and message in found
