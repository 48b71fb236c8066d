"""Still images at an address."""

import base64
import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from remtta.errors import FrameError, StreamError, UsageError
from remtta.streams.sources import open_stream
from tests.records import rows_of
from tests.runs.tiny import adapt_tiny
from tests.streams.fakes import levels
from tests.streams.servers import QuietHandler, serving


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
    camera.contents = [10, 10, 10, 10, 20, b"no picture", 20, 503, 30]
    stream = open_stream(camera.url, poll=0.01, reconnect_for=9)
    frames = list(islice(stream.frames, 5))
    stream.close()
    assert stream.kind == "url" and stream.live and camera.num_requests > 9
    assert levels([*frames[:2], *frames[3:]]) == [10, 20, 20, 30]
    assert [frame.number for frame in frames] == list(range(5))
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
