"""Addresses of network streams: which are taken, and why one did not open, which OpenCV does not tell."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from remtta.errors import UsageError

_SCHEMES = "http https rtsp rtsps rtmp rtmpe rtmps rtmpt rtmpte rtmpts udp tcp tls rtp srtp srt rist mms mmsh mmst ftp"
SCHEMES = frozenset([*_SCHEMES.split(" "), "sftp", "file", "unix"])
"""Protocols of FFmpeg; which of them OpenCV has depends on how it was built."""

_TIMEOUT_S = 3.0
_PORTS = {"rtsp": 554, "rtsps": 322, "rtmp": 1935, "rtmps": 443}
_REFUSED = "the connection is refused: is the port right, and the server running?"
_NO_HOST = "there is no host of that name"


def check_scheme(address: str, shown: str) -> None:
    """Raise UsageError at a protocol that nothing knows; `shown` is the address without a password."""
    scheme = address.partition("://")[0]
    if scheme.lower() not in SCHEMES:
        known = "use rtsp://, http://, https://, rtmp:// or udp://"
        raise UsageError(
            f'{shown}: unknown protocol "{scheme}"; {known}; of a store, mount the bucket or copy the folder'
        )


def why_not_open(address: str) -> str | None:
    """Find out why an address did not open by asking once more in the plainest way; None if that does not tell."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:
        return "it is no valid address"
    if not host:
        return None
    try:
        if parts.scheme.lower() in ("http", "https"):
            return _why_not_served(address)
        if port and parts.scheme.lower() in _PORTS:
            socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return _REFUSED
    except socket.gaierror:
        return _NO_HOST
    except (OSError, ValueError, http.client.HTTPException):  # whatever else it is, this does not tell
        return None
    return None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and takes the password along only to the server that it is for."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        onward = super().redirect_request(req, fp, code, msg, headers, newurl)
        if onward is not None and _origin(onward.full_url) != _origin(req.full_url):
            onward.remove_header("Authorization")
        return onward


_OPENER = urllib.request.build_opener(_Redirects)


def _origin(address: str) -> tuple[str, str]:
    """Return what must be the same for a server to be the same: protocol, host and port."""
    parts = urlsplit(address)
    return parts.scheme.lower(), parts.netloc.rpartition("@")[2].lower()


def _why_not_served(address: str) -> str | None:
    parts = urlsplit(address)
    login, _, place = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit((parts.scheme, place, parts.path, parts.query, "")))
    if login:
        token = base64.b64encode(unquote(login).encode()).decode()
        request.add_header("Authorization", f"Basic {token}")
    try:
        with contextlib.closing(_OPENER.open(request, timeout=_TIMEOUT_S)) as answer:
            kind = answer.headers.get_content_type()
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answers {error.code} {http.client.responses.get(error.code, '')}".rstrip()
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from error
        return None
    return f"the server sends no video, but {kind}" if kind.partition("/")[0] == "text" else None
