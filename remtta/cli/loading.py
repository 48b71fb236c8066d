"""Which model the options and a delta together name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remtta.cli.options import DEFAULT_MODEL
from remtta.errors import UsageError

if TYPE_CHECKING:
    from remtta.deltas import Delta


def model_arguments(given: Mapping[str, Any], delta: Delta | None) -> dict[str, Any]:
    """What to build the model from: the options, then what the delta was made on, then the default.

    Args:
        given: name, checkpoint, use_ema, num_classes, model_kwargs and
            input_size from the command line; None or empty where not given.
        delta: The delta that the model is for, if there is one.

    Returns:
        The same names, ready for `load_model`.

    Raises:
        UsageError: If the delta was made on a checkpoint that is not where it was.
    """
    made_on = {"name": DEFAULT_MODEL} if delta is None else {**delta.model_options, "name": delta.model}
    if made_on.get("checkpoint") and not (given["checkpoint"] or Path(made_on["checkpoint"]).is_file()):
        raise UsageError(
            f"the delta was made on {made_on['checkpoint']}, which is not there; name that file with --checkpoint"
        )
    arguments = {name: value or made_on.get(name) or None for name, value in given.items()}
    return {**arguments, "use_ema": bool(arguments["use_ema"])}
