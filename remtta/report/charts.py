"""Time series of a run, and charts as SVG that inherits its text and line colours from the page."""

from __future__ import annotations

import io
import itertools
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remtta.drawing import PLAIN_TEXT
from remtta.files import JsonObject
from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.reading import Row, printable, read_rows

MAX_FRAMES = 8  # pictures per run and heading

_MAX_BINS = 120  # per curve
_MAX_BARS, _MAX_LAYERS, _MAX_EVENTS = 12, 40, 200

_INK = "#010203"
_BLUE, _ORANGE, _GREY = "#3a7fc4", "#d4781c", "#8a8a8a"
_EVENTS = {"rollback": "#c4504f", "retired": "#c4504f", "restart": _ORANGE, "doubt": _ORANGE, "trust": "#2f9e63"}
_WIDTH = 5.0  # inches
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: Any = {  # matplotlib types its keys as literals
    "svg.fonttype": "none",
    "svg.hashsalt": "remtta",
    "font.size": 10,
    **PLAIN_TEXT,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "legend.fontsize": 8,
}

_chart_numbers = itertools.count()


def _two_counters() -> tuple[Counter[str], Counter[str]]:
    return Counter(), Counter()


@dataclass
class Series:
    """A run over time."""

    index: array[int] = field(default_factory=lambda: array("q"))  # number of each predicted frame
    entropy: array[float] = field(default_factory=lambda: array("d"))  # entropy of its prediction, in nats
    weight: array[float] = field(default_factory=lambda: array("d"))  # the adapted model's weight in it
    # (frame, estimated accuracy) wherever it changed, of the predictions and of each model.
    estimates: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    by_half: tuple[Counter[str], Counter[str]] = field(default_factory=_two_counters)  # classes, in halves of the run
    by_model: tuple[Counter[str], Counter[str]] = field(default_factory=_two_counters)  # of the source, the adapted one
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


def _binned(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions from 0 to 1 and means of a series in a few bins of equal length."""
    bins = np.array_split(np.asarray(values, dtype=np.float64), min(_MAX_BINS, len(values)))
    ends = np.cumsum([len(part) for part in bins])
    centres = (ends - [len(part) / 2 for part in bins]) / len(values)
    return centres, np.array([part.mean() for part in bins])


def _svg(figure: Figure, text: str) -> str:
    """Return a chart as an SVG element with its text alternative."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(content.getvalue())
    prefix = f"c{next(_chart_numbers)}-"  # ids must be unique over all charts of a page
    for metadata in root.findall("{*}metadata"):
        root.remove(metadata)
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "id":
                element.set(name, prefix + value)
            elif name == f"{{{_LINK}}}href":
                element.set(name, f"#{prefix}{value[1:]}")
            else:
                element.set(name, value.replace(_INK, "currentColor").replace("url(#", f"url(#{prefix}"))
    for name in ("width", "height"):
        del root.attrib[name]
    root.set("role", "img")
    root.set("aria-label", text)
    return ElementTree.tostring(root, encoding="unicode")


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _mark_events(axes: Axes, events: Sequence[Row]) -> None:
    labelled = set()
    for event in events[:_MAX_EVENTS]:
        name = event["event"]
        style = ":" if name in ("gap", "lost", "resumed") else "-"
        label = None if name in labelled else name
        axes.axvline(event["frame"], color=_EVENTS.get(name, _GREY), lw=1, ls=style, label=label, zorder=0)
        labelled.add(name)


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)


@rc_context(_STYLE)
def over_time(series: Series) -> str:
    """Plot the entropy, the adapted model's weight and the guard's decisions by frame."""
    figure = _figure(3.6)
    top, bottom = figure.subplots(2, sharex=True)
    frames = np.asarray(series.index)
    positions, entropy = _binned(series.entropy)
    centres = np.interp(positions, np.linspace(0, 1, len(frames)), frames)
    top.plot(centres, entropy, color=_BLUE, lw=1.4)
    top.set_ylabel("entropy in nats")
    top.set_ylim(bottom=0)
    bottom.plot(centres, _binned(series.weight)[1], color=_BLUE, lw=1.4, label="adapted model's weight")
    bottom.set_ylim(-0.04, 1.04)
    bottom.set_ylabel("weight in the answer")
    bottom.set_xlabel("frame")
    for axes in (top, bottom):
        _mark_events(axes, series.events)
    if leads := [(event["frame"], event["lead"]) for event in series.events if event.get("lead") is not None]:
        lead_axes = bottom.twinx()
        lead_axes.plot(*zip(*leads, strict=True), "o", color=_ORANGE, ms=3)
        lead_axes.set_ylabel("lead at events (dots)")
    _legend_above(bottom)
    counts = Counter(event["event"] for event in series.events)
    events = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    return _svg(
        figure,
        f"Entropy over {len(frames)} frames: {entropy[0]:.2f} nats at first, {entropy[-1]:.2f} at last, between "
        f"{entropy.min():.2f} and {entropy.max():.2f}. The adapted model's mean weight in the answers is "
        f"{np.mean(series.weight):.2f}. Events: {events}.",
    )


@rc_context(_STYLE)
def accuracy(series: Series) -> str:
    """Plot the estimated accuracy of recent frames, for the predictions and for each model."""
    figure = _figure(2.4)
    axes = figure.subplots()
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
    return _svg(figure, f"Estimated accuracy of the last frames: {'; '.join(changes)}.")


@rc_context(_STYLE)
def classes(series: Series) -> str:
    """Plot how often each class was predicted, by both models or else in both halves of the run."""
    if series.both_predicted:
        titles, counters = ("source model", "adapted model"), series.by_model
    else:
        titles, counters = ("first half", "second half"), series.by_half
    names = [name for name, _ in (counters[0] + counters[1]).most_common(_MAX_BARS)]
    shares = [[100 * counts[name] / max(1, counts.total()) for name in names] for counts in counters]
    figure = _figure(0.8 + 0.28 * len(names))
    axes = figure.subplots()
    centres = np.arange(len(names))
    for title, values, offset, colour in zip(titles, shares, (-0.2, 0.2), (_GREY, _BLUE), strict=True):
        axes.barh(centres + offset, values, 0.38, color=colour, label=title)
    axes.set_yticks(centres, [name if len(name) < 28 else f"{name[:26]}..." for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("share of predictions in %")
    axes.legend(loc="lower right")
    rows = "; ".join(f"{name}: {first:.1f} and {last:.1f} %" for name, first, last in zip(names, *shares, strict=True))
    return _svg(figure, f"Share of each class in the predictions: {titles[0]} and {titles[1]}. {rows}.")


@rc_context(_STYLE)
def layers(changes: Sequence[JsonObject]) -> str:
    """Plot the size of each layer's change in a delta."""
    largest = sorted(range(len(changes)), key=lambda number: -changes[number]["rms"])[:_MAX_LAYERS]
    shown = [changes[number] for number in sorted(largest)]
    figure = _figure(0.8 + 0.17 * len(shown))
    axes = figure.subplots()
    axes.barh(range(len(shown)), [layer["rms"] for layer in shown], color=_BLUE)
    axes.set_yticks(range(len(shown)), [layer["layer"][-40:] for layer in shown], fontsize=7)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)  # long tick labels would overlap
    axes.set_xlabel("root mean square of the change")
    rows = "; ".join(f"{layer['layer']}: {layer['rms']:.2e}" for layer in shown)
    return _svg(figure, f"Root mean square change of each layer. {rows}.")
