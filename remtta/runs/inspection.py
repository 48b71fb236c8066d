"""Read and summarise runs and deltas, for `remtta inspect` and reports; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from remtta.deltas import DELTA
from remtta.deltas.delta_files import read_arrays
from remtta.errors import UsageError, counted
from remtta.files import is_locked
from remtta.options.loaders import is_model_file
from remtta.runs.folder import PREDICTIONS, RECORD, RESULTS, STREAM_GROUP
from remtta.runs.reading import aligned, read_object, read_rows, reading, shown_estimates
from remtta.streams.listing import natural_key

Facts = dict[str, str]
"""Lines of text by their heading."""

Content = dict[str, Any]
"""The JSON object that `inspect --json` prints; its records were read from a folder."""


@dataclass(frozen=True)
class Inspection:
    """The output of `inspect`, as JSON and as lines of text."""

    content: Content
    lines: list[str]


class LayerChange(TypedDict):
    """The distance that a layer moved."""

    layer: str
    rms: float
    max: float


_MAX_COMMON = _MAX_CLASSES = 5

_RARE_COUNTS = {
    "not_adapted": "only predicted",
    "in_order": "that --smooth auto would smooth",
    "dropped": "dropped for newer ones",
    "gaps": "gaps",
}


def kind_of(folder: Path) -> str:
    """Return the file that says what a folder holds: RECORD, STREAM_GROUP or RESULTS; raise UsageError for none."""
    kinds = RECORD, STREAM_GROUP, RESULTS
    if found := next((name for name in kinds if (folder / name).is_file()), None):
        return found
    below = sorted(str(record.parent) for name in (RECORD, RESULTS) for record in folder.glob(f"*/{name}"))
    hint = f"; there are runs in {', '.join(below[:_MAX_COMMON])}" if below else ""
    raise UsageError(f"{folder} holds no run (no {RECORD}) and no evaluation (no {RESULTS}){hint}")


def read_content(path: Path) -> Content:
    """Return the object in a JSON file; raise RemttaError, naming the file, if it cannot be read or is damaged."""
    with reading(path):
        return read_object(path)


def inspect_run(folder: Path) -> Inspection:
    """Describe the folder of a run; use it within `reading`. Raise RemttaError if a file cannot be read."""
    content = describe_run(folder)
    return Inspection(content, [*fact_lines(run_facts(content)), *_delta_lines(content.get("delta"))])


def inspect_delta(path: Path) -> Inspection:
    """Describe a delta; raise as `describe_delta`."""
    delta = describe_delta(path)
    return Inspection({"delta": delta}, _delta_lines(delta))


# --- Descriptions, ready for JSON ------------------------------------------------------------------------------------


def describe_run(folder: Path) -> Content:
    """Describe a run; "alive" is whether a process is writing to its folder, or None if that is unknown."""
    content: Content = {"run": read_content(folder / RECORD), "alive": is_locked(folder)}
    if (folder / PREDICTIONS).is_file():
        content["predictions"] = _describe_predictions(folder / PREDICTIONS)
    if (folder / DELTA).is_file():
        content["delta"] = describe_delta(folder / DELTA)
    return content


def _describe_predictions(path: Path) -> Content:
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


def describe_delta(path: Path) -> Content:
    """Return a delta's origin and size, and how far each layer moved. Raise UsageError if the file does not exist;
    DeltaError if it is not a delta file.
    """
    if is_model_file(path):
        raise UsageError(f"{path} is a whole model; name a delta, or the folder of a run")
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
        "head": [name.removesuffix(".bias") for name in _head_biases(arrays)],
    }


def _layers_moved(arrays: Mapping[str, np.ndarray]) -> list[LayerChange]:
    """Return each layer's root mean square and largest change, in natural order of their names."""
    layers: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays, key=natural_key):
        layers.setdefault(name.rpartition(".")[0], []).append(arrays[name].reshape(-1).astype(np.float64))
    moved: list[LayerChange] = []
    for layer, changes in layers.items():
        change = np.concatenate(changes)
        largest = float(np.abs(change).max(initial=0.0))
        rms = largest * float(np.sqrt(np.square(change / largest).mean())) if largest else 0.0  # squares may overflow
        moved.append({"layer": layer, "rms": rms, "max": largest})
    return moved


def classes_moved(arrays: Mapping[str, np.ndarray]) -> list[Content]:
    """Return the classes whose bias changed most, by number, for a head of which only the bias changed (centering)."""
    if not (biases := _head_biases(arrays)):
        return []
    change = np.mean([arrays[name].reshape(-1).astype(np.float64) for name in biases], axis=0)
    largest = np.argsort(-np.abs(change), kind="stable")[:_MAX_CLASSES]
    return [{"class": int(number), "bias": float(change[number])} for number in largest if change[number]]


def _head_biases(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return the biases that changed without a weight; norms, and heads trained as a whole, change their weight too."""
    return [name for name in arrays if name.endswith(".bias") and name.removesuffix("bias") + "weight" not in arrays]


# --- The same in a few lines of text ---------------------------------------------------------------------------------


def fact_lines(facts: Facts) -> list[str]:
    """Return a line of text for each fact."""
    return [f"{name:<12} {text}" for name, text in facts.items()]


def state_of(reported: str, alive: bool | None, end: str = "killed") -> str:
    """Return a run's state; if it says "running" but no process is writing to it, say that it was interrupted."""
    return f"was {end}; --resume continues it" if reported == "running" and alive is False else reported


def run_facts(content: Content) -> Facts:
    """Return the facts of a run, from `describe_run`."""
    run = content["run"]
    counts, timing, model, method = run["counts"], run["timing"], run["model"], run["method"]
    learns = bool(run.get("adapted", True) or counts["updates"])
    rare = "".join(f"; {counts[name]} {text}" for name, text in _RARE_COUNTS.items() if counts.get(name))
    facts = {
        "run": f"{state_of(run['exit_reason'], content['alive'])}; started {timing['started']}, {timing['seconds']} s, "
        f"{timing['images_per_s']} images/s on {run['environment']['device']}",
        "source": f"{run['source']['name']} ({run['source']['kind']})",
        "model": f"{model.get('name') or 'unknown'}, {model['num_classes']} classes, base {model['base_sha256'][:12]}",
        "method": f"{method['name']}, batch {method['batch_size']}{_settings(method) if learns else ''}",
        "frames": f"{counts['frames']}, {counts['skipped']} skipped; {counted(counts['updates'], 'update')}{rare}",
        "guard": _guard(run.get("guard"), run.get("options") or {}) if learns else "none",
    }
    if times := (centering := run.get("centering") or {}).get("times_uncentered"):
        at_end = ", and still at the end" if centering.get("uncentered") else ""
        facts["centering"] = f"{counted(times, 'time')} mostly left out for few classes{at_end}"
    if estimates := (run.get("accuracy") or {}).get("last"):
        facts["accuracy"] = f"of the last frames, estimated: {shown_estimates(estimates)}"
    if predictions := content.get("predictions"):
        facts |= _prediction_facts(predictions)
        readable = counts["frames"] - counts["skipped"]
        if run["exit_reason"] != "running" and predictions["predicted"] != readable:
            facts["predictions"] += f"; run.json counts {readable}, so rows were lost or added"
    return facts


def _guard(guard: Content | None, options: Content) -> str:
    if guard is None:
        return "none; the adapted model predicts"
    requested = options.get("guard") or {}
    parts = [f"{name} {requested[name]}" for name in ("action", "answer") if name in requested]
    if lead := guard.get("lead"):
        parts.append(f"lead {100 * lead:+z.0f} %")
    parts.append(counted(guard.get("alarms", 0), "alarm"))
    parts.append(f"{counted(guard.get('answered_by_source', 0), 'frame')} predicted by the source")
    if by_both := guard.get("answered_by_both", 0):
        parts.append(f"{by_both} by both models")
    return ", ".join(parts) + ("; adaptation has ended" if guard.get("retired") else "")


def _settings(method: Content) -> str:
    settings = []
    if method.get("lr") is not None:
        settings.append(f"lr {method['lr']:g} ({method.get('optimizer')})")
    if method.get("mask_ratios") is not None:
        settings.append(f"mask ratios {' '.join(f'{ratio:g}' for ratio in method['mask_ratios'])}")
    if method.get("ranking_weight") is not None:
        settings.append(f"lambda {method['ranking_weight']:g}")
    if method.get("anchor"):
        settings.append(f"anchor {method['anchor']:.3g}")
    return "".join(f", {setting}" for setting in settings)


def _prediction_facts(predictions: Content) -> Facts:
    if not predictions["predicted"]:
        return {"predictions": "none"}
    common = [f"{entry['label'] or entry['class']} ({entry['frames']})" for entry in predictions["most_common"]]
    return {
        "predictions": f"{predictions['predicted']}, mean entropy {predictions['mean_entropy']:.3f} nats, "
        f"{predictions['classes_predicted']} classes",
        "most common": "; ".join(common),
    }


def _delta_lines(delta: Content | None) -> list[str]:
    if delta is None:
        return []
    rows = [(layer["layer"], f"{layer['rms']:.2e}", f"{layer['max']:.2e}") for layer in delta["layers"]]
    moved = ", ".join(f"{change['class']} ({change['bias']:+z.2f})" for change in delta["classes"])
    return [
        f"delta        {counted(delta['tensors'], 'tensor')}, {delta['parameters']} parameters, {delta['bytes']} bytes",
        f"made         {delta['created']} by remtta {delta['remtta_version']}, {delta['method']}, "
        f"{counted(delta['updates'], 'update')} on {counted(delta['frames'], 'frame')} from the source weights",
        f"base         {delta['model']}, {delta['base_sha256'][:12]}",
        "",
        *aligned([("layer", "rms change", "largest change"), *rows]),
        *(["", f"centered head, largest changes of the bias: class {moved}"] if moved else []),
    ]
