"""Network addresses: supported protocols, and the reason why one did not open, which OpenCV does not report."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from remtta.errors import UsageError

_SCHEMES = "http https rtsp rtsps rtmp rtmpe rtmps rtmpt rtmpte rtmpts udp tcp tls rtp srtp srt rist mms mmsh mmst ftp"
SCHEMES = frozenset([*_SCHEMES.split(" "), "sftp", "file", "unix"])
"""Protocols of FFmpeg; OpenCV may be built with fewer."""

_TIMEOUT_S = 3.0
_PORTS = {"rtsp": 554, "rtsps": 322, "rtmp": 1935, "rtmps": 443}
_REFUSED = "the connection is refused: is the port right, and the server running?"
_NO_HOST = "there is no host of that name"


def check_scheme(address: str, shown: str) -> None:
    """Raise UsageError if the protocol is unknown; `shown` is the address without a password."""
    scheme = address.partition("://")[0]
    if scheme.lower() not in SCHEMES:
        known = "use rtsp://, http://, https://, rtmp:// or udp://"
        raise UsageError(f'{shown}: unknown protocol "{scheme}"; {known}; for a bucket, mount it or copy the folder')


def why_not_open(address: str) -> str | None:
    """Find out why an address did not open by a plain connection attempt; None if that is inconclusive."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:
        return "it is not a valid address"
    if not host:
        return None
    try:
        if parts.scheme.lower() in ("http", "https"):
            return _why_not_served(parts)
        if port and parts.scheme.lower() in _PORTS:
            socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return _REFUSED
    except socket.gaierror:
        return _NO_HOST
    except (OSError, ValueError, http.client.HTTPException):  # inconclusive
        return None
    return None


def _why_not_served(parts: SplitResult) -> str | None:
    """Request the first bytes, without following redirects, which could leak the password."""
    server = http.client.HTTPSConnection if parts.scheme.lower() == "https" else http.client.HTTPConnection
    login, _, _ = parts.netloc.rpartition("@")
    token = base64.b64encode(unquote(login).encode()).decode()
    with contextlib.closing(server(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)) as connection:
        place = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET", place, headers={"Authorization": f"Basic {token}"} if login else {})
        answer = connection.getresponse()
        status, kind = answer.status, answer.headers.get_content_type()
    if status >= 400:
        return f"the server answers {status} {http.client.responses.get(status, '')}".rstrip()
    return f"the server sends no video, but {kind}" if status < 300 and kind.startswith("text/") else None
