"""Measure centered logits on streams in which classes are not shuffled: sorted, in runs, few, with a long tail.

    python examples/measure_orders.py imagenetc/ --model vit_tiny_patch16_224 --checkpoint vit.safetensors \
        --mean 0.5 --std 0.5 --frames 125

ROOT is a tree in a layout of remtta eval. The source model predicts each of its images once; streams of --frames frames
of each domain, one domain after the other, are drawn from these predictions, images again where a stream needs more.
Prints a Markdown table: the change of error against the source in points (negative values are gains), a mean over
streams ± its standard error; for the running mean alone, then for remtta's rule (docs/guard.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.backbones.lookup import backbone_of
from remtta.lab.evaluation.datasets import open_dataset
from remtta.methods.pixels import shuffle_patches
from remtta.models.info import model_info
from remtta.models.preprocessing import preprocessing_of
from remtta.pipeline.centering import LogitCentering

BATCH = 50  # for predicting; --batch-size is that of the streams
HALF_LIFE = 50  # of the running mean alone, in frames

Order = Callable[[np.random.Generator, np.ndarray, np.ndarray, int], np.ndarray]
"""Draws places in a domain from its labels (N,), the classes of the stream in random order, and a number of frames."""


@torch.no_grad()
def predict(model: Any, root: str, severity: int | None, limit: int | None) -> tuple[Tensor, np.ndarray]:
    """Return the logits of every image, plain and with shuffled patches, (2, domains, N, C), and the labels (N,)."""
    preprocessing, found = preprocessing_of(model), []
    rows = preprocessing.input_size[0] // backbone_of(model).patch_size[0]
    transform = preprocessing.transform()
    severities = None if severity is None else [severity]
    dataset = open_dataset(root, num_classes=model_info(model).num_classes, severities=severities, limit=limit)
    labels = dataset.domains[0].labels
    for domain in dataset.domains:
        if not np.array_equal(domain.labels, labels):
            raise SystemExit(f"{root}: {domain.name} has other images than {dataset.domains[0].name}")
        batches = torch.arange(len(labels)).split(BATCH)
        pixels = (torch.stack([transform(domain.load(int(place))) for place in places]) for places in batches)
        parts = []
        for images in map(preprocessing.normalise, pixels):
            shuffled = shuffle_patches(images, rows, torch.Generator().manual_seed(0))
            parts.append(torch.stack([model(images), model(shuffled)]))
        found.append(torch.cat(parts, dim=1))
    return torch.stack(found, dim=1), labels


def draw(rng: np.random.Generator, places: np.ndarray, count: int) -> np.ndarray:
    """Draw without replacement; all places again if there are too few."""
    return np.concatenate([rng.permutation(places) for _ in range(-(-count // len(places)))])[:count]


def shuffled(rng: np.random.Generator, labels: np.ndarray, _: np.ndarray, frames: int) -> np.ndarray:
    return draw(rng, np.arange(len(labels)), frames)


def in_classes(rng: np.random.Generator, labels: np.ndarray, classes: np.ndarray, frames: int) -> np.ndarray:
    places = shuffled(rng, labels, classes, frames)
    return places[np.argsort(labels[places], kind="stable")]


def in_runs(
    rng: np.random.Generator, labels: np.ndarray, classes: np.ndarray, frames: int, *, length: int
) -> np.ndarray:
    chosen = rng.choice(classes, -(-frames // length))
    return np.concatenate([draw(rng, np.flatnonzero(labels == each), length) for each in chosen])[:frames]


def of_few(
    rng: np.random.Generator, labels: np.ndarray, classes: np.ndarray, frames: int, *, count: int, anew: bool = False
) -> np.ndarray:
    """Draw from a few classes: the first of the stream, or others in each domain."""
    chosen = (rng.permutation(classes) if anew else classes)[:count]
    return draw(rng, np.flatnonzero(np.isin(labels, chosen)), frames)


def long_tail(rng: np.random.Generator, labels: np.ndarray, classes: np.ndarray, frames: int) -> np.ndarray:
    """Draw the first class 100 times as often as the last, the others between."""
    weights = 100.0 ** -np.linspace(0, 1, len(classes))
    chosen = rng.choice(classes, frames, p=weights / weights.sum())
    return np.array([rng.choice(np.flatnonzero(labels == each)) for each in chosen])


ORDERS: dict[str, Order] = {
    "shuffled": shuffled,
    **{f"labels in runs of {length}": partial(in_runs, length=length) for length in (5, 25, 100)},
    "sorted by class": in_classes,
    "two classes per domain": partial(of_few, count=2, anew=True),
    "three classes throughout": partial(of_few, count=3),
    "two classes throughout": partial(of_few, count=2),
    "one class throughout": partial(of_few, count=1),
    "long tail (100 : 1)": long_tail,
    "domains mixed in a batch": shuffled,
}


def stream(name: str, labels: np.ndarray, domains: int, frames: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the domain and the place in it of each frame of a stream."""
    rng = np.random.default_rng(seed)
    classes = rng.permutation(np.unique(labels))
    places = np.concatenate([ORDERS[name](rng, labels, classes, frames) for _ in range(domains)])
    numbers = np.repeat(np.arange(domains), frames)
    mixed = rng.permutation(len(places)) if name.startswith("domains mixed") else np.arange(len(places))
    return numbers[mixed], places[mixed]


def running_mean(batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Subtract the running mean of the logits, each batch (2, B, C) included."""
    keep, weight, total = 0.5 ** (1 / HALF_LIFE), 0.0, torch.zeros(())
    for batch, _ in batches:
        weights = keep ** torch.arange(len(batch) - 1.0, -1, -1)
        total = keep ** len(batch) * total + weights @ batch
        weight = keep ** len(batch) * weight + float(weights.sum())
        yield batch - total / weight


def centered(batches: Sequence[Tensor]) -> Iterator[Tensor]:
    """Center the logits as remtta does."""
    centering = LogitCentering(torch.device("cpu"))
    for batch, shuffled in batches:
        centering.update_source(batch, torch.ones(len(batch), dtype=torch.bool), shuffled.__getitem__)
        yield centering.source(batch)


def change(
    logits: Tensor, labels: Tensor, batch_size: int, rule: Callable[[Sequence[Tensor]], Iterator[Tensor]]
) -> float:
    """Return the change of error by a rule, on the frames of a stream (2, B, C), in points."""
    after = torch.cat(list(rule(logits.split(batch_size, dim=1))))
    wrong = [(each.argmax(1) != labels).double().mean() for each in (after, logits[0])]
    return 100 * float(wrong[0] - wrong[1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--num-classes", type=int)
    parser.add_argument("--model-kwargs", action="append", default=[], metavar="KEY=N")
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--crop-pct", type=float)
    parser.add_argument("--severity", type=int, help="default: 5, or the only one in ROOT")
    parser.add_argument("--limit", type=int, help="images of each domain; default: all")
    parser.add_argument("--frames", type=int, default=500, help="frames of each domain in a stream")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--streams", type=int, default=6)
    args = parser.parse_args(argv)
    given = {key: getattr(args, key) for key in ("num_classes", "crop_pct", "mean", "std")}
    kwargs = {key: int(value) for key, _, value in (each.partition("=") for each in args.model_kwargs)}
    model: Any = load_model(args.model, checkpoint=args.checkpoint, model_kwargs=kwargs, **given)
    logits, labels = predict(model, args.root, args.severity, args.limit)
    print("| order | source | running mean | centered |\n|---|---|---|---|", flush=True)
    for name in ORDERS:
        streams = [stream(name, labels, logits.shape[1], args.frames, seed) for seed in range(args.streams)]
        picked = [(logits[:, numbers, places], torch.from_numpy(labels[places])) for numbers, places in streams]
        source = np.mean([100 * float((z[0].argmax(1) != y).double().mean()) for z, y in picked])
        cells = [f"{source:.1f}"]
        for rule in (running_mean, centered):
            changes = [change(z, y, args.batch_size, rule) for z, y in picked]
            cells.append(f"{np.mean(changes):+.1f} ± {np.std(changes, ddof=1) / len(changes) ** 0.5:.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
