"""Read the files of runs and evaluations; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remtta.deltas import DELTA
from remtta.deltas.delta_files import read_arrays
from remtta.errors import UsageError
from remtta.files import is_locked
from remtta.runs.folder import PREDICTIONS, RECORD, RESULTS, SITE
from remtta.runs.reading import read_object, read_rows, reading
from remtta.streams.images import natural_key

_MAX_COMMON = _MAX_CLASSES = 5

_RESULT = ("mean", "error", "ece", "mean_std", "gain", "gain_se")
_STREAM = ("source", "exit_reason", "frames", "skipped", "updates")


def describe_delta(path: Path) -> dict[str, Any]:
    """Return a delta's origin and size, and how far each layer moved. Raise UsageError if the file does not exist;
    DeltaError if it is not a delta file.
    """
    fields, arrays = read_arrays(path)
    names = ("model", "model_options", "base_sha256", "method", "hyperparameters", "frames", "updates", "created")
    return {
        "path": fields["path"],
        "bytes": path.stat().st_size,
        **{name: fields[name] for name in (*names, "remtta_version")},
        "tensors": len(arrays),
        "parameters": sum(array.size for array in arrays.values()),
        "layers": _layers_moved(arrays),
        "classes": classes_moved(arrays),
    }


def _layers_moved(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return each layer's root mean square and largest change, in natural order of their names."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays, key=natural_key):
        parts.setdefault(name.rpartition(".")[0], []).append(arrays[name].reshape(-1).astype(np.float64))
    moved = []
    for layer, values in parts.items():
        change = np.concatenate(values)
        most = float(np.abs(change).max(initial=0.0))
        rms = most * float(np.sqrt(np.square(change / most).mean())) if most else 0.0  # squares may overflow
        moved.append({"layer": layer, "rms": rms, "max": most})
    return moved


def classes_moved(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the classes whose bias changed most, by number, for a head of which only the bias changed (centring).

    Norms, and heads trained as a whole, change their weight too.
    """
    alone = [name for name in arrays if name.endswith(".bias") and name.removesuffix("bias") + "weight" not in arrays]
    if not alone:
        return []
    change = np.mean([arrays[name].reshape(-1).astype(np.float64) for name in alone], axis=0)
    most = np.argsort(-np.abs(change), kind="stable")[:_MAX_CLASSES]
    return [{"class": int(number), "bias": float(change[number])} for number in most if change[number]]


def describe_folder(folder: Path) -> dict[str, Any]:
    """Describe the folder of a run, of the runs of many streams, or of an evaluation; use it within `reading`.

    "alive" is whether a process is writing to it, or None if that is unknown. Raise UsageError if the folder holds none
    of these; RemttaError if a record cannot be read.
    """
    if (folder / RECORD).is_file():
        return _describe_run(folder)
    if (folder / SITE).is_file():
        return _describe_site(folder)
    if (folder / RESULTS).is_file():
        return _describe_evaluation(folder)
    below = sorted(str(record.parent) for record in (*folder.glob(f"*/{RECORD}"), *folder.glob(f"*/{RESULTS}")))
    hint = f"; there are runs in {', '.join(below[:_MAX_COMMON])}" if below else ""
    raise UsageError(f"{folder} holds no run (no {RECORD}) and no evaluation (no {RESULTS}){hint}")


def _record(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise RemttaError, naming the file, if there is none."""
    with reading(path):
        return read_object(path)


def _describe_run(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = {"run": _record(folder / RECORD), "alive": is_locked(folder)}
    if (folder / PREDICTIONS).is_file():
        content["predictions"] = _describe_predictions(folder / PREDICTIONS)
    if (folder / DELTA).is_file():
        content["delta"] = describe_delta(folder / DELTA)
    return content


def _describe_site(folder: Path) -> dict[str, Any]:
    """Describe each stream of a site, preferring the stream's own record, which is newer."""
    site = _record(folder / SITE)
    streams = {name: _stream(folder / name, recorded) for name, recorded in site["streams"].items()}
    return {"site": {"exit_reason": site["exit_reason"], "streams": streams}, "alive": is_locked(folder)}


def _stream(folder: Path, recorded: Any) -> dict[str, Any]:
    stream = {name: recorded[name] for name in _STREAM}
    if recorded["exit_reason"] == "running" and (folder / RECORD).is_file():
        counts = _record(folder / RECORD)["counts"]
        stream |= {name: counts[name] for name in ("frames", "skipped", "updates")}
    return stream


def _describe_evaluation(folder: Path) -> dict[str, Any]:
    """Return an evaluation's status and settings, and the results of each method if it is complete."""
    record = _record(folder / RESULTS)
    results = {
        name: {entry: result.get(entry) for entry in _RESULT} for name, result in (record.get("methods") or {}).items()
    }
    evaluation = {"status": record["status"], "settings": record["settings"], "methods": results}
    return {"evaluation": evaluation, "alive": is_locked(folder)}


def _describe_predictions(path: Path) -> dict[str, Any]:
    classes: Counter[tuple[int, str | None]] = Counter()
    entropy, errors, gaps = 0.0, 0, 0
    for row in read_rows(path):
        if "gap" in row:
            gaps += 1
        elif "error" in row:
            errors += 1
        else:
            classes[row["class"], row.get("label")] += 1
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
            for (number, label), frames in classes.most_common(_MAX_COMMON)
        ],
    }
