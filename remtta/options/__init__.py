"""Options of commands and functions: frozen dataclasses whose fields describe themselves. Imports no torch or typer."""

from __future__ import annotations

from remtta.options.model import DEFAULT_MODEL as DEFAULT_MODEL
from remtta.options.model import ModelOptions as ModelOptions
from remtta.options.run_options import DEFAULT_BATCH_SIZE as DEFAULT_BATCH_SIZE
from remtta.options.run_options import Action as Action
from remtta.options.run_options import Answer as Answer
from remtta.options.run_options import GuardOptions as GuardOptions
from remtta.options.run_options import LiveOptions as LiveOptions
from remtta.options.run_options import RunOptions as RunOptions
from remtta.options.run_options import Smooth as Smooth
from remtta.options.run_options import StreamOptions as StreamOptions
