"""How far an evaluation has come: one file, replaced as a whole, from which it goes on after a kill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from remtta.errors import RemttaError
from remtta.files import write_atomically


@dataclass
class Position:
    """Where a run is: all that is before it is in `predictions.jsonl` and in the method's state.

    Attributes:
        visit: Number of the visit.
        start: Images of it that are done.
        index: Images of the run that are done.
        skip: Batches that the time-constrained scenario still only predicts.
        cost_ratio: The ratio that scenario goes by.
        adapted: Images that entered an update.
        skipped: Images left out because they could not be read.
        seconds: Time spent in the method.
        peak_bytes: Most memory so far.
    """

    visit: int = 0
    start: int = 0
    index: int = 0
    skip: int = 0
    cost_ratio: float | None = None
    adapted: int = 0
    skipped: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass
class Progress:
    """Everything an evaluation needs to go on.

    Attributes:
        finished: Records of the runs that are done, in order.
        position: Where the current run is.
        num_bytes: Size of `predictions.jsonl` at this point.
    """

    finished: list[dict[str, Any]] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    num_bytes: int = 0


def save_progress(path: Path, progress: Progress, state: Mapping[str, Tensor]) -> None:
    """Write progress and the method's state atomically.

    Raises:
        OutputError: If the disk refuses.
    """
    header = {"progress": json.dumps(asdict(progress))}
    content = save({name: tensor.contiguous() for name, tensor in state.items()}, metadata=header)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def load_progress(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """Read what `save_progress` wrote; the very start if nothing was written yet.

    Raises:
        RemttaError: If the file is damaged.
    """
    if not path.is_file():
        return Progress(), {}
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads(file.metadata()["progress"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise RemttaError(f"{path} is damaged ({error}); start again with --overwrite") from error
    return Progress(content["finished"], Position(**content["position"]), content["num_bytes"]), state
