"""Pictures of an evaluation, with matplotlib."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle, groupby
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

from remtta.files import write_atomically
from remtta.lab.drawing import COLOURS, STYLE, running_error
from remtta.lab.evaluation.results import Results
from remtta.lab.evaluation.tally import ECE_BINS, Tallies, Tally, tally_rows
from remtta.lab.evaluation.trial_writer import PLOTS
from remtta.runs.folder import PREDICTIONS
from remtta.runs.reading import read_rows

_log = logging.getLogger(__name__)

_MAX_POINTS = 2000  # per visit
_MAX_STARTS = 50  # of labelled domains; some streams change domain at every image
_MIN_WINDOW, _MAX_WINDOW = 100, 200  # images; with 100, the standard error is at most 5 points
_PANELS = 4  # reliability diagrams per row
_HALF_BAR = 0.45 / ECE_BINS


@rc_context(STYLE)
def draw_plots(folder: Path, results: Results) -> None:
    """Draw the methods' errors and calibration into `plots` in the folder; raise OutputError if that is impossible."""
    if not (folder / PREDICTIONS).exists():  # of an evaluation that was complete before
        _log.warning("without its %s, no plots are drawn", PREDICTIONS)
        return
    tallies = tally_rows(folder / PREDICTIONS)
    colours = _colours(results["methods"])
    for name, figure in {
        "error_per_domain": _draw_error_per_domain(Figure(figsize=(12, 4.5)), results["methods"], colours),
        "running_error": draw_running_error(Figure(figsize=(12, 4.5)), folder, results["methods"], colours),
        "reliability": draw_reliability(Figure(), tallies, results["methods"], colours),
    }.items():
        path = folder / PLOTS / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        figure.set_layout_engine("tight")
        write_atomically(path, partial(figure.savefig, format="png", dpi=110))


def _colours(methods: Iterable[str]) -> dict[str, ColorType]:
    """Return a colour for each method, the same in all plots, and fixed for the usual methods."""
    unused = cycle(colormaps["tab20"](range(4, 20)))  # the first four resemble REM's and Tent's
    return {name: COLOURS.get(name) or next(unused) for name in methods}


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_error_per_domain(figure: Figure, methods: Results, colours: Mapping[str, ColorType]) -> Figure:
    axes = figure.subplots()
    domains = list(next(iter(methods.values()))["error"])
    width = 0.8 / len(methods)
    for number, (name, content) in enumerate(methods.items()):
        spread = [std or 0.0 for std in content["error_std"].values()]
        axes.bar(
            np.arange(len(domains)) + (number - (len(methods) - 1) / 2) * width,
            list(content["error"].values()),
            width,
            yerr=spread if any(spread) else None,
            color=colours[name],
            ecolor="#888888",  # shows on black
            label=f"{name} (mean {content['mean']:.1f})",
        )
    axes.set_xticks(range(len(domains)), domains, rotation=40, ha="right")
    axes.set_ylabel("error in %")
    _legend(axes)
    return figure


def draw_running_error(figure: Figure, folder: Path, methods: Results, colours: Mapping[str, ColorType]) -> Figure:
    """Plot each method's running error over the images of a seed, with the start of each domain."""
    axes = figure.subplots()
    seeds = max((list(content["seeds"]) for content in methods.values()), key=len)
    starts: list[tuple[int, str]] = []
    num_drawn: Counter[str] = Counter()
    windows: list[int] = []
    fewest = _MAX_WINDOW  # images that a point of a curve is the mean of
    for name, domains, missed in _visits(folder / PREDICTIONS, int(seeds[0])):
        if not num_drawn.keys() - {name}:
            starts += [(num_drawn[name] + position, domain) for position, domain in domains]
        step, first = math.ceil(len(missed) / _MAX_POINTS), num_drawn[name]
        windows.append(min(_MAX_WINDOW, max(_MIN_WINDOW, len(missed) // 4)))
        fewest = min(fewest, len(missed), windows[-1] // 2)  # at the ends of a visit
        axes.plot(
            range(first, first + len(missed), step),
            running_error(missed, windows[-1])[::step],
            color=colours[name],
            label=None if first else name,
            # Wide and below the others, the source shows beside a line that is the same.
            lw=4 if name == "source" else 1.2,
            alpha=0.5 if name == "source" else 1,
            zorder=1 if name == "source" else 2,
        )
        num_drawn[name] += len(missed)
    starts = [next(same) for _, same in groupby(starts, key=lambda start: start[1])]
    is_mixed = len(starts) > _MAX_STARTS
    if not is_mixed:
        ends = [*(position for position, _ in starts[1:]), next(iter(num_drawn.values()))]
        for (start, domain), end in zip(starts, ends, strict=True):
            axes.axvline(start, color="#dddddd", lw=0.8, zorder=0)
            axes.text((start + end) / 2, 1.01, domain, rotation=40, fontsize=7, transform=axes.get_xaxis_transform())
    axes.set_xlabel("images" if len(seeds) == 1 else f"images (seed {seeds[0]})")
    shown = " to ".join(str(window) for window in sorted({min(windows), max(windows)}))
    where = "" if is_mixed else " in its domain"
    axes.set_ylabel(
        f"error in %: mean of the {shown} images\naround each{where}, standard error up to {50 / math.sqrt(fewest):.0f}"
    )
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


def draw_reliability(figure: Figure, tallies: Tallies, methods: Results, colours: Mapping[str, ColorType]) -> Figure:
    """Plot accuracy against confidence, one panel per method, with the number of images per bin."""
    columns = min(_PANELS, len(methods))
    lines = math.ceil(len(methods) / columns)
    figure.set_size_inches(3.6 * columns, 3.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(methods) :]:
        axes.remove()
    for axes, (name, content) in zip(panels.flat, methods.items(), strict=False):
        tally = Tally.total(tally for key, tally in tallies.items() if key.method == name and key.phase == "adapt")
        axes.set_title(f"{name}, ECE {100 * content['ece']:.1f} %", fontsize=10)
        tally.bins[-2] += tally.bins[-1]  # confidences of exactly 1 are counted in a separate bin
        tally.bins[-1] = 0
        numbers, images, confidence, accuracy = tally.reliability()
        centres = (numbers + 0.5) / ECE_BINS
        axes.plot([0, 1], [0, 1], color="#bbbbbb", lw=1)
        axes.bar(centres, accuracy, 2 * _HALF_BAR, color=colours[name], alpha=0.5)  # lines show on black
        axes.hlines(confidence, centres - _HALF_BAR, centres + _HALF_BAR, "#222222", lw=1)
        for centre, count in zip(centres, images, strict=True):
            text = f"{count:,.0f}" if count < 10_000 else f"{count / 1000:,.0f}k"
            axes.text(centre, 1.03, text, rotation=90, fontsize=6, ha="center", va="bottom")
        axes.set_xlabel("confidence")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.16)
        axes.set_yticks(np.linspace(0, 1, 6))
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy (bars), mean confidence (lines),\nand number of images (above)")
    return figure
