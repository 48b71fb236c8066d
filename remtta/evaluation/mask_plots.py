"""Sample images under their masks, with matplotlib: what a method hides, and what it then predicts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from remtta.deltas.delta import load_delta
from remtta.errors import FrameError, ModelError, StreamError
from remtta.evaluation.domains import Dataset, Domain
from remtta.evaluation.ledger import delta_path
from remtta.methods.losses import entropy
from remtta.methods.masking import paint_over
from remtta.methods.rem import REM
from remtta.models.labels import labels_of
from remtta.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERLAYS = 4  # domains shown
MASKED = 4  # methods shown
_RIGHT, _WRONG = "#14783c", "#be2828"


@torch.no_grad()
def draw_masks(
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
    except (ModelError, ValueError):  # evaluated with methods that need no masks, or with masks of its own
        return None
    deltas = _known_deltas(folder, results["methods"])
    if not deltas:
        return None
    domains = dataset.domains[:: max(1, len(dataset.domains) // OVERLAYS)][:OVERLAYS]
    transform = preprocessing.transform()
    samples = [_first_readable(domain) for domain in domains]
    pixels = torch.stack([transform(image) for image, _ in samples])
    images = preprocessing.normalise(pixels.to(next(model.parameters()).device))
    ratios = rem.objective.config.mask_ratios
    panels = figure.subplots(len(domains), len(deltas) * len(ratios), squeeze=False)
    figure.set_size_inches(1.55 * len(deltas) * len(ratios), 2.0 * len(domains))
    labels, numbers = labels_of(model), dataset.class_numbers if dataset.restricted_to else None
    for column, (name, delta) in enumerate(deltas.items()):
        rem.load_delta(delta)
        views, masks = rem.objective.views(images)
        kept = [None, *masks]
        for place, ratio in enumerate(ratios):
            positions = kept[place]
            column_panels = panels[:, column * len(ratios) + place]
            column_panels[0].set_title(f"{name}, {ratio:.0%}", fontsize=8)
            for line, (_, truth) in enumerate(samples):
                shown = pixels[line].permute(1, 2, 0).numpy()
                axes = column_panels[line]
                axes.imshow(
                    paint_over(shown, None if positions is None else positions[line], rem.net.backbone.patch_size)
                )
                axes.set_xticks([])
                axes.set_yticks([])
                _tell_prediction(axes, views[place, line], truth, labels, numbers)
    for line, domain in enumerate(domains):
        panels[line][0].set_ylabel(domain.title, fontsize=8)
    rem.reset()
    return figure


def _known_deltas(folder: Path, methods: Mapping[str, Any]) -> dict[str, Mapping[str, torch.Tensor]]:
    """Changes to the source weights by method: the source's and those of a few methods, rather of those that mask."""
    paths = {name: delta_path(folder, name, next(iter(content["seeds"]))) for name, content in methods.items()}
    known = [name for name, path in paths.items() if path.is_file() or name == "source"]
    masking = {name for name, content in methods.items() if "mask_ratios" in content["config"]}
    chosen = sorted(known, key=lambda name: (name != "source", name not in masking))[:MASKED]
    shown = [name for name in methods if name in chosen]  # in the order of the table
    return {name: load_delta(paths[name]).tensors if paths[name].is_file() else {} for name in shown}


def _tell_prediction(
    axes: Axes, logits: torch.Tensor, truth: int, labels: Sequence[str] | None, numbers: Sequence[int] | None
) -> None:
    """Below a picture: the class predicted by logits (C,), right or wrong, and the entropy in nats."""
    guess, nats = int(logits.argmax()), float(entropy(logits))
    number = guess if numbers is None else numbers[guess]
    label = labels[guess].split(",")[0] if labels else f"class {number}"
    axes.set_xlabel(f"{label[:16]}\nentropy {abs(nats):.2f}", fontsize=7, color=_RIGHT if number == truth else _WRONG)


def _first_readable(domain: Domain) -> tuple[Image.Image, int]:
    """An image and its class; an evaluation that has ended has read one of every domain."""
    for place, label in enumerate(domain.labels):
        with contextlib.suppress(FrameError):
            return domain.load(place), int(label)
    raise StreamError(f"{domain.title}: none of {len(domain.labels)} image(s) could be read")
