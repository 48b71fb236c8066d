"""Measure how the cost of a step grows with batch, tokens, depth, views and classes: tables and a picture.

    python examples/measure_growth.py growth.png

Every figure is a median of interleaved rounds on this machine; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from remtta.bench import Measurement, run_bench
from remtta.options import ModelOptions
from remtta.options.bench import FORWARD, BenchOptions

MODEL = "vit_tiny_patch16_224"
BASE = BenchOptions(
    ModelOptions(MODEL), batch_size=8, repeats=5, memory=False, subjects=(FORWARD, "tent", "rem-n1", "rem")
)
VIEWS = {2: (0.0, 0.1), 3: (0.0, 0.1, 0.2), 4: (0.0, 0.1, 0.2, 0.3), 5: (0.0, 0.1, 0.2, 0.3, 0.4)}


def with_model(**changes: Any) -> BenchOptions:
    return dataclasses.replace(BASE, model=ModelOptions(MODEL, model_kwargs=changes))


SWEEPS: dict[str, dict[int, BenchOptions]] = {
    "images per batch": {size: dataclasses.replace(BASE, batch_size=size) for size in (1, 2, 4, 8, 16, 32)},
    "tokens": {(side // 16) ** 2 + 1: with_model(img_size=side) for side in (112, 160, 224, 320, 448)},
    "blocks": {depth: with_model(depth=depth) for depth in (4, 8, 12, 16, 24)},
    "views": {count: dataclasses.replace(BASE, mask_ratios=ratios) for count, ratios in VIEWS.items()},
    "classes": {classes: with_model(num_classes=classes) for classes in (10, 100, 1000, 10_000)},
}


def draw(figure_path: str, measured: dict[str, dict[int, Sequence[Measurement]]]) -> None:
    figure, all_axes = plt.subplots(
        2, len(measured), figsize=(3.2 * len(measured), 5.6), sharey="row", layout="constrained"
    )
    for (top, bottom), (name, points) in zip(all_axes.T, measured.items(), strict=True):
        subjects = [each.subject for each in next(iter(points.values()))]
        for number, subject in enumerate(subjects):
            found = [next(each for each in row if each.subject == subject) for row in points.values()]
            for axes, values in (
                (top, [1000 * each.seconds for each in found]),
                (bottom, [each.forwards for each in found]),
            ):
                axes.plot(list(points), values, "o-", markersize=4, label=subject, color=f"C{number}")
        for axes in (top, bottom):
            axes.set_xlabel(name)
            axes.grid(alpha=0.3)
            if name in ("images per batch", "tokens", "classes"):
                axes.set_xscale("log")
                axes.set_xticks(list(points), [str(value) for value in points])
                axes.minorticks_off()
            else:
                axes.set_xticks(list(points))
        top.set_yscale("log")
    all_axes[1, 0].set_ylim(bottom=0)
    all_axes[0, 0].set_ylabel("ms per step")
    all_axes[1, 0].set_ylabel("plain forward passes")
    all_axes[0, 0].legend(fontsize=8)
    figure.savefig(figure_path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", help="where to draw the picture, such as growth.png; without it, none")
    picture = parser.parse_args().picture
    measured: dict[str, dict[int, Sequence[Measurement]]] = {}
    for name, points in SWEEPS.items():
        print(f"\n| {name} | " + " | ".join(str(value) for value in points) + " |\n|---|" + "---|" * len(points))
        measured[name] = {value: run_bench(options) for value, options in points.items()}
        for number, subject in enumerate(each.subject for each in next(iter(measured[name].values()))):
            row = [results[number] for results in measured[name].values()]
            print(f"| `{subject}` | " + " | ".join(f"{1000 * r.seconds:.0f} ms ({r.forwards:.2f})" for r in row) + " |")
        if name != "views":
            seconds = [row[-1].seconds for row in measured[name].values()]
            power = np.polyfit(np.log(np.array(list(points))), np.log(np.array(seconds)), 1)[0]
            print(f"\nrem's time grows with the {name} to the power of {power:.2f}")
    if picture:
        draw(picture, measured)


if __name__ == "__main__":
    main()
