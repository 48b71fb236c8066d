"""Adapt a deployed image classifier online, without labels, by Ranked Entropy Minimization."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remtta._version import __version__ as __version__
from remtta.errors import RemttaError as RemttaError
from remtta.moved import find_moved_modules

if TYPE_CHECKING:
    from remtta.adapt.adapter import Adapter as Adapter
    from remtta.adapt.frame_results import stream as stream
    from remtta.adapt.one_stream import adapt_stream as adapt_stream
    from remtta.deltas.base_model import load_base as load_base
    from remtta.deltas.delta import Delta as Delta
    from remtta.deltas.delta import apply_delta as apply_delta
    from remtta.deltas.delta import load_delta as load_delta
    from remtta.deltas.delta import save_delta as save_delta
    from remtta.errors import NotFiniteError as NotFiniteError
    from remtta.methods.settings.rem_config import REMConfig as REMConfig
    from remtta.models.loading import load_model as load_model
    from remtta.models.preprocessing import Preprocessing as Preprocessing
    from remtta.options import RunOptions as RunOptions
    from remtta.pipeline.build import REM as REM
    from remtta.runs.callbacks import Callback as Callback
    from remtta.streams.sources import open_stream as open_stream

find_moved_modules()

# Imported when first used: torch takes seconds, and `remtta --help` does not need it.
_HOMES = {
    "REM": "remtta.pipeline.build",
    "Adapter": "remtta.adapt.adapter",
    "Callback": "remtta.runs.callbacks",
    "Delta": "remtta.deltas.delta",
    "NotFiniteError": "remtta.errors",
    "Preprocessing": "remtta.models.preprocessing",
    "REMConfig": "remtta.methods.settings.rem_config",
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
__all__ = ["RemttaError", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
