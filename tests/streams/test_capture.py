"""Why an address did not open, and still images at an address."""

import base64
import io
import socket
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from remtta.errors import FrameError, StreamError, UsageError, without_password
from remtta.streams.capture import Capture, check_protocol, open_capture
from remtta.streams.frames import CannotOpen
from remtta.streams.sources import open_stream
from remtta.streams.web import serves_video
from tests.conftest import raising
from tests.records import rows_of
from tests.runs.tiny import adapt_tiny
from tests.streams.fakes import levels
from tests.streams.servers import QuietHandler, serving


def opened(address: str) -> Capture:
    return open_capture(address, 3, 3, None, threading.Event())


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
    ("login", "path", "reason"),
    [
        ("", "404", "Server returned 404 Not Found"),
        ("", "private", "Server returned 401 Unauthorized .*"),
        ("me:secret@", "private", "Server returned 401 Unauthorized .*"),
    ],
)
def test_the_answer_of_a_web_server_is_reported_without_the_password(
    login: str, path: str, reason: str, server: str
) -> None:
    shown = r"\*\*\*@" if login else ""
    message = rf"^http://{shown}{server}/{path} cannot be opened as a video \({reason}\); check the address"
    with pytest.raises(StreamError, match=message):
        next(open_stream(f"http://{login}{server}/{path}").frames)


@pytest.mark.parametrize("scheme", ["http", "rtsp", "rtmp"])
def test_a_refused_connection_is_reported_as_such(scheme: str) -> None:
    with socket.socket() as unused:  # bound, and not listening
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(CannotOpen, match=r"^Connection refused$"):
            opened(f"{scheme}://127.0.0.1:{unused.getsockname()[1]}/live")


@pytest.mark.parametrize("address", ["rtsp://camera.invalid/x", "http://camera.invalid/x"])
def test_an_unknown_host_is_reported_as_such(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", raising(socket.gaierror()))
    with pytest.raises(CannotOpen, match=r"^there is no host of that name$"):
        opened(address)


@pytest.mark.parametrize("address", ["http://host:port/", "http://[bad/x"])
def test_an_address_that_is_none_cannot_be_opened(address: str) -> None:
    with pytest.raises(CannotOpen):
        opened(address)


def test_an_unknown_protocol_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r'^htp://host/x: unknown protocol "htp"; use rtsp://'):
        open_stream("htp://host/x")
    check_protocol("RTSP://host/x")


def test_a_password_does_not_go_to_a_server_that_is_redirected_to(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Server, "requests", [])
    with serving(_Server) as other:
        monkeypatch.setattr(_Server, "away", f"http://127.0.0.1:{other.server_port}")
        address = f"http://admin:secret@{server}/away"
        with pytest.raises(OSError, match="401 Unauthorized"):
            serves_video(address, 3)
        with pytest.raises(OSError, match="401 Unauthorized"):
            opened(address)
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
        ("http://host/v?u=me&p=x&pword=y&author=z", "http://host/v?u=me&p=***&pword=***&author=z"),
        ("rtsp://host/cam?channel=1&authbasic=64ab", "rtsp://host/cam?channel=1&authbasic=***"),
        ("rtmp://host/live?streamkey=ab&pin=1", "rtmp://host/live?streamkey=***&pin=***"),
        ("rtsps://host:7441/kJ3x9QpL2mNb7VcX?enableSrtp", "rtsps://host:7441/***?enableSrtp"),
        ("rtmps://host/live2/abcd-efgh-ijkl-mnop-qrst", "rtmps://host/live2/***"),
        ("rtmp://host/app/live_12345_aB3dE5fG7hI9jK1lM3", "rtmp://host/app/live_12345_***"),
        ("http://host/5f4dcc3b5aa765d61d8327deb882cf99/a.m3u8", "http://host/***/a.m3u8"),
        ("srt://host:9000?streamid=publish:kJ3x9QpL2mNb7VcX", "srt://host:9000?streamid=publish:***"),
        ("srt://host:9000?streamid=secret&latency=2", "srt://host:9000?streamid=***&latency=2"),
        ("srt://host:9000?streamid=read:cam:me:secret", "srt://host:9000?streamid=read:***"),
        ("srt://host:9000?streamid=#!::r=live,s=secret&mode=caller", "srt://host:9000?streamid=***&mode=caller"),
        ("rtmp://h/live/live_123456789_abcdefghijklmnop?t=1", "rtmp://h/live/live_123456789_***?t=1"),
        ("http://host/v/550e8400-e29b-41d4-a716-446655440000", "http://host/v/***"),
        ("folder/user:me@home?pwd=1.png", "folder/user:me@home?pwd=1.png"),
    ],
)
def test_passwords_are_not_shown(address: str, shown: str) -> None:
    assert without_password(address) == shown


@pytest.mark.parametrize(
    "path",
    [
        "Streaming/Channels/101",
        "h264Preview_01_main",
        "cam/realmonitor?channel=1&subtype=0",
        "axis-media/media.amp?videocodec=h264&resolution=1920x1080&fps=25",
        "api/camera_proxy_stream/camera.north_gate_entrance_1080p",
        "north-gate-entrance-camera/NorthGateEntranceCamera01",
        "live_720_north/live_20241129_071921/live_20241129_north/live_20241129_northgatecamera.mp4",
        "2024-11-29T07-19-21Z/20241129T071921Z/IMG_20241129_071921.jpg",
        "northgate-2024-0612-0930-1100/DJI20240612T093011cam01.mp4",
    ],
)
def test_names_of_cameras_and_times_are_shown(path: str) -> None:
    assert (
        without_password(f"rtsp://5f4dcc3b5aa765d61d83.example/{path}") == f"rtsp://5f4dcc3b5aa765d61d83.example/{path}"
    )


class _Snapshots(QuietHandler):
    """Serves the next of the server's contents for each request, and the last one from then on: a grey level, bytes, or
    a status; to whoever knows the password.
    """

    def do_GET(self) -> None:
        server: Any = self.server
        server.num_requests += 1
        content = server.contents.pop(0) if len(server.contents) > 1 else server.contents[0]
        status, data = (content, b"") if content in (401, 404, 503) else (200, content)
        if self.headers["Authorization"] != f"Basic {base64.b64encode(b'me:k@y').decode()}":
            status, data = 401, b""
            server.contents.insert(0, content)
        if isinstance(data, int):
            Image.new("RGB", (40, 36), (data,) * 3).save(encoded := io.BytesIO(), "PNG")
            data = encoded.getvalue()
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="camera"')
        self.send_header("Content-Type", "text/html" if data == b"page" else "image/png")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def camera() -> Iterator[Any]:
    with serving(_Snapshots) as server:
        server.num_requests, server.url = 0, f"http://me:k%40y@127.0.0.1:{server.server_port}/now.png"
        yield server


def test_an_image_at_an_address_is_a_frame_whenever_it_changes(camera: Any) -> None:
    # The first is requested twice, to find out whether a video is served.
    camera.contents = [10, 10, 10, 10, 20, b"no picture", 20, 503, 20, 20, 20, 30]
    stream = open_stream(camera.url, poll=0.01, reconnect_for=9)
    frames = list(islice(stream.frames, 5))
    stream.close()
    assert stream.kind == "url" and stream.live and camera.num_requests > 9
    assert levels([*frames[:2], *frames[3:]]) == [10, 20, 20, 30]
    assert [frame.number for frame in frames] == [0, 1, 2, 3, 5]  # the one after 503 had not changed
    assert [frame.gap.reason if frame.gap else None for frame in frames] == [None] * 4 + [
        "the server answers 503 Service Unavailable"
    ]
    assert {frame.source for frame in frames} == {camera.url.replace("me:k%40y", "***")}
    with pytest.raises(FrameError, match=r"^cannot be decoded$"):
        frames[2].load()


def test_a_run_predicts_an_image_at_an_address(camera: Any, tmp_path: Path) -> None:
    camera.contents = [10]
    adapt_tiny(open_stream(camera.url, limit=1), tmp_path / "run")
    assert [row["source"] for row in rows_of(tmp_path / "run")] == [camera.url.replace("me:k%40y", "***")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(404, "the server answers 404 Not Found"), (b"page", "the server sends no picture, but text/html")],
)
def test_an_address_without_an_image_is_a_stream_error(content: int | bytes, reason: str, camera: Any) -> None:
    camera.contents = [content]
    with pytest.raises(StreamError, match=f"now.png: ({reason}); check the camera or the network$"):
        next(open_stream(camera.url).frames)


def test_poll_is_for_web_addresses_and_a_file_url_is_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--poll is for http:// and https:// addresses, and rtsp://host/live is none"
    ):
        open_stream("rtsp://host/live", poll=1)
    Image.new("RGB", (4, 3)).save(tmp_path / "a b.png")
    for host in ("", "localhost"):
        [frame] = open_stream(f"file://{host}{tmp_path}/a%20b.png").frames
        assert frame.load().size == (4, 3)
    with pytest.raises(StreamError, match=r"x\.png.*: Invalid IPv6 URL; check the camera or the network$"):
        next(open_stream("http://[bad/x.png?size=1").frames)
    with pytest.raises(UsageError, match=r"b\.png: no such file or folder$"):
        open_stream(f"file://{tmp_path}/b.png")
