"""Hashes over named arrays, whichever library holds them; imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

Part = tuple[str, str, tuple[int, ...], memoryview]
"""Name, dtype as torch writes it, shape, and bytes of an array."""


def parts_sha256(parts: Iterable[Part]) -> str:
    """SHA-256 over the name, dtype, shape and bytes of arrays, given in the order of their names."""
    digest = hashlib.sha256()
    for name, dtype, shape, content in parts:
        digest.update(f"{name} {dtype} {shape}\n".encode())
        digest.update(content)
    return digest.hexdigest()
