"""Load the model that options and a delta name."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from remtta.cli.progress import text_progress
from remtta.errors import UsageError
from remtta.options import DEFAULT_MODEL, ModelOptions

if TYPE_CHECKING:
    from torch import nn

    from remtta.deltas.delta import Delta

_log = logging.getLogger("remtta")


def import_uncollected(module: str) -> None:
    """Import a module that loads torch and timm, with Python's garbage collector disabled.

    It would repeatedly scan hundreds of thousands of objects, which takes a sixth of the time until the first
    prediction, and find next to nothing. The imported objects are permanent, so later collections skip them as well.
    """
    if module in sys.modules:
        return
    gc.disable()
    try:
        import_module(module)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries complain at exit about objects that still exist
        gc.enable()


def load_torch(module: str, model: ModelOptions, delta: Path | None = None) -> None:
    """Import a module that comes with torch, and say so, as it takes seconds; raise UsageError if the checkpoint or the
    delta is not there.
    """
    model.check_files()
    if delta is not None:
        from remtta.deltas.delta_files import delta_file

        delta_file(delta)
    if "torch" not in sys.modules:
        name = model.name or (DEFAULT_MODEL if delta is None else f"the model of {delta}")
        _log.info("loading torch and %s ...", name)
    import_uncollected(module)


def load_start(path: Path | None, output: Path, *, overwrite: bool) -> Delta | None:
    """Load the delta to start from, if any; raise UsageError if it lies in an output folder that is to be replaced."""
    from remtta.deltas.delta import load_delta

    if path is None:
        return None
    if overwrite and path.resolve().is_relative_to(output.resolve()):
        raise UsageError(f"--delta {path} is in {output}, which --overwrite would replace; choose another --output")
    return load_delta(path)


def load_classifier(model: ModelOptions, device: str, *, start: Delta | None = None, quiet: bool = False) -> nn.Module:
    """Load the model.

    If there is a `start`, the model is the one on which it was made. Unless `quiet`, progress is shown for the class
    embeddings of a zero-shot model. Raise RemttaError if the model cannot be loaded, or is not the delta's.
    """
    from remtta.deltas.base_model import base_options
    from remtta.models.loading import load

    if start is not None:
        model = base_options(start, model)
    with text_progress(hidden=quiet) as on_texts:
        return load(model, device=device, on_texts=on_texts)
