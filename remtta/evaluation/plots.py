"""Pictures of an evaluation, with matplotlib (the extra `plot`)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from remtta.deltas.delta import load_delta
from remtta.errors import FrameError, ModelError, StreamError
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.domains import Domain
from remtta.evaluation.metrics import Tally, calibration_bins
from remtta.evaluation.results import PLOTS, Tallies, delta_path, tally_rows
from remtta.files import write_atomically
from remtta.methods.losses import entropy
from remtta.methods.masking import paint_over
from remtta.methods.rem import REM
from remtta.models.classes import restricted_classes
from remtta.models.labels import labels_of
from remtta.models.preprocessing import Preprocessing
from remtta.runs.folder import PREDICTIONS
from remtta.runs.reading import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_SHARE = 0.024  # of the axis' height, for a line of text
WINDOW = 200  # images in the running error
OVERLAYS = 4  # domains shown with their masks
MASKED = 4  # methods shown with their masks
_PANELS = 4  # reliability diagrams beside one another
_RIGHT, _WRONG = "#14783c", "#be2828"
_COLOURS = {
    "source": "#969696",
    "tent": "#d98c1f",
    "pseudo-label": "#8c6bb1",
    "rem": "#195fbe",
    "rem-n1": "#41a6d9",
    "supervised": "#14783c",
}

_log = logging.getLogger("remtta")


def draw_plots(
    folder: Path, results: Mapping[str, Any], model: nn.Module, dataset: Dataset, preprocessing: Preprocessing
) -> list[Path]:
    """Draw every picture an evaluation has the numbers for.

    Args:
        folder: The evaluation's folder; the pictures go to `plots` in it.
        results: What its `results.json` holds.
        model: The model at its source weights.
        dataset: The images, for the overlays.
        preprocessing: How they became inputs.

    Returns:
        The files; none if matplotlib is not installed.

    Raises:
        OutputError: If a picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _log.info('no plots: matplotlib is not installed (pip install "remtta[plot]")')
        return []
    tallies = tally_rows(folder / PREDICTIONS)
    seeds = list(next(iter(results["methods"].values()))["seeds"])
    which = "" if len(seeds) == 1 else f" (seed {seeds[0]})"
    colours = _colours(list(results["methods"]))
    pictures: dict[str, Callable[[], Figure | None]] = {
        "error_per_domain": lambda: _error_per_domain(Figure(figsize=(12, 4.5)), results, colours),
        "running_error": lambda: _running_error(Figure(figsize=(12, 4.5)), folder, int(seeds[0]), which, colours),
        "entropy_by_mask_ratio": lambda: _entropy_by_ratio(Figure(figsize=(8, 4.5)), results, which, colours),
        "reliability": lambda: _reliability(Figure(), tallies, colours),
        "masks": lambda: _masks(Figure(), folder, results, model, dataset, preprocessing),
    }
    drawn = []
    for name, draw in pictures.items():
        with restricted_classes(model, dataset.class_numbers if dataset.restricted_to else None):
            figure = draw()
        if figure is not None:
            path = folder / PLOTS / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            figure.set_layout_engine("tight")
            write_atomically(path, _saver(figure))
            drawn.append(path)
    return drawn


def _saver(figure: Figure) -> Callable[[Path], None]:
    return lambda temporary: figure.savefig(temporary, format="png", dpi=110)


def _colours(methods: Sequence[str]) -> dict[str, Any]:
    """A colour for each method, the same in all pictures and for the usual ones in all evaluations."""
    from matplotlib import colormaps

    free = cycle(colormaps["tab20"](range(2, 20)))  # the first two are much like REM's
    return {name: _COLOURS.get(name) or next(free) for name in methods}


def _legend(axes: Axes) -> None:
    """Beside the axes, where it covers nothing."""
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
    wrong: dict[str, list[bool]] = {}
    domains: list[str] = []
    for row in read_rows(folder / PREDICTIONS):
        if row["seed"] == seed and row["phase"] == "adapt" and "error" not in row:
            curve = wrong.setdefault(row["method"], [])
            curve.append(row["class"] != row["label_true"])
            if len(wrong) == 1:
                domains.append(row["domain"])
    for name, missed in wrong.items():
        total = np.array([0, *accumulate(missed)])
        stops = np.arange(1, len(total))
        starts = np.maximum(0, stops - WINDOW)
        axes.plot(100 * (total[stops] - total[starts]) / (stops - starts), color=colours[name], label=name, lw=1.2)
    changes = [place for place in range(1, len(domains)) if domains[place] != domains[place - 1]]
    if len(changes) < 50:  # mixed streams change at every image
        for start, stop in zip([0, *changes], [*changes, len(domains)], strict=True):
            axes.axvline(start, color="#dddddd", lw=0.8, zorder=0)
            axes.text(
                (start + stop) / 2, 1.01, domains[start], rotation=40, fontsize=7, transform=axes.get_xaxis_transform()
            )
    axes.set_xlabel(f"images{which}")
    axes.set_ylabel(f"error in %, mean over {WINDOW} images")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _entropy_by_ratio(
    figure: Figure, results: Mapping[str, Any], which: str, colours: Mapping[str, Any]
) -> Figure | None:
    firsts = {name: next(iter(content["seeds"].values())) for name, content in results["methods"].items()}
    shown = {name: first for name, first in firsts.items() if "mask_ratios" in first["config"] and "entropies" in first}
    if not shown:
        return None
    axes = _plain(figure.subplots())
    for name, first in shown.items():
        ratios = [100 * ratio for ratio in first["config"]["mask_ratios"]]
        # In limited time there may be domains no batch of which was learned from, and looked at under masks.
        domains = {domain: summary for domain, summary in first["domains"].items() if "entropies" in summary}
        for summary in domains.values():
            axes.plot(ratios, summary["entropies"], color="#cccccc", lw=0.8, zorder=0)
        axes.plot(ratios, first["entropies"], "o-", color=colours[name], label=f"{name}, all domains")
        low, high = axes.get_ylim()
        ends = sorted((summary["entropies"][-1], domain) for domain, summary in domains.items())
        height = low
        for end, domain in ends:  # from below, each label at least a line above the one before
            height = max(end, height + _LABEL_SHARE * (high - low))
            axes.annotate(
                domain,
                (ratios[-1], end),
                xytext=(ratios[-1] + 0.05 * ratios[-1], height),
                fontsize=6,
                color="#888888",
                va="center",
                arrowprops={"arrowstyle": "-", "color": "#dddddd", "lw": 0.5},
            )
    axes.set_xlabel(f"mask ratio in %{which}")
    axes.set_ylabel("mean entropy in nats")
    # Below: the domains' names are beside the axes.
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    return figure


def _reliability(figure: Figure, tallies: Tallies, colours: Mapping[str, Any]) -> Figure:
    methods = list(dict.fromkeys(method for method, _ in tallies))
    columns = min(_PANELS, len(methods))
    lines = math.ceil(len(methods) / columns)
    figure.set_size_inches(3.6 * columns, 3.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(methods) :]:
        axes.remove()
    for axes, name in zip(panels.flat, methods, strict=False):
        parts = [
            tally for (method, _), phases in tallies.items() if method == name for tally in phases["adapt"].values()
        ]
        together = Tally().merged(parts)
        bins = calibration_bins(together.probs, together.correct)
        _plain(axes).plot([0, 1], [0, 1], color="#bbbbbb", lw=1)
        axes.bar(
            [part["confidence"] for part in bins],
            [part["accuracy"] for part in bins],
            0.05,
            color=colours[name],
            alpha=0.85,
        )
        axes.set_title(f"{name}, ECE {100 * together.summary()['ece']:.1f} %", fontsize=10)
        axes.set_xlabel("confidence")
        axes.set_xlim(0, 1)
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy")
    return figure


@torch.no_grad()
def _masks(
    figure: Figure,
    folder: Path,
    results: Mapping[str, Any],
    model: nn.Module,
    dataset: Dataset,
    preprocessing: Preprocessing,
) -> Figure | None:
    """Sample images under each mask, with prediction and entropy, as in the paper's figure.

    Shown are the source and a few methods, those that mask first, whose delta is there: of the others the weights
    are not known any more.
    """
    try:
        rem = REM(model)
    except ModelError:  # evaluated with methods that need no masks
        return None
    deltas = _known_deltas(folder, results["methods"])
    if not deltas:
        return None
    domains = dataset.domains[:: max(1, len(dataset.domains) // OVERLAYS)][:OVERLAYS]
    transform = preprocessing.transform()
    samples = [_first_readable(domain) for domain in domains]
    pixels = torch.stack([transform(image) for image, _ in samples])
    images = preprocessing.normalise(pixels.to(next(model.parameters()).device))
    ratios = rem.config.mask_ratios
    panels = figure.subplots(len(domains), len(deltas) * len(ratios), squeeze=False)
    figure.set_size_inches(1.55 * len(deltas) * len(ratios), 2.0 * len(domains))
    labels, numbers = labels_of(model), dataset.class_numbers if dataset.restricted_to else None
    for column, (name, delta) in enumerate(deltas.items()):
        rem.load_delta(delta)
        views, kept = rem.views(images), [None, *rem.kept_patches(images)]
        for place, ratio in enumerate(ratios):
            positions = kept[place]
            column_panels = panels[:, column * len(ratios) + place]
            column_panels[0].set_title(f"{name}, {ratio:.0%}", fontsize=8)
            for line, (_, truth) in enumerate(samples):
                shown = pixels[line].permute(1, 2, 0).numpy()
                axes = column_panels[line]
                axes.imshow(paint_over(shown, None if positions is None else positions[line], rem.patch_size))
                axes.set_xticks([])
                axes.set_yticks([])
                _tell_prediction(axes, views[place, line], truth, labels, numbers)
    for line, domain in enumerate(domains):
        panels[line][0].set_ylabel(domain.title, fontsize=8)
    rem.reset()
    return figure


def _known_deltas(folder: Path, methods: Mapping[str, Any]) -> dict[str, Mapping[str, torch.Tensor]]:
    """Changes to the source weights by method: the source's, then those of a few methods, those that mask first."""
    paths = {name: delta_path(folder, name, next(iter(content["seeds"]))) for name, content in methods.items()}
    known = [name for name, path in paths.items() if path.is_file() or name == "source"]
    masking = {name for name, content in methods.items() if "mask_ratios" in content["config"]}
    shown = sorted(known, key=lambda name: (name != "source", name not in masking))[:MASKED]
    return {name: load_delta(paths[name]).tensors if paths[name].is_file() else {} for name in shown}


def _tell_prediction(
    axes: Axes, logits: torch.Tensor, truth: int, labels: Sequence[str] | None, numbers: Sequence[int] | None
) -> None:
    """Below a picture: the predicted class and the entropy in nats.

    Args:
        axes: The picture's.
        logits: Shape (C,).
        truth: Number of the right class.
        labels: Names of the C classes.
        numbers: Their numbers, where they are not all of the model's.
    """
    guess, nats = int(logits.argmax()), float(entropy(logits))
    number = guess if numbers is None else numbers[guess]
    label = labels[guess].split(",")[0] if labels else f"class {number}"
    axes.set_xlabel(f"{label[:16]}\n{abs(nats):.2f}", fontsize=7, color=_RIGHT if number == truth else _WRONG)


def _first_readable(domain: Domain) -> tuple[Image.Image, int]:
    """An image and its class; an evaluation that has ended has read one of every domain."""
    for place, label in enumerate(domain.labels):
        with contextlib.suppress(FrameError):
            return domain.load(place), int(label)
    raise StreamError(f"{domain.title}: none of {len(domain.labels)} image(s) could be read")
