"""How everything is run: frozen dataclasses whose fields say how they are options. Imports no torch and no typer."""

from __future__ import annotations

from remtta.options.evaluation import SCENARIOS, DataOptions, EvalOptions
from remtta.options.guard import Action, Answer, GuardOptions
from remtta.options.model import DEFAULT_MODEL, ModelOptions
from remtta.options.run import DEFAULT_BATCH_SIZE, RunOptions, Smooth
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
