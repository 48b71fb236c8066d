"""Many streams from files, web cameras and RTSP cameras: each gives the same results as alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from remtta import load_delta
from remtta.deltas import DELTA
from remtta.errors import StreamError
from remtta.streams.sources import Stream, open_stream
from tests.adapt.test_many_streams import adapt_site
from tests.conftest import draw_folder, draw_image, draw_video
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny
from tests.streams.rtsp import rtsp_camera
from tests.streams.servers import QuietHandler, serving

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

NUM_FRAMES = 6


class _WebCamera(QuietHandler):
    """Refuses the first `refused` requests, and serves its parts to all others."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.refused -= 1
        if server.refused >= 0:
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # whoever has seen enough hangs up
            for part in server.parts:
                self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(part))
                self.wfile.write(part + b"\r\n")
                time.sleep(0.02)


def images(seed: int, number: int = NUM_FRAMES) -> list[Any]:
    return [draw_image(seed + each, 64, 48) for each in range(number)]


@contextlib.contextmanager
def web_camera(parts: Sequence[bytes], refused: int = 0) -> Iterator[str]:
    with serving(_WebCamera) as server:
        server.parts, server.refused = parts, refused
        yield f"http://127.0.0.1:{server.server_port}/live"


def jpegs(seed: int) -> list[bytes]:
    return [cv2.imencode(".jpg", np.asarray(image))[1].tobytes() for image in images(seed)]


@pytest.fixture
def dying() -> Iterator[Any]:
    """Return a camera that gives four frames."""
    with rtsp_camera(images(60, 4)) as camera:
        yield camera


@pytest.fixture
def sources(tmp_path: Path, dying: Any) -> Iterator[dict[str, str]]:
    """Yield three files, three web cameras and two RTSP cameras."""
    draw_video(tmp_path / "film.avi", range(40, 40 + NUM_FRAMES))
    files = {name: str(draw_folder(tmp_path / name, range(seed, seed + 8))) for name, seed in (("a", 0), ("b", 10))}
    noise = [np.random.default_rng(each).bytes(500) for each in range(NUM_FRAMES)]
    with (
        rtsp_camera(images(50)) as rtsp,
        web_camera(jpegs(70)) as web,
        web_camera(jpegs(80), refused=1) as late,
        web_camera(noise) as garbage,
    ):
        rtsp.most = 2
        cameras = {"rtsp": rtsp.url, "dying": dying.url, "web": web, "late": late, "garbage": garbage}
        yield {**files, "film": str(tmp_path / "film.avi"), **cameras}


def test_eight_streams_of_three_kinds_are_each_as_alone_whatever_becomes_of_the_others(
    sources: dict[str, str], dying: Any, tmp_path: Path
) -> None:
    failing = ("dying", "garbage")

    def opened(name: str) -> Stream:
        if "://" not in sources[name]:
            return open_stream(sources[name])
        patience = 0.3 if name in failing else 30.0
        return open_stream(sources[name], limit=NUM_FRAMES, buffer="all", wait_at_start=True, reconnect_for=patience)

    summary = adapt_site({name: opened(name) for name in sources}, tmp_path / "site")
    assert summary.exit_reason == "error: 2 of 8 streams failed"
    ends = {name: run.exit_reason for name, run in summary.streams.items()}
    assert {name for name, reason in ends.items() if reason != "completed"} == set(failing)
    assert " was lost (" in ends["dying"] and "was not available (" in ends["garbage"], ends
    assert {name: run.num_predicted for name, run in summary.streams.items()} == {
        **dict.fromkeys(sources, NUM_FRAMES), "a": 8, "b": 8, "dying": 4, "garbage": 0
    }  # fmt: skip
    dying.most = 2
    for name in sources.keys() - {"garbage"}:
        with contextlib.suppress(StreamError):
            adapt_tiny(opened(name), tmp_path / "alone" / name)
        assert_the_same(tmp_path / "site" / name, tmp_path / "alone" / name)


def assert_the_same(folder: Path, alone: Path) -> None:
    """Compare rows except for the times at which frames arrived."""
    rows, wanted = ([{**row, "time_s": 0, "time": ""} for row in rows_of(each)] for each in (folder, alone))
    assert rows == wanted
    assert record_of(folder)["counts"] == record_of(alone)["counts"]
    delta, other = load_delta(folder / DELTA), load_delta(alone / DELTA)
    assert delta.updates == other.updates > 0
    assert all(torch.equal(delta.tensors[name], tensor) for name, tensor in other.tensors.items())
