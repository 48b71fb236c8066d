"""Adapt a deployed Vision Transformer online, without labels, by Ranked Entropy Minimization."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remtta._version import __version__
from remtta.config import REMConfig
from remtta.errors import RemttaError
from remtta.options import RunOptions

if TYPE_CHECKING:
    from remtta.adapt import adapt_stream
    from remtta.deltas import Delta, apply_delta, load_base, load_delta, save_delta
    from remtta.methods.rem import REM
    from remtta.models import load_model
    from remtta.streams import open_stream

__all__ = [
    "REM",
    "Delta",
    "REMConfig",
    "RemttaError",
    "RunOptions",
    "__version__",
    "adapt_stream",
    "apply_delta",
    "load_base",
    "load_delta",
    "load_model",
    "open_stream",
    "save_delta",
]

# Imported when first used: torch takes seconds, and `remtta --help` does not need it.
_HOMES = {
    "REM": "remtta.methods.rem",
    "Delta": "remtta.deltas",
    "adapt_stream": "remtta.adapt",
    "apply_delta": "remtta.deltas",
    "load_base": "remtta.deltas",
    "load_delta": "remtta.deltas",
    "load_model": "remtta.models",
    "open_stream": "remtta.streams",
    "save_delta": "remtta.deltas",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
