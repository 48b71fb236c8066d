"""Be quick and quiet when the hub of pretrained weights cannot be reached."""

from __future__ import annotations

import contextlib
import logging
import socket
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from huggingface_hub import constants


@contextlib.contextmanager
def reachable_or_offline() -> Iterator[None]:
    """Use only weights already downloaded if the hub's name cannot be resolved.

    Without this, a machine without a network waits most of a minute through
    retries, each with lines of its own on standard error.
    """
    log = logging.getLogger("huggingface_hub")
    level, offline = log.level, constants.HF_HUB_OFFLINE
    log.setLevel(logging.ERROR)
    try:
        constants.HF_HUB_OFFLINE = offline or not _resolves(constants.ENDPOINT)
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        log.setLevel(level)


def _resolves(address: str) -> bool:
    if "https" in urllib.request.getproxies():
        return True  # the proxy resolves names
    try:
        socket.getaddrinfo(urlsplit(address).hostname, 443)
    except OSError:
        return False
    return True
