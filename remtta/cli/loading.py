"""Which model the options and a delta together name, and that model."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remtta.cli.options.model import DEFAULT_MODEL
from remtta.cli.progress import text_progress

if TYPE_CHECKING:
    from torch import nn

    from remtta.deltas.delta import Delta


def import_uncollected(module: str) -> None:
    """Import a module that all of torch and timm comes with, without Python's garbage collector.

    It would go over hundreds of thousands of objects again and again, a sixth of the time until the first
    prediction, to find next to nothing. They are there to stay, and no later collection goes over them either.
    """
    if module in sys.modules:
        return
    gc.disable()
    try:
        import_module(module)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries complain at the end of what is still there
        gc.enable()


def model_arguments(given: Mapping[str, Any], delta: Delta | None = None) -> dict[str, Any]:
    """Arguments of `load_model`: the options, then what the delta was made on, then the default model.

    Args:
        given: Arguments of `load_model` from the command line; None, False or empty where not given.
        delta: The delta that the model is for, if there is one.

    Raises:
        DeltaError: If the delta was made on another model.
        UsageError: If the delta was made on a checkpoint that is not where it was.
    """
    from remtta.deltas.base import arguments_given, base_arguments

    if delta is not None:
        return base_arguments(delta, given)
    return {"name": DEFAULT_MODEL, **arguments_given(given)}


def load_adapted(run: Path, given: Mapping[str, Any], device: str) -> nn.Module:
    """The model of a run with what it learned; `given` as for `model_arguments`.

    Raises:
        RemttaError: If the run left no delta, or the model cannot be loaded or is not the one of the delta.
    """
    from remtta.deltas.delta import apply_delta, load_delta
    from remtta.models.loading import load_model

    delta = load_delta(run)
    model = load_model(**model_arguments(given, delta), device=device)
    apply_delta(model, delta)
    return model


def load_classifier(
    arguments: Mapping[str, Any], labels: Sequence[str] | None, device: str, *, adapts: bool, quiet: bool = False
) -> nn.Module:
    """The model, refused before its weights are loaded or downloaded if it `adapts` and cannot.

    The embeddings of a zero-shot model's classes show their progress, unless `quiet`.

    Raises:
        RemttaError: If it cannot be adapted or loaded.
    """
    from remtta.backbones.families import check_adaptable, check_name
    from remtta.models.loading import load_model

    if adapts:
        check_name(arguments["name"])
        check_adaptable(arguments["name"], arguments.get("model_kwargs"))
    named = arguments if labels is None else {**arguments, "labels": labels}
    with text_progress(hidden=quiet) as on_texts:
        return load_model(**named, device=device, on_texts=on_texts)
