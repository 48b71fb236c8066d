"""Measure centered logits on streams in which classes are not shuffled: in runs, sorted, few, with a long tail.

    python examples/measure_orders.py imagenetc/ --model vit_tiny_patch16_224 --checkpoint vit.safetensors \
        --mean 0.5 --std 0.5 --limit 125

ROOT is a tree in a layout of remtta eval, whose --order and --scenario these streams have (docs/evaluation.md). The
source model predicts each image once. Prints a Markdown table: the change of error against the source in points
(negative values are gains), a mean over streams ± its standard error; for the running mean alone, then for remtta's
rule (docs/guard.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.backbones.lookup import backbone_of
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.scenarios import plan_visits
from remtta.methods.pixels import shuffle_patches
from remtta.models.info import model_info
from remtta.models.preprocessing import preprocessing_of
from remtta.pipeline.centering import LogitCentering

BATCH = 50  # for predicting; --batch-size is that of the streams
HALF_LIFE = 50  # of the running mean alone, in frames

STREAMS = {
    "shuffled": EvalOptions(),
    "labels in runs of 5": EvalOptions(order="runs-5"),
    "labels in runs of 25": EvalOptions(order="runs-25"),
    "labels in runs of 100": EvalOptions(order="runs-100"),
    "sorted by class": EvalOptions(scenario="label-shift"),
    "in bursts": EvalOptions(scenario="label-shift", dirichlet=0.1),
    "two other classes in each domain": EvalOptions(order="other-classes"),
    "three classes throughout": EvalOptions(order="three-classes"),
    "two classes throughout": EvalOptions(order="two-classes"),
    "one class throughout": EvalOptions(order="one-class"),
    "all classes, then one": EvalOptions(order="switch"),
    "long tail (100 : 1)": EvalOptions(order="long-tail"),
    "domains mixed in a batch": EvalOptions(scenario="mixed"),
    "another domain after 100 frames": EvalOptions(scenario="walk"),
}


@torch.no_grad()
def predict(model: Any, dataset: Dataset) -> list[Tensor]:
    """Return the logits of every image, plain and with shuffled patches, (2, N, C) of each domain."""
    preprocessing, found = preprocessing_of(model), []
    rows = preprocessing.input_size[0] // backbone_of(model).patch_size[0]
    transform = preprocessing.transform()
    for domain in dataset.domains:
        batches = torch.arange(len(domain.labels)).split(BATCH)
        pixels = (torch.stack([transform(domain.load(int(place))) for place in places]) for places in batches)
        parts = []
        for images in map(preprocessing.normalise, pixels):
            shuffled = shuffle_patches(images, rows, torch.Generator().manual_seed(0))
            parts.append(torch.stack([model(images), model(shuffled)]))
        found.append(torch.cat(parts, dim=1))
    return found


def stream(dataset: Dataset, options: EvalOptions, seed: int) -> np.ndarray:
    """Return the domain and the place in it of each frame of a stream, (N, 2)."""
    return np.concatenate([visit.items for visit in plan_visits(dataset, options, seed)])


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
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--streams", type=int, default=6)
    args = parser.parse_args(argv)
    given = {key: getattr(args, key) for key in ("num_classes", "crop_pct", "mean", "std")}
    kwargs = {key: int(value) for key, _, value in (each.partition("=") for each in args.model_kwargs)}
    model: Any = load_model(args.model, checkpoint=args.checkpoint, model_kwargs=kwargs, **given)
    severities = None if args.severity is None else [args.severity]
    num_classes = model_info(model).num_classes
    dataset = open_dataset(args.root, num_classes=num_classes, severities=severities, limit=args.limit)
    logits = predict(model, dataset)
    print("| order | source | running mean | centered |\n|---|---|---|---|", flush=True)
    for name, options in STREAMS.items():
        picked = []
        for items in (stream(dataset, options, seed).tolist() for seed in range(args.streams)):
            labels = torch.tensor([dataset.domains[domain].labels[place] for domain, place in items])
            picked.append((torch.stack([logits[domain][:, place] for domain, place in items], dim=1), labels))
        source = np.mean([100 * float((z[0].argmax(1) != y).double().mean()) for z, y in picked])
        cells = [f"{source:.1f}"]
        for rule in (running_mean, centered):
            changes = [change(z, y, args.batch_size, rule) for z, y in picked]
            cells.append(f"{np.mean(changes):+.1f} ± {np.std(changes, ddof=1) / len(changes) ** 0.5:.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
