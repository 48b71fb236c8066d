"""Requests to web servers: still images at an address."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from remtta.errors import FrameError
from remtta.streams.frames import CannotOpen, Picture, undecodable
from remtta.streams.images import has_suffix, image_suffixes, load_image

_MAX_PICTURE_BYTES = 64 * 2**20
_POLL_EVERY_S = 1.0


class NotServed(OSError):
    """A web server serves no picture at an address; the message says what it does."""


def check_host(address: str) -> None:
    """Raise CannotOpen if there is no host of an address's name, of which FFmpeg says only "Input/output error"."""
    with contextlib.suppress(ValueError, UnicodeError):  # not a valid address, which FFmpeg does say
        if host := urlsplit(address).hostname:
            try:
                socket.getaddrinfo(host, None)
            except socket.gaierror as error:
                raise CannotOpen("there is no host of that name") from error


def request(address: str, timeout_s: float) -> HTTPResponse:
    """Request an http address; its user and password are sent to its own host only. Raise NotServed if the server
    refuses, or sends a text; another OSError if there is no connection.
    """
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, f"{parts.scheme}://{host}/", unquote(user), unquote(password))
    opener = urllib.request.build_opener(_BasicLogin(passwords), _DigestLogin(passwords))
    try:
        url = urlunsplit(parts._replace(netloc=host, fragment=""))
        response: HTTPResponse = opener.open(url, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        raise NotServed(f"the server answers {error.code} {error.reason}".rstrip()) from error
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from error
    if (content_type := response.headers.get_content_type()).startswith("text/"):
        response.close()
        raise NotServed(f"the server sends no picture, but {content_type}")
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


def polling_interval(source: str | int, every_s: float | None) -> float | None:
    """Return the seconds between requests of an address of a still image: as chosen, or 1 if it ends like one; None for
    others.
    """
    if isinstance(source, int) or not source.lower().startswith(("http://", "https://")):
        return None
    path = source.partition("#")[0].partition("?")[0]
    return every_s or (_POLL_EVERY_S if has_suffix(path, image_suffixes()) else None)


def serves_video(address: str, timeout_s: float) -> bool:
    """Return True if a web server sends a video, not a still image; raise OSError if it sends neither."""
    with request(address, timeout_s) as response:
        return response.headers.get_content_maintype() in ("multipart", "video")


class PolledImage:
    """The images at an address, requested every `every_s` seconds until `closed`; one that has not changed is no new
    picture.
    """

    num_frames, codec = 0, ""

    def __init__(self, address: str, every_s: float, closed: threading.Event, timeout_s: float) -> None:
        self._address, self._every_s, self._closed, self._timeout_s = address, every_s, closed, timeout_s
        self._data = b""  # the newest image's file
        self._due = time.monotonic()

    def read(self) -> Picture | None:
        while not self._closed.wait(max(0.0, self._due - time.monotonic())):
            self._due = time.monotonic() + self._every_s
            with request(self._address, self._timeout_s) as response:
                data = response.read(_MAX_PICTURE_BYTES)
            if data != self._data:
                self._data = data
                return _picture(data)
        return None

    def close(self) -> None:
        pass


def _picture(data: bytes) -> Picture:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "image")).write_bytes(data)
        try:
            image = load_image(path)
        except FrameError:
            return undecodable(file=data)
    return Picture(image.size, lambda: image, file=data)
