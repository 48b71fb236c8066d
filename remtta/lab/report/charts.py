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
from remtta.lab.report.changes import find_changes
from remtta.lab.saved_frames import SAVED_FRAMES, SAVED_NAME, saved_path
from remtta.runs.folder import BATCHES, EVENTS, PREDICTIONS
from remtta.runs.inspection import LayerChange
from remtta.runs.reading import Row, printable, read_rows

MAX_FRAMES = 8  # pictures per run and heading

_MAX_BINS = 120  # per curve
_MAX_BARS, _MAX_LAYERS, _MAX_EVENTS, _MAX_TITLE = 12, 40, 200, 55

_BLUE, _ORANGE, _GREY = "#3a7fc4", "#d4781c", "#8a8a8a"
_RED = "#b5122b"
_EVENTS = {
    **dict.fromkeys(("rollback", "retired", "warning"), (_RED, "-")),
    "restart": (_ORANGE, "-"),
    "doubt": ("#8a4fc7", "-."),
    "trust": ("#2f9e63", "-"),
    **dict.fromkeys(("gap", "lost", "resumed"), (_GREY, ":")),
}  # colours and line styles
_ENTROPY, _LEAD = "entropy in nats", "lead in %"
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
    batches: list[Row] = field(default_factory=list)  # see `batches.jsonl`
    temperatures: list[tuple[int, float]] = field(default_factory=list)  # by frame
    changes: list[tuple[int, int]] = field(default_factory=list)  # the frames before and after each change
    at_changes: list[Row] = field(default_factory=list)  # the rows of these frames, or of saved ones close to them
    updates: int = 0  # that the weights had seen at the last prediction, since they were the source's
    last_reset: int = 0  # index of the first prediction since then

    def add(self, row: Row, num_frames: int) -> None:
        """Add the next prediction of a run of so many."""
        half = 2 * len(self.index) >= num_frames
        self.index.append(row["index"])
        updates = row.get("update", 0)
        self.last_reset = row["index"] if updates < self.updates else self.last_reset
        self.updates = updates
        self.entropy.append(row["entropy"])
        self.weight.append(0.0 if row.get("answered_by") == "source" else row.get("weight", 1.0))
        if "temperature" in row:
            self.temperatures.append((row["index"], row["temperature"]))
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
    if (path := folder / BATCHES).is_file():
        series.batches = list(read_rows(path))
        series.changes = find_changes(series.batches)
        series.at_changes = _rows_at(folder, series.changes)
    return series


def _rows_at(folder: Path, changes: Sequence[tuple[int, int]]) -> list[Row]:
    """Return the rows before and after each change that have a picture: of images, or of saved frames near it."""
    names = (SAVED_NAME.fullmatch(path.name) for path in (folder / SAVED_FRAMES).glob("*.png"))
    saved = sorted(int(name[1]) for name in names if name)
    near = {before: max((each for each in saved if each <= before), default=before) for before, _ in changes}
    near |= {after: min((each for each in saved if each >= after), default=after) for _, after in changes}
    rows = {row["index"]: row for row in _predictions(folder / PREDICTIONS) if row["index"] in {*near, *near.values()}}
    found: list[Row] = []
    for side, index in (
        (side, index) for change in changes for side, index in zip(("before", "after"), change, strict=True)
    ):
        row, other = rows.get(index), near[index]
        if row and "frame" in row:  # of a video, whose frames are not looked up
            picture = saved_path(folder / SAVED_FRAMES, other)
            row = {**rows[other], "source": str(picture)} if picture.is_file() else None
        if row:
            found.append({**row, "side": side})
    return found


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


@dataclass(frozen=True)
class Chart:
    """A chart of a run, the axes that it shares with other runs' charts, by quantity, and a text alternative."""

    figure: Figure
    axes: dict[str, Axes]
    text: str
    shared: str = "xy"  # dimensions of the axes


@rc_context(_STYLE)
def draw(names: Sequence[str], charts: Sequence[Chart | None]) -> list[str]:
    """Return the charts of runs as image elements, "" for none; all axes of a quantity get the same limits."""
    drawn = [chart for chart in charts if chart]
    for quantity in {quantity for chart in drawn for quantity in chart.axes}:
        for dimension in "xy":
            same = [chart.axes[quantity] for chart in drawn if quantity in chart.axes and dimension in chart.shared]
            limits = [getattr(axes, f"get_{dimension}lim")() for axes in same]
            for axes in same:
                getattr(axes, f"set_{dimension}lim")(min(low for low, _ in limits), max(high for _, high in limits))
    return [_image(name, chart) if chart else "" for name, chart in zip(names, charts, strict=True)]


def _image(name: str, chart: Chart) -> str:
    """Return a chart as an image element, titled with the run's name, with its text alternative."""
    name = printable(name)
    title = name if len(name) <= _MAX_TITLE else f"...{name[3 - _MAX_TITLE :]}"
    chart.figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    content = io.BytesIO()
    chart.figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    url = f"data:image/svg+xml;base64,{base64.b64encode(content.getvalue()).decode()}"
    return f'<img class="chart" src="{url}" alt="{escape(f"{name}. {printable(chart.text)}")}">'


def _axes(height: float, rows: int = 1) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True, squeeze=False)[:, 0]


def _mark_events(axes: Axes, events: Sequence[Row]) -> None:
    labelled = set()
    for event in events[:_MAX_EVENTS]:
        name = event["event"]
        colour, style = _EVENTS.get(name, (_GREY, "-"))
        label = None if name in labelled else name
        axes.axvline(event["frame"], color=colour, lw=1.2, ls=style, label=label, zorder=0)
        labelled.add(name)


def _legend_above(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)


@rc_context(_STYLE)
def over_time(series: Series) -> Chart:
    """Plot by frame the entropy and what of these is known and changes: the shift of the stream, the disagreement of
    both models, the temperature, the adapted model's weight, and the lead at the guard's decisions; with these
    decisions, and the stream's changes.
    """
    curves: dict[str, list[tuple[float, float]]] = {
        _ENTROPY: list(zip(series.index, series.entropy, strict=True)),
        "shift": _by_batch(series, "shift", 1),
        "disagreement in %": _by_batch(series, "disagreement", 100),
        "temperature": [*series.temperatures],
        "weight": list(zip(series.index, series.weight, strict=True)),
        _LEAD: [(event["frame"], 100 * event["lead"]) for event in series.events if event.get("lead") is not None],
    }
    curves = {
        name: points
        for name, points in curves.items()
        if name == _ENTROPY or (name == _LEAD and points) or len({value for _, value in points}) > 1
    }
    figure, panels = _axes(1.2 + 1.3 * len(curves), rows=len(curves))
    texts = []
    for (name, points), axes in zip(curves.items(), panels, strict=True):
        frames, values = (_binned(column) for column in zip(*points, strict=True))
        axes.set_ylabel(name)
        if name == _LEAD:
            axes.margins(y=0.2)
            axes.plot(*zip(*points, strict=True), "o", color=_ORANGE, ms=4)
            axes.axhline(0, color=_GREY, lw=0.8, zorder=0)
        else:
            axes.plot(frames, values, color=_BLUE, lw=1.4)
        if name == "weight":
            axes.set_ylim(-0.04, 1.04)
        elif name not in ("temperature", _LEAD):
            axes.set_ylim(bottom=0)
        _mark_events(axes, series.events)
        for number, (before, _) in enumerate(series.changes):
            axes.axvline(before + 1, color=_GREY, lw=1, ls="--", label=None if number else "stream changed", zorder=0)
        texts.append(
            f"{name} {values[0]:.2f} at first, {values[-1]:.2f} at last, between {values.min():.2f} and "
            f"{values.max():.2f}"
        )
    panels[-1].set_xlabel("frame")
    _legend_above(panels[0])
    counts = Counter(event["event"] for event in series.events)
    events = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
    changes = ", ".join(str(before + 1) for before, _ in series.changes) or "none found"
    return Chart(
        figure,
        dict(zip(curves, panels, strict=True)),
        f"Over {len(series.index)} frames: {'; '.join(texts)}. The adapted model's mean weight in the predictions is "
        f"{np.mean(series.weight):.2f}. Changes of the stream: {changes}. Events: {events}.",
    )


def _by_batch(series: Series, name: str, scale: float) -> list[tuple[float, float]]:
    """Return the middle frames of the batches that have a value, and the value times a scale."""
    return [
        (batch["frame"] + (batch["frames"] - 1) / 2, scale * batch[name]) for batch in series.batches if name in batch
    ]


@rc_context(_STYLE)
def accuracy(series: Series) -> Chart | None:
    """Plot the estimated accuracy of recent frames, for the predictions and for each model, if it changes."""
    if all(len(points) == 1 for points in series.estimates.values()):
        return None
    figure, (axes,) = _axes(2.6)
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
    return Chart(figure, {"estimate": axes}, f"Estimated accuracy of the last frames: {'; '.join(changes)}.")


@rc_context(_STYLE)
def classes(series: Series) -> Chart | None:
    """Plot how often each class was predicted, by both models or else in both halves of the run, if several were."""
    if len(series.by_half[0] + series.by_half[1]) == 1:
        return None
    if series.both_predicted:
        titles, counters = ("source model", "adapted model"), series.by_model
    else:
        titles, counters = ("first half", "second half"), series.by_half
    names = [name for name, _ in (counters[0] + counters[1]).most_common(_MAX_BARS)]
    shares = [[100 * counts[name] / max(1, counts.total()) for name in names] for counts in counters]
    figure, (axes,) = _axes(1.0 + 0.28 * len(names))
    centres = np.arange(len(names))
    for title, values, offset, colour in zip(titles, shares, (-0.2, 0.2), (_GREY, _BLUE), strict=True):
        axes.barh(centres + offset, values, 0.38, color=colour, label=title)
    axes.set_yticks(centres, [name if len(name) < 28 else f"{name[:26]}..." for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("share of predictions in %")
    _legend_above(axes)
    rows = "; ".join(f"{name}: {first:.1f} and {last:.1f} %" for name, first, last in zip(names, *shares, strict=True))
    text = f"Share of each class in the predictions: {titles[0]} and {titles[1]}. {rows}."
    return Chart(figure, {"share": axes}, text, shared="x")


@rc_context(_STYLE)
def layers(changes: Sequence[LayerChange]) -> Chart | None:
    """Plot the size of each layer's change in a delta, if sizes differ."""
    if len({layer["rms"] for layer in changes}) < 2:
        return None
    largest = sorted(range(len(changes)), key=lambda number: -changes[number]["rms"])[:_MAX_LAYERS]
    shown = [changes[number] for number in sorted(largest)]
    figure, (axes,) = _axes(1.0 + 0.17 * len(shown))
    axes.barh(range(len(shown)), [layer["rms"] for layer in shown], color=_BLUE)
    axes.set_yticks(range(len(shown)), [layer["layer"][-40:] for layer in shown], fontsize=7)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)  # long tick labels would overlap
    axes.set_xlabel("root mean square of the change")
    rows = "; ".join(f"{layer['layer']}: {layer['rms']:.2e}" for layer in shown)
    return Chart(figure, {"change": axes}, f"Root mean square change of each layer. {rows}.", shared="x")
