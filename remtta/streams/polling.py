"""Still images at an address, such as a camera's snapshot, that are requested again and again."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from remtta.errors import FrameError
from remtta.streams.capture import VideoCapture, open_capture, request
from remtta.streams.images import has_suffix, image_suffixes, load_image

_EVERY_S = 1.0
_MAX_BYTES = 64 * 2**20


def polling_interval(source: str | int, every_s: float | None) -> float | None:
    """Return the seconds between requests of an address: as chosen, or 1 if it ends like an image; None for others."""
    if isinstance(source, int) or not source.lower().startswith(("http://", "https://")):
        return None
    path = source.partition("#")[0].partition("?")[0]
    return every_s or (_EVERY_S if has_suffix(path, image_suffixes()) else None)


def open_polled(
    address: str, every_s: float, closed: threading.Event, open_timeout_s: float, read_timeout_s: float
) -> VideoCapture:
    """Return the images at an address, requested every `every_s` seconds until `closed`; or a video, if one is served
    there, as some cameras do. Raise OSError if there is neither.
    """
    with request(address, open_timeout_s) as response:
        is_video = response.headers.get_content_maintype() in ("multipart", "video")
    if is_video:
        return open_capture(address, open_timeout_s, read_timeout_s)
    return _PolledImage(address, every_s, closed, open_timeout_s)


class _PolledImage:
    """The images at an address as a `VideoCapture`; one that has not changed is no new frame."""

    def __init__(self, address: str, every_s: float, closed: threading.Event, timeout_s: float) -> None:
        self._address, self._every_s, self._closed, self._timeout_s = address, every_s, closed, timeout_s
        self._data = b""  # the newest image's file
        self._due = time.monotonic()

    def isOpened(self) -> bool:
        return True

    def grab(self) -> bool:
        while not self._closed.wait(max(0.0, self._due - time.monotonic())):
            self._due = time.monotonic() + self._every_s
            with request(self._address, self._timeout_s) as response:
                data = response.read(_MAX_BYTES)
            if data != self._data:
                self._data = data
                return True
        return False

    def retrieve(self) -> tuple[bool, np.ndarray | None]:
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder, "image")).write_bytes(self._data)
            try:
                return True, np.ascontiguousarray(np.asarray(load_image(path))[..., ::-1])
            except FrameError:
                return False, None

    def get(self, propId: int, /) -> float:
        return 0.0

    def release(self) -> None:
        pass
