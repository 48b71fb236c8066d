"""Charts as SVG that inherits its text and line colours from the page; drawn with matplotlib."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remtta.drawing import PLAIN_TEXT
from remtta.report.series import Series, binned

_INK = "#010203"
_BLUE, _ORANGE, _GREY = "#3a7fc4", "#d4781c", "#8a8a8a"
_EVENTS = {"rollback": "#c4504f", "retired": "#c4504f", "restart": _ORANGE, "doubt": _ORANGE, "trust": "#2f9e63"}
_WIDTH = 5.0  # inches
_MAX_BARS = 12
_MAX_LAYERS = 40
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

_numbers = itertools.count()


def _svg(figure: Figure, text: str) -> str:
    """Return a chart as an SVG element with its text alternative."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(content.getvalue())
    prefix = f"c{next(_numbers)}-"  # ids must be unique over all charts of a page
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


def _axes(height: float, rows: int = 1) -> tuple[Figure, Any]:
    """Return a figure and its axes, one above the other with a common x axis."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True)


def _mark_events(axes: Axes, events: Sequence[Mapping[str, Any]]) -> None:
    seen = set()
    for event in events[:200]:
        kind = event["event"]
        label = None if kind in seen else kind
        style = ":" if kind in ("gap", "lost", "resumed") else "-"
        axes.axvline(event["frame"], color=_EVENTS.get(kind, _GREY), lw=1, ls=style, label=label, zorder=0)
        seen.add(kind)


@rc_context(_STYLE)
def over_time(series: Series) -> str:
    """Plot the entropy, the adapted model's weight and the guard's decisions by frame."""
    figure, (top, bottom) = _axes(3.6, 2)
    frames = np.asarray(series.index)
    places, entropy = binned(series.entropy)
    at = np.interp(places, np.linspace(0, 1, len(frames)), frames)
    top.plot(at, entropy, color=_BLUE, lw=1.4)
    top.set_ylabel("entropy in nats")
    top.set_ylim(bottom=0)
    bottom.plot(at, binned(series.share)[1], color=_BLUE, lw=1.4, label="adapted model's weight")
    bottom.set_ylim(-0.04, 1.04)
    bottom.set_ylabel("weight in the answer")
    bottom.set_xlabel("frame")
    for axes in (top, bottom):
        _mark_events(axes, series.events)
    if leads := [(event["frame"], event["lead"]) for event in series.events if event.get("lead") is not None]:
        signal = bottom.twinx()
        signal.plot(*zip(*leads, strict=True), "o", color=_ORANGE, ms=3)
        signal.set_ylabel("lead at events (dots)")
    bottom.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)
    kinds = Counter(event["event"] for event in series.events)
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    return _svg(
        figure,
        f"Entropy over {len(frames)} frames: {entropy[0]:.2f} nats at first, {entropy[-1]:.2f} at last, between "
        f"{entropy.min():.2f} and {entropy.max():.2f}. The adapted model's mean weight in the answers is "
        f"{np.mean(series.share):.2f}. Events: {text}.",
    )


@rc_context(_STYLE)
def accuracy(series: Series) -> str:
    """Plot the estimated accuracy of recent frames, for the predictions and for each model."""
    figure, axes = _axes(2.4)
    for name, colour in (("source", _GREY), ("adapted", _ORANGE), ("answers", _BLUE)):
        if points := series.estimates.get(name):
            frames, values = zip(*points, strict=True)
            axes.step(frames, [100 * value for value in values], where="post", color=colour, lw=1.4, label=name)
    axes.set_ylim(0, 100)
    axes.set_xlabel("frame")
    axes.set_ylabel("estimate in %")
    _mark_events(axes, [event for event in series.events if event["event"] == "expired"])
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)
    text = [
        f"{name} {100 * points[0][1]:.0f} % at first, {100 * points[-1][1]:.0f} % at last"
        for name, points in sorted(series.estimates.items())
    ]
    return _svg(figure, f"Estimated accuracy of the last frames: {'; '.join(text)}.")


@rc_context(_STYLE)
def classes(series: Series) -> str:
    """Plot how often each class was predicted, before and after adaptation."""
    names = [name for name, _ in (series.halves[0] + series.halves[1]).most_common(_MAX_BARS)]
    titles = ("source model", "adapted model") if series.by_both else ("first half", "second half")
    shares = [[100 * counts[name] / max(1, counts.total()) for name in names] for counts in series.halves]
    figure, axes = _axes(0.8 + 0.28 * len(names))
    at = np.arange(len(names))
    for place, (title, values) in enumerate(zip(titles, shares, strict=True)):
        axes.barh(at + 0.4 * (place - 0.5), values, 0.38, color=(_GREY, _BLUE)[place], label=title)
    axes.set_yticks(at, [name if len(name) < 28 else f"{name[:26]}..." for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("share of predictions in %")
    axes.legend(loc="lower right")
    rows = "; ".join(f"{name}: {first:.1f} and {last:.1f} %" for name, first, last in zip(names, *shares, strict=True))
    return _svg(figure, f"Share of each class in the predictions: {titles[0]} and {titles[1]}. {rows}.")


@rc_context(_STYLE)
def layers(moved: Sequence[Mapping[str, Any]]) -> str:
    """Plot the size of each layer's change in a delta."""
    largest = sorted(range(len(moved)), key=lambda place: -moved[place]["rms"])[:_MAX_LAYERS]
    shown = [moved[place] for place in sorted(largest)]
    figure, axes = _axes(0.8 + 0.17 * len(shown))
    axes.barh(range(len(shown)), [layer["rms"] for layer in shown], color=_BLUE)
    axes.set_yticks(range(len(shown)), [layer["layer"][-40:] for layer in shown], fontsize=7)
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)  # long tick labels would overlap
    axes.set_xlabel("root mean square of the change")
    rows = "; ".join(f"{layer['layer']}: {layer['rms']:.2e}" for layer in shown)
    return _svg(figure, f"Root mean square change of each layer. {rows}.")
