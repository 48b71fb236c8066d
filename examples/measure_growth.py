"""Measure how the cost of a step grows with batch, tokens, depth, views and classes, and draw it.

    python examples/measure_growth.py growth.png

Every figure is a median of interleaved rounds on this machine; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from remtta.lab.bench import Measurement, run_bench
from remtta.lab.bench_options import FORWARD, BenchOptions
from remtta.options import ModelOptions

MODEL = "vit_tiny_patch16_224"
BASE = BenchOptions(
    ModelOptions(MODEL),
    batch_size=8,
    repeats=5,
    memory=False,
    precision="fp32",  # of all methods, as of `forward`
    subjects=(FORWARD, "fast", "tent", "rem-n1", "remtta", "rem"),
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


def draw(all_axes: np.ndarray, measured: Mapping[str, Mapping[int, Sequence[Measurement]]]) -> None:
    """Draw a column per sweep: ms per step above, plain forward passes below."""
    for (top, bottom), (name, points) in zip(all_axes.T, measured.items(), strict=True):
        for number, subject in enumerate(BASE.subjects):
            found = [results[number] for results in points.values()]
            top.plot(list(points), [1000 * each.seconds for each in found], "o-", markersize=4, label=subject)
            bottom.plot(list(points), [each.forwards for each in found], "o-", markersize=4)
        for axes in (top, bottom):
            axes.set_xlabel(name)
            axes.grid(alpha=0.3)
            if name in ("images per batch", "tokens", "classes"):
                axes.set_xscale("log")
                axes.minorticks_off()
            axes.set_xticks(list(points), [str(value) for value in points])
        top.set_yscale("log")
    all_axes[1, 0].set_ylim(bottom=0)
    all_axes[0, 0].set_ylabel("ms per step")
    all_axes[1, 0].set_ylabel("plain forward passes")
    all_axes[0, 0].legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", help="where to draw the picture, such as growth.png")
    picture = parser.parse_args().picture
    measured = {
        name: {value: run_bench(options) for value, options in points.items()} for name, points in SWEEPS.items()
    }
    figure, all_axes = plt.subplots(2, len(SWEEPS), figsize=(16, 5.6), sharey="row", layout="constrained")
    draw(all_axes, measured)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
