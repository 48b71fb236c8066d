"""Plot sample images under their masks, with the resulting predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from remtta.deltas.delta import load_delta
from remtta.drawing import RIGHT, WRONG, Cell, draw_grid
from remtta.errors import FrameError, ModelError, StreamError, counted
from remtta.evaluation.domains import Dataset, Domain
from remtta.evaluation.ledger import delta_path
from remtta.methods.mask_pictures import MaskPicture, mask_pictures
from remtta.methods.rem import REM
from remtta.models.card import labels_of
from remtta.models.preprocessing import Preprocessing

OVERLAYS = 4  # domains shown
MASKED = 4  # methods shown


def draw_masks(
    figure: Figure, folder: Path, results: Mapping[str, Any], model: nn.Module, dataset: Dataset, inputs: Preprocessing
) -> Figure | None:
    """Plot sample images under each mask with prediction and entropy, as in the paper's figure.

    Only the source model and a few methods are shown, preferably those that mask: methods without a saved delta cannot
    be, since their weights are gone.
    """
    domains = dataset.domains[:: max(1, len(dataset.domains) // OVERLAYS)][:OVERLAYS]
    columns = mask_cells(folder, results["methods"], model, dataset, domains, inputs)
    if not columns:
        return None
    figure.set_size_inches(1.5 + 1.2 * len(columns), 0.3 + 1.6 * len(domains))
    figure.set_layout_engine("constrained")  # captions do not run into the row below
    rows = list(zip(*columns.values(), strict=True))
    draw_grid(figure, rows, [domain.title[:22] for domain in domains], list(columns))
    return figure


def mask_cells(
    folder: Path,
    methods: Mapping[str, Any],
    model: nn.Module,
    dataset: Dataset,
    domains: Sequence[Domain],
    preprocessing: Preprocessing,
) -> dict[str, list[Cell]]:
    """Return a cell for each domain by method and mask ratio; empty if the model cannot be masked."""
    try:
        rem = REM(model)
    except (ModelError, ValueError):  # REM does not apply: no masks, or a masking of the model's own
        return {}
    samples = [_first_readable(domain) for domain in domains]
    pixels = torch.stack(list(map(preprocessing.transform(), (image for image, _ in samples))))
    labels, numbers = labels_of(model), dataset.class_numbers if dataset.restricted_to else None
    columns = {}
    for name, delta in _known_deltas(folder, methods).items():
        rem.load_delta(delta)
        views = mask_pictures(rem, pixels, preprocessing)
        for ratio, view in zip(rem.objective.config.mask_ratios, views, strict=True):
            columns[f"{name}, {ratio:.0%}"] = [
                _cell(picture, truth, labels, numbers) for picture, (_, truth) in zip(view, samples, strict=True)
            ]
    rem.reset()
    return columns


def _known_deltas(folder: Path, methods: Mapping[str, Any]) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return weight deltas by method: empty for the source model, then a few others, preferring methods that mask."""
    paths = {name: delta_path(folder, name, next(iter(content["seeds"]))) for name, content in methods.items()}
    known = [name for name, path in paths.items() if path.is_file() or name == "source"]
    masking = {name for name, content in methods.items() if "mask_ratios" in content["config"]}
    chosen = sorted(known, key=lambda name: (name != "source", name not in masking))[:MASKED]
    shown = [name for name in methods if name in chosen]  # in the order of the table
    return {name: load_delta(paths[name]).tensors if paths[name].is_file() else {} for name in shown}


def _cell(picture: MaskPicture, truth: int, labels: Sequence[str] | None, numbers: Sequence[int] | None) -> Cell:
    """Return a cell of a masked image with the predicted class and the entropy in nats."""
    number = picture.guess if numbers is None else numbers[picture.guess]
    label = labels[picture.guess].split(",")[0] if labels else f"class {number}"
    colour = RIGHT if number == truth else WRONG
    return Cell(picture.pixels, label[:16], f"entropy {picture.nats:.2f}", colour)


def _first_readable(domain: Domain) -> tuple[Image.Image, int]:
    """Return the first readable image of a domain and its class; a completed evaluation has read at least one."""
    for place, label in enumerate(domain.labels):
        with contextlib.suppress(FrameError):
            return domain.load(place), int(label)
    raise StreamError(f"{domain.title}: none of {counted(len(domain.labels), 'image')} could be read")
