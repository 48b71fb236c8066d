"""Options of commands and functions: frozen dataclasses whose fields describe themselves. Imports no torch and no
typer.
"""

from __future__ import annotations

from remtta.options.evaluation import SCENARIOS, DataOptions, EvalOptions
from remtta.options.guard_options import Action, Answer, GuardOptions
from remtta.options.model import DEFAULT_MODEL, ModelOptions
from remtta.options.run_options import DEFAULT_BATCH_SIZE, RunOptions, Smooth
from remtta.options.stream import LiveOptions, StreamOptions

__all__ = [
    "DEFAULT_BATCH_SIZE",
    "DEFAULT_MODEL",
    "SCENARIOS",
    "Action",
    "Answer",
    "DataOptions",
    "EvalOptions",
    "GuardOptions",
    "LiveOptions",
    "ModelOptions",
    "RunOptions",
    "Smooth",
    "StreamOptions",
]
