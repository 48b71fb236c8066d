"""Pictures of an evaluation, with matplotlib."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remtta.drawing import AS_IT_IS, COLOURS, running_error
from remtta.evaluation.tally import ECE_BINS, Tallies, Tally, tally_rows
from remtta.evaluation.trial_writer import PLOTS
from remtta.files import write_atomically
from remtta.runs.folder import PREDICTIONS
from remtta.runs.reading import read_rows

_log = logging.getLogger("remtta")

_MAX_POINTS = 2000  # per visit
_MAX_STARTS = 50  # of labelled domains; some streams change domain at every image
_PANELS = 4  # reliability diagrams per row
_HALF_BAR = 0.45 / ECE_BINS


@rc_context(AS_IT_IS)
def draw_plots(folder: Path, results: Mapping[str, Any]) -> None:
    """Draw the methods' errors and calibration into `plots` in the folder; raise OutputError if that is impossible."""
    if not (folder / PREDICTIONS).exists():  # of an evaluation that was complete before
        _log.warning("without its %s, no plots are drawn", PREDICTIONS)
        return
    tallies = tally_rows(folder / PREDICTIONS)
    seeds = list(next(iter(results["methods"].values()))["seeds"])
    which = "" if len(seeds) == 1 else f" (seed {seeds[0]})"
    colours = _colours(list(results["methods"]))
    pictures: dict[str, Callable[[], Figure]] = {
        "error_per_domain": lambda: _error_per_domain(Figure(figsize=(12, 4.5)), results, colours),
        "running_error": lambda: _running_error(Figure(figsize=(12, 4.5)), folder, int(seeds[0]), which, colours),
        "reliability": lambda: draw_reliability(Figure(), tallies, colours),
    }
    for name, draw in pictures.items():
        figure, path = draw(), folder / PLOTS / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        figure.set_layout_engine("tight")
        write_atomically(path, partial(figure.savefig, format="png", dpi=110))


def _colours(methods: Sequence[str]) -> dict[str, Any]:
    """Return a colour for each method, the same in all plots, and fixed for the usual methods."""
    free = cycle(colormaps["tab20"](range(4, 20)))  # the first four resemble REM's and Tent's
    return {name: COLOURS.get(name) or next(free) for name in methods}


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _plain(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _error_per_domain(figure: Figure, results: Mapping[str, Any], colours: Mapping[str, Any]) -> Figure:
    axes = _plain(figure.subplots())
    methods: Mapping[str, Any] = results["methods"]
    domains = list(next(iter(methods.values()))["error"])
    width = 0.8 / len(methods)
    for place, (name, content) in enumerate(methods.items()):
        at = np.arange(len(domains)) + (place - (len(methods) - 1) / 2) * width
        spread = [value or 0.0 for value in content["error_std"].values()]
        axes.bar(
            at,
            list(content["error"].values()),
            width,
            yerr=spread if any(spread) else None,
            color=colours[name],
            label=f"{name} (mean {content['mean']:.1f})",
        )
    axes.set_xticks(range(len(domains)), domains, rotation=40, ha="right")
    axes.set_ylabel("error in %")
    _legend(axes)
    return figure


def _running_error(figure: Figure, folder: Path, seed: int, which: str, colours: Mapping[str, Any]) -> Figure:
    axes = _plain(figure.subplots())
    starts: list[tuple[int, str]] = []
    done: Counter[str] = Counter()
    for name, domains, missed in _visits(folder / PREDICTIONS, seed):
        if not done.keys() - {name}:
            starts += [(done[name] + place, domain) for place, domain in domains]
        step = math.ceil(len(missed) / _MAX_POINTS)
        places, label = range(done[name], done[name] + len(missed), step), None if name in done else name
        axes.plot(places, running_error(missed)[::step], color=colours[name], label=label, lw=1.2)
        done[name] += len(missed)
    starts = [next(same) for _, same in groupby(starts, key=lambda start: start[1])]
    mixed = len(starts) > _MAX_STARTS
    if not mixed:
        ends = [*(place for place, _ in starts[1:]), next(iter(done.values()))]
        for (start, domain), end in zip(starts, ends, strict=True):
            axes.axvline(start, color="#dddddd", lw=0.8, zorder=0)
            axes.text((start + end) / 2, 1.01, domain, rotation=40, fontsize=7, transform=axes.get_xaxis_transform())
    axes.set_xlabel(f"images{which}")
    axes.set_ylabel("error in %, running mean" + ("" if mixed else " in each domain"))
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _visits(path: Path, seed: int) -> Iterator[tuple[str, list[tuple[int, str]], bytearray]]:
    """Yield for each visit the method, the positions and names of the domains in it, and the misclassified images."""
    rows = (row for row in read_rows(path) if "error" not in row and row["seed"] == seed and row["phase"] == "adapt")
    for (name, _), visit in groupby(rows, key=lambda row: (row["method"], row["visit"])):
        starts: list[tuple[int, str]] = []
        missed = bytearray()
        for row in visit:
            if len(starts) <= _MAX_STARTS and (not starts or starts[-1][1] != row["domain"]):
                starts.append((len(missed), row["domain"]))
            missed.append(row["class"] != row["label_true"])
        yield name, starts, missed


def draw_reliability(figure: Figure, tallies: Tallies, colours: Mapping[str, Any]) -> Figure:
    """Plot accuracy against confidence, one panel per method, with the number of images per bin."""
    methods = list(dict.fromkeys(key.method for key in tallies))
    columns = min(_PANELS, len(methods))
    lines = math.ceil(len(methods) / columns)
    figure.set_size_inches(3.6 * columns, 3.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(methods) :]:
        axes.remove()
    for axes, name in zip(panels.flat, methods, strict=False):
        tally = Tally.total(tally for key, tally in tallies.items() if key.method == name and key.phase == "adapt")
        ece = tally.calibration_error
        tally.bins[-2] += tally.bins[-1]  # confidences of exactly 1 are counted in a separate bin
        tally.bins[-1] = 0
        numbers, images, confidence, accuracy = tally.reliability()
        places = (numbers + 0.5) / ECE_BINS
        _plain(axes).plot([0, 1], [0, 1], color="#bbbbbb", lw=1)
        axes.bar(places, accuracy, 2 * _HALF_BAR, color=colours[name], alpha=0.5)  # lines show on black
        axes.hlines(confidence, places - _HALF_BAR, places + _HALF_BAR, "#222222", lw=1)
        for place, count in zip(places, images, strict=True):
            axes.text(place, 1.03, _count(count), rotation=90, fontsize=6, ha="center", va="bottom")
        axes.set_title(f"{name}, ECE {100 * ece:.1f} %", fontsize=10)
        axes.set_xlabel("confidence")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.16)
        axes.set_yticks(np.linspace(0, 1, 6))
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy (bars), mean confidence (lines),\nand number of images (above)")
    return figure


def _count(images: float) -> str:
    return f"{images:,.0f}" if images < 10_000 else f"{images / 1000:,.0f}k"
