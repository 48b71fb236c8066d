"""Addresses: which are taken, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from remtta.errors import StreamError, UsageError, without_password
from remtta.streams.addresses import check_scheme
from remtta.streams.sources import open_stream
from remtta.streams.video import open_capture
from tests.streams.servers import QuietHandler, serving


def test_what_does_not_open_is_told_without_the_password() -> None:
    with pytest.raises(
        StreamError, match=r"^http://\*\*\*@127.0.0.1:9/x cannot be opened as a video; check the address"
    ):
        next(open_stream("http://me:secret@127.0.0.1:9/x").frames)


def test_an_unknown_protocol_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r'^htp://host/x: unknown protocol "htp"; use rtsp://'):
        open_stream("htp://host/x")
    check_scheme("RTSP://host/x", "")


class _Asked(QuietHandler):
    """Keeps what it is asked with; /away redirects to another server."""

    away = ""
    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((f"{self.connection.getsockname()[1]}{self.path}", self.headers["Authorization"]))
        if self.path == "/live" and not self.headers["Authorization"]:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="camera"')
        elif self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"{self.away}/live")
        else:
            self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def camera_and_stranger() -> Iterator[tuple[str, str]]:
    """Ports of a server that redirects to another, and of that one."""
    with serving(_Asked) as camera, serving(_Asked) as stranger:
        _Asked.away, _Asked.asked = f"http://127.0.0.1:{stranger.server_port}", []
        yield str(camera.server_port), str(stranger.server_port)


def test_a_password_does_not_go_to_a_server_that_is_redirected_to(camera_and_stranger: tuple[str, str]) -> None:
    camera, stranger = camera_and_stranger
    open_capture(f"http://admin:secret@127.0.0.1:{camera}/away").release()
    assert (f"{stranger}/live", None) in _Asked.asked
    assert all(login is None for place, login in _Asked.asked if place.startswith(stranger))


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
        ("http://host/v?monkey=1", "http://host/v?monkey=1"),
        ("folder/user:me@home?pwd=1.png", "folder/user:me@home?pwd=1.png"),
    ],
)
def test_passwords_are_not_shown(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_a_password_is_not_shown_where_an_address_is_not_utf8() -> None:
    with pytest.raises(StreamError, match=r"^http://\*\*\*@host/\udce9 cannot be opened"):
        open_capture("http://admin:secret@host/\udce9")
