"""Still images at an address, such as a camera's snapshot, that are requested again and again."""

from __future__ import annotations

import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from remtta.errors import FrameError
from remtta.streams.capture import VideoCapture, open_capture
from remtta.streams.images import has_suffix, image_suffixes, load_image

_EVERY_S = 1.0
_MAX_BYTES = 64 * 2**20


def polling_interval(source: str | int, every_s: float | None) -> float | None:
    """Return the seconds between requests of an address: as chosen, or 1 if it ends like an image; None for others."""
    if isinstance(source, int) or not source.lower().startswith(("http://", "https://")):
        return None
    return every_s or (_EVERY_S if has_suffix(urlsplit(source).path, image_suffixes()) else None)


def open_polled(
    address: str, every_s: float, closed: threading.Event, open_timeout_s: float, read_timeout_s: float
) -> VideoCapture:
    """Return the images at an address, requested every `every_s` seconds until `closed`; or a video, if one is served
    there, as some cameras do. Raise OSError if there is neither.
    """
    with _requested(address, open_timeout_s) as response:
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
            with _requested(self._address, self._timeout_s) as response:
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


def _requested(address: str, timeout_s: float) -> HTTPResponse:
    """Request an address; its user and password are sent to its own host only. Raise OSError with the reason if that
    fails, or a text is served.
    """
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    url = urlunsplit(parts._replace(netloc=host, fragment=""))
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    if login:
        user, _, password = login.partition(":")
        passwords.add_password(None, f"{parts.scheme}://{host}/", unquote(user), unquote(password))
    opener = urllib.request.build_opener(_BasicLogin(passwords), _DigestLogin(passwords))
    try:
        response: HTTPResponse = opener.open(url, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"the server answers {error.code} {error.reason}".rstrip()) from error
    except urllib.error.URLError as error:
        raise OSError(getattr(error.reason, "strerror", None) or str(error.reason)) from error
    if (content_type := response.headers.get_content_type()).startswith("text/"):
        response.close()
        raise OSError(f"the server sends no image, but {content_type}")
    return response


class _BasicLogin(urllib.request.HTTPBasicAuthHandler):
    def http_error_401(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        with fp:  # which urllib leaves open
            return super().http_error_401(req, fp, code, msg, headers)


class _DigestLogin(urllib.request.HTTPDigestAuthHandler):
    def http_error_401(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        response = super().http_error_401(req, fp, code, msg, headers)
        if response:
            fp.close()
        return response
