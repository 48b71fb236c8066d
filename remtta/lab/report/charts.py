"""Time series of a run, and charts of them as SVG images with a text alternative."""

from __future__ import annotations

import base64
import io
import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remtta.lab.drawing import STYLE
from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.inspection import LayerChange
from remtta.runs.reading import Row, printable, read_rows

MAX_FRAMES = 8  # pictures per run and heading

_MAX_BINS = 120  # per curve
_MAX_BARS, _MAX_LAYERS, _MAX_EVENTS = 12, 40, 200

_BLUE, _ORANGE, _GREY = "#3a7fc4", "#d4781c", "#8a8a8a"
_EVENTS = {"rollback": "#c4504f", "retired": "#c4504f", "restart": _ORANGE, "doubt": _ORANGE, "trust": "#2f9e63"}
_WIDTH = 5.0  # inches
_STYLE = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "remtta", "legend.fontsize": 8}


@dataclass
class Series:
    """A run over time."""

    index: list[int] = field(default_factory=list)  # number of each predicted frame
    entropy: list[float] = field(default_factory=list)  # entropy of its prediction, in nats
    weight: list[float] = field(default_factory=list)  # the adapted model's weight in it
    # (frame, estimated accuracy) wherever it changed, of the predictions and of each model.
    estimates: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    by_half: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )  # classes, in halves of the run
    by_model: tuple[Counter[str], Counter[str]] = field(
        default_factory=lambda: (Counter(), Counter())
    )  # of the source, the adapted one
    both_predicted: bool = False  # whether the source model predicted, too
    # Some images, not of videos, on which the two models disagreed, spread over the run.
    differing: list[Row] = field(default_factory=list)
    num_differing: int = 0  # number of frames on which they disagreed
    unsure: list[Row] = field(default_factory=list)  # the images, not of videos, of lowest probability
    events: list[Row] = field(default_factory=list)  # decisions, and gaps

    def add(self, row: Row, num_frames: int) -> None:
        """Add the next prediction of a run of so many."""
        half = 2 * len(self.index) >= num_frames
        self.index.append(row["index"])
        self.entropy.append(row["entropy"])
        self.weight.append(0.0 if row.get("answered_by") == "source" else row.get("weight", 1.0))
        for name, estimate in (row.get("estimate") or {}).items():
            if name.startswith("gain"):
                continue
            points = self.estimates.setdefault(name, [])
            if not points or points[-1][1] != estimate:
                points.append((row["index"], estimate))
        self.num_differing += _models_differ(row)
        self.both_predicted |= "each" in row or "weight" in row
        self.by_half[half][class_name(row)] += 1
        models: dict[str, Row] = row.get("each") or {}
        unsmoothed: Row = row.get("raw", row)
        for counts, model in zip(self.by_model, ("source", "adapted"), strict=True):
            counts[class_name(models.get(model, unsmoothed))] += 1
        if "frame" not in row:
            insort(self.unsure, row, key=lambda other: other["prob"])
            del self.unsure[MAX_FRAMES:]


def read_series(folder: Path, num_frames: int) -> Series:
    """Read a run's rows, of which `num_frames` are predictions, and events; raise RemttaError if one is damaged."""
    events, path = folder / EVENTS, folder / PREDICTIONS
    series = Series(events=list(read_rows(events)) if events.is_file() else [])
    if path.is_file():
        for row in _predictions(path):
            series.add(row, num_frames)
        if series.num_differing:
            differing = (row for row in _predictions(path) if _models_differ(row) and "frame" not in row)
            step = max(1, series.num_differing // MAX_FRAMES)
            series.differing = list(itertools.islice(differing, 0, step * MAX_FRAMES, step))
    return series


def class_name(row: Row) -> str:
    """Return the label of a row's class, printable, or its number."""
    return printable(str(row.get("label") or row["class"]))


def _predictions(path: Path) -> Iterator[Row]:
    return (row for row in read_rows(path) if "error" not in row and "gap" not in row)


def _models_differ(row: Row) -> bool:
    """Return whether the models disagree; older runs recorded both even where they agreed."""
    models = row.get("each") or {}
    return {"adapted", "source"} <= models.keys() and models["adapted"]["class"] != models["source"]["class"]


def _binned(values: Sequence[float]) -> np.ndarray:
    """Return means of a series in a few bins of about equal length."""
    return np.array([part.mean() for part in np.array_split(np.asarray(values), min(_MAX_BINS, len(values)))])


def _image(figure: Figure, text: str) -> str:
    """Return a chart as an image element with its text alternative."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    url = f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
    return f'<img class="chart" src="{url}" alt="{escape(printable(text))}">'


def _axes(height: float, rows: int = 1) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True, squeeze=False)[:, 0]


def _mark_events(axes: Axes, events: Sequence[Row]) -> None:
    labelled = set()
    for event in events[:_MAX_EVENTS]:
        name = event["event"]
        style = ":" if name in ("gap", "lost", "resumed") else "-"
        label = None if name in labelled else name
        axes.axvline(event["frame"], color=_EVENTS.get(name, _GREY), lw=1, ls=style, label=label, zorder=0)
        labelled.add(name)


def _legend_above(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)


@rc_context(_STYLE)
def over_time(series: Series) -> str:
    """Plot the entropy, the guard's decisions and, unless it is constant, the adapted model's weight by frame."""
    leads = [(event["frame"], event["lead"]) for event in series.events if event.get("lead") is not None]
    has_weight = len(set(series.weight)) > 1 or bool(leads)
    figure, panels = _axes(3.6 if has_weight else 2.2, rows=1 + has_weight)
    frames, entropy = _binned(series.index), _binned(series.entropy)
    panels[0].plot(frames, entropy, color=_BLUE, lw=1.4)
    panels[0].set_ylabel("entropy in nats")
    panels[0].set_ylim(bottom=0)
    for axes in panels:
        _mark_events(axes, series.events)
    if has_weight:
        panels[1].plot(frames, _binned(series.weight), color=_BLUE, lw=1.4, label="adapted model's weight")
        panels[1].set_ylim(-0.04, 1.04)
        panels[1].set_ylabel("weight")
    if leads:
        lead_axes = panels[1].twinx()
        lead_axes.plot(*zip(*leads, strict=True), "o", color=_ORANGE, ms=3)
        lead_axes.set_ylabel("lead at events (dots)")
    panels[-1].set_xlabel("frame")
    _legend_above(panels[-1])
    counts = Counter(event["event"] for event in series.events)
    events = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    return _image(
        figure,
        f"Entropy over {len(series.index)} frames: {entropy[0]:.2f} nats at first, {entropy[-1]:.2f} at last, between "
        f"{entropy.min():.2f} and {entropy.max():.2f}. The adapted model's mean weight in the predictions is "
        f"{np.mean(series.weight):.2f}. Events: {events}.",
    )


@rc_context(_STYLE)
def accuracy(series: Series) -> str:
    """Plot the estimated accuracy of recent frames, for the predictions and for each model; "" if it never changes."""
    if all(len(points) == 1 for points in series.estimates.values()):
        return ""
    figure, (axes,) = _axes(2.4)
    for name, colour in (("source", _GREY), ("adapted", _ORANGE), ("answers", _BLUE)):
        if points := series.estimates.get(name):
            frames, values = zip(*points, strict=True)
            axes.step(frames, [100 * value for value in values], where="post", color=colour, lw=1.4, label=name)
    axes.set_ylim(0, 100)
    axes.set_xlabel("frame")
    axes.set_ylabel("estimate in %")
    _mark_events(axes, [event for event in series.events if event["event"] == "expired"])
    _legend_above(axes)
    changes = [
        f"{name} {100 * points[0][1]:.0f} % at first, {100 * points[-1][1]:.0f} % at last"
        for name, points in sorted(series.estimates.items())
    ]
    return _image(figure, f"Estimated accuracy of the last frames: {'; '.join(changes)}.")


@rc_context(_STYLE)
def classes(series: Series) -> str:
    """Plot how often each class was predicted, by both models or else in both halves of the run; "" for one class."""
    if len(series.by_half[0] + series.by_half[1]) == 1:
        return ""
    if series.both_predicted:
        titles, counters = ("source model", "adapted model"), series.by_model
    else:
        titles, counters = ("first half", "second half"), series.by_half
    names = [name for name, _ in (counters[0] + counters[1]).most_common(_MAX_BARS)]
    shares = [[100 * counts[name] / max(1, counts.total()) for name in names] for counts in counters]
    figure, (axes,) = _axes(0.8 + 0.28 * len(names))
    centres = np.arange(len(names))
    for title, values, offset, colour in zip(titles, shares, (-0.2, 0.2), (_GREY, _BLUE), strict=True):
        axes.barh(centres + offset, values, 0.38, color=colour, label=title)
    axes.set_yticks(centres, [name if len(name) < 28 else f"{name[:26]}..." for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("share of predictions in %")
    _legend_above(axes)
    rows = "; ".join(f"{name}: {first:.1f} and {last:.1f} %" for name, first, last in zip(names, *shares, strict=True))
    return _image(figure, f"Share of each class in the predictions: {titles[0]} and {titles[1]}. {rows}.")


@rc_context(_STYLE)
def layers(changes: Sequence[LayerChange]) -> str:
    """Plot the size of each layer's change in a delta."""
    largest = sorted(range(len(changes)), key=lambda number: -changes[number]["rms"])[:_MAX_LAYERS]
    shown = [changes[number] for number in sorted(largest)]
    figure, (axes,) = _axes(0.8 + 0.17 * len(shown))
    axes.barh(range(len(shown)), [layer["rms"] for layer in shown], color=_BLUE)
    axes.set_yticks(range(len(shown)), [layer["layer"][-40:] for layer in shown], fontsize=7)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)  # long tick labels would overlap
    axes.set_xlabel("root mean square of the change")
    rows = "; ".join(f"{layer['layer']}: {layer['rms']:.2e}" for layer in shown)
    return _image(figure, f"Root mean square change of each layer. {rows}.")
