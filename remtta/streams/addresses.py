"""Addresses of network streams: which are taken."""

from __future__ import annotations

from remtta.errors import UsageError

_SCHEMES = "http https rtsp rtsps rtmp rtmpe rtmps rtmpt rtmpte rtmpts udp tcp tls rtp srtp srt rist mms mmsh mmst ftp"
SCHEMES = frozenset([*_SCHEMES.split(" "), "sftp", "file", "unix"])
"""Protocols of FFmpeg; which of them OpenCV has depends on how it was built."""


def check_scheme(address: str, shown: str) -> None:
    """Raise UsageError at a protocol that nothing knows; `shown` is the address without a password."""
    scheme = address.partition("://")[0]
    if scheme.lower() not in SCHEMES:
        known = "use rtsp://, http://, https://, rtmp:// or udp://"
        raise UsageError(
            f'{shown}: unknown protocol "{scheme}"; {known}; of a store, mount the bucket or copy the folder'
        )
