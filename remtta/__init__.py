"""Adapt a deployed image classifier online, without labels, by Ranked Entropy Minimization."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remtta._version import __version__
from remtta.errors import RemttaError

if TYPE_CHECKING:
    from remtta.adapt.adapter import Adapter
    from remtta.adapt.frame_results import stream
    from remtta.adapt.one_stream import adapt_stream
    from remtta.deltas.base_model import load_base
    from remtta.deltas.delta import Delta, apply_delta, load_delta, save_delta
    from remtta.methods.settings import REMConfig
    from remtta.models.loading import load_model
    from remtta.models.preprocessing import Preprocessing
    from remtta.options import RunOptions
    from remtta.pipeline.build import REM
    from remtta.streams.sources import open_stream

__all__ = [
    "REM",
    "Adapter",
    "Delta",
    "Preprocessing",
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
    "stream",
]

# Imported when first used: torch takes seconds, and `remtta --help` does not need it.
_HOMES = {
    "REM": "remtta.pipeline.build",
    "Adapter": "remtta.adapt.adapter",
    "Delta": "remtta.deltas.delta",
    "Preprocessing": "remtta.models.preprocessing",
    "REMConfig": "remtta.methods.settings",
    "RunOptions": "remtta.options",
    "adapt_stream": "remtta.adapt.one_stream",
    "apply_delta": "remtta.deltas.delta",
    "load_base": "remtta.deltas.base_model",
    "load_delta": "remtta.deltas.delta",
    "load_model": "remtta.models.loading",
    "open_stream": "remtta.streams.sources",
    "save_delta": "remtta.deltas.delta",
    "stream": "remtta.adapt.frame_results",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
