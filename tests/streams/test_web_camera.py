"""MJPEG over HTTP from a real server, as web cameras serve it."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from remtta.errors import StreamError
from remtta.streams.pyav import Video
from remtta.streams.sources import open_stream
from tests.command import remtta_here
from tests.conftest import TINY_OPTIONS, draw_image
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny
from tests.streams.servers import QuietHandler, rtsp_camera, serving
from tests.streams.test_pyav import scene, write


class WebCamera(QuietHandler):
    """Serves 6 frames per connection, of another size in each; `most` connections, then none."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.connections += 1
        if server.connections > server.most:
            self.send_error(503)
            return
        height, width = (48, 64) if server.connections == 1 else (60, 80)
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # whoever has seen enough hangs up
            for number in range(6):
                seed = 10 * server.connections + number
                jpeg = cv2.imencode(".jpg", np.asarray(draw_image(seed, width, height)))[1].tobytes()
                self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg))
                self.wfile.write(jpeg + b"\r\n")
                time.sleep(0.02)


@pytest.fixture
def web_camera() -> Iterator[Any]:
    with serving(WebCamera) as server:
        server.connections, server.most = 0, 2
        server.url = f"http://user:secret@127.0.0.1:{server.server_port}/live"
        yield server


def test_a_web_camera_that_drops_out_and_comes_back_larger(
    web_camera: Any, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--buffer", "all", "--limit", "9", "-b", "4", "-o", str(run)]
    assert remtta_here("adapt", web_camera.url, *TINY_OPTIONS, "--checkpoint", checkpoint, *options) == 0
    rows = rows_of(run)
    assert [row.get("frame", "gap") for row in rows] == [0, 1, 2, 3, 4, 5, "gap", 6, 7, 8]
    assert all("class" in row and row["adapted"] for row in rows if "gap" not in row)
    assert 0.25 <= rows[6]["seconds"] < 10 and rows[6]["attempts"] == 1
    assert rows[7]["time_s"] - rows[5]["time_s"] == pytest.approx(rows[6]["seconds"], abs=0.01)
    message = capfd.readouterr().err
    assert "is lost (the connection ended); retrying for 60 s" in message
    assert "now gives frames of 80 x 60 pixels" in message
    assert remtta_here("inspect", run) == 0
    assert "frames       9, 0 skipped; 3 updates; 1 gaps\n" in capfd.readouterr().out
    written = [path.read_bytes() for path in run.iterdir() if path.is_file()]
    assert len(written) >= 5 and not any(b"secret" in content for content in [*written, message.encode()])


class _Endless(QuietHandler):
    """Sends a picture that never ends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace;boundary=x")
        self.end_headers()
        with contextlib.suppress(OSError):  # hung up
            self.wfile.write(b"--x\r\nContent-Type: image/jpeg\r\n\r\n\xff\xd8\xff\xe0")
            while True:
                self.wfile.write(bytes(2**16))


GIVE_UP = """
import sys
from remtta.streams import pyav
pyav.MAX_ALLOCATED_BYTES = 32 * 2**20
try:
    pyav.Video(sys.argv[1], 3, 3).read()
except OSError as error:
    print(type(error), error, file=sys.stderr)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_picture_that_never_ends_does_not_fill_the_memory() -> None:
    with serving(_Endless) as server:
        command = [sys.executable, "-c", GIVE_UP, f"http://127.0.0.1:{server.server_port}/"]
        peak = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert int(peak) < 200 * 1024  # kB: 32 MiB of it, and the libraries; without a limit it is 350


class _Stalling(QuietHandler):
    """Sends the server's video, and then nothing more."""

    def do_GET(self) -> None:
        server: Any = self.server
        self.send_response(200)
        self.send_header("Content-Type", "video/mp2t")
        self.end_headers()
        self.wfile.write(server.video)
        server.enough.wait(20)


def test_what_the_decoder_holds_back_comes_before_a_timeout(tmp_path: Path) -> None:
    video = write(tmp_path / "a.ts", [scene(number) for number in range(20)])
    with serving(_Stalling) as server:
        server.video, server.enough = video.read_bytes(), threading.Event()
        stream = Video(f"http://127.0.0.1:{server.server_port}/", 3, 0.5)
        sizes = []
        with pytest.raises(TimeoutError, match=r"^no frame within 0\.5 s$"):
            while picture := stream.read():
                sizes.append(picture.size)
        server.enough.set()
        stream.close()
    assert sizes == 20 * [(128, 96)]


def test_a_recording_whose_rtsp_server_dies_is_lost_and_read_to_its_end_by_a_resumed_run(tmp_path: Path) -> None:
    images, run = [draw_image(seed, 64, 48) for seed in range(50)], tmp_path / "run"
    with rtsp_camera(images[:27], seconds=1.0) as camera:
        camera.most = 2
        with pytest.raises(
            StreamError, match=r"/live was lost after 27 of 47 frames \(the connection ended\); check it"
        ):
            adapt_tiny(open_stream(camera.url), run)
        assert [row["frame"] for row in rows_of(run)] == list(range(27))
        assert record_of(run)["exit_reason"].startswith("error: rtsp://127.0.0.1:")
        camera.frames = images
        adapt_tiny(open_stream(camera.url), run, resume=True)
    assert [row["frame"] for row in rows_of(run)] == list(range(50))
    assert rows_of(run)[-1]["time_s"] == pytest.approx(0.96, abs=0.001)  # FFmpeg has no time for the first
    assert record_of(run)["exit_reason"] == "completed"


@pytest.mark.parametrize("dies", [False, True])
def test_a_playlist_whose_server_dies_is_lost(dies: bool, tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path / f"{part}.ts", [scene(n) for n in range(10)], first=10 * part)
    parts = "".join(f"#EXTINF:1.0,\n{part}.ts\n" for part in range(3))
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n{parts}#EXT-X-ENDLIST\n")
    if dies:
        (tmp_path / "2.ts").unlink()
    with serving(partial(_Files, directory=str(tmp_path))) as server:  # type: ignore[arg-type]
        stream = open_stream(f"http://127.0.0.1:{server.server_port}/list.m3u8")
        lost = pytest.raises(StreamError, match="was lost after 20 of 28 frames")
        with lost if dies else contextlib.nullcontext():
            assert len(list(stream.frames)) == 30


def test_a_transport_stream_in_a_file_on_a_web_server_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "a.ts", [scene(number) for number in range(10)])  # its duration is unknown without its end
    with serving(partial(_Files, directory=str(tmp_path))) as server:  # type: ignore[arg-type]
        frames = open_stream(f"http://127.0.0.1:{server.server_port}/a.ts").frames
        assert len(list(islice(frames, 11))) == 10


class _Files(QuietHandler, SimpleHTTPRequestHandler):
    """Serves the files of a folder."""


@pytest.mark.parametrize("status", ["401 Unauthorized", "404 Not Found"])
def test_what_an_rtsp_server_answers_is_told(status: str) -> None:
    with rtsp_camera([], status=status) as camera, pytest.raises(StreamError, match=rf"{status[:3]}.*{status[4:6]}"):
        next(open_stream(camera.url).frames)


def test_frames_of_another_size_within_an_rtsp_stream_keep_their_shape() -> None:
    images = [draw_image(seed, 64, height) for seed in range(2) for height in (48, 96)]
    with rtsp_camera(images) as camera:
        sizes = [frame.load().size for frame in islice(open_stream(camera.url, buffer="all").frames, 4)]
    assert sizes == [(64, 48), (64, 96)] * 2


def test_an_rtsp_camera_gives_its_frames_and_its_loss_ends_a_run_that_has_predicted_them(tmp_path: Path) -> None:
    with rtsp_camera([draw_image(seed, 64, 48) for seed in range(4)]) as camera:
        stream = open_stream(camera.url, buffer="all", reconnect_for=0.3)
        with pytest.raises(StreamError, match=r" was lost \("):
            adapt_tiny(stream, tmp_path / "run")
    assert [(row["frame"], "class" in row) for row in rows_of(tmp_path / "run")] == [(n, True) for n in range(4)]
