"""Read back what runs left behind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remtta.deltas import DELTA
from remtta.deltas.delta import load_delta
from remtta.errors import RemttaError, UsageError
from remtta.files import is_locked
from remtta.runs.folder import PREDICTIONS, RECORD
from remtta.runs.rows import read_rows

_MOST_COMMON = 5


def describe_delta(path: Path) -> dict[str, Any]:
    """A delta's origin and size, and how far each layer moved.

    Raises:
        DeltaError: If it is no delta file.
    """
    delta = load_delta(path)
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(delta.tensors.items(), key=lambda item: _natural(item[0])):
        layers.setdefault(name.rpartition(".")[0], []).append(tensor.reshape(-1))
    moved = {name: torch.cat(tensors).double() for name, tensors in layers.items()}
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "model": delta.model,
        "model_options": dict(delta.model_options),
        "base_sha256": delta.base_sha256,
        "method": delta.method,
        "hyperparameters": dict(delta.hyperparameters),
        "frames": delta.frames,
        "updates": delta.updates,
        "created": delta.created,
        "remtta_version": delta.remtta_version,
        "tensors": len(delta.tensors),
        "parameters": sum(tensor.numel() for tensor in delta.tensors.values()),
        "layers": [
            {"layer": name, "rms": change.square().mean().sqrt().item(), "max": change.abs().max().item()}
            for name, change in moved.items()
        ],
    }


def describe_run(folder: Path) -> dict[str, Any]:
    """What a run folder holds: its record, its predictions in numbers, its delta.

    "alive" says whether a process is writing to it, and is None where nothing can tell.

    Raises:
        UsageError: If the folder holds no run.
        RemttaError: If its record is damaged.
    """
    if not (folder / RECORD).is_file():
        below = sorted(str(record.parent) for record in folder.glob(f"*/{RECORD}"))
        hint = f"; there are runs in {', '.join(below[:_MOST_COMMON])}" if below else ""
        raise UsageError(f"{folder} holds no run (no {RECORD}){hint}")
    try:
        content: dict[str, Any] = {"run": json.loads((folder / RECORD).read_text(encoding="utf-8"))}
    except ValueError as error:
        raise RemttaError(f"{folder / RECORD} is damaged: {error}") from error
    content["alive"] = is_locked(folder)
    if (folder / PREDICTIONS).is_file():
        content["predictions"] = _describe_predictions(folder / PREDICTIONS)
    if (folder / DELTA).is_file():
        content["delta"] = describe_delta(folder / DELTA)
    return content


def _describe_predictions(path: Path) -> dict[str, Any]:
    classes: Counter[tuple[int, str | None]] = Counter()
    entropy, errors, gaps = 0.0, 0, 0
    for row in read_rows(path):
        if "gap" in row:
            gaps += 1
        elif "error" in row:
            errors += 1
        else:
            classes[row["class"], row["label"]] += 1
            entropy += row["entropy"]
    predicted = classes.total()
    return {
        "predicted": predicted,
        "errors": errors,
        "gaps": gaps,
        "mean_entropy": entropy / predicted if predicted else None,
        "classes_predicted": len(classes),
        "most_common": [
            {"class": number, "label": label, "frames": frames}
            for (number, label), frames in classes.most_common(_MOST_COMMON)
        ],
    }


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
