"""What a memory of conditions is worth where they come back.

    python examples/measure_memory.py imagenetc/ --model vit_tiny_patch16_224 --checkpoint vit.safetensors
        --mean 0.5 --std 0.5 --severity 3 --visits 4 --images 100

ROOT is a tree of corrupted images that remtta eval takes. Its conditions come in turn, --visits times each, and every
visit has images of its own while they last. Prints a Markdown table: errors in % by visit, means over the conditions,
of the source model; of REM as published; of REM with a pull towards the source (1e-2, anchor auto); and of that
answered by both models, as remtta adapt runs it; each without a memory, reset at each change (which it is told), and
with a memory, which has to notice.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.evaluation import open_dataset
from remtta.guard.guard import guarded
from remtta.guard.memory import REMEMBERED, Memory
from remtta.methods.registry import build_method
from remtta.methods.settings import MethodConfig, method_config
from remtta.models.card import card_of
from remtta.models.preprocessing import preprocessing_of
from remtta.options import RunOptions
from remtta.runs.adapter import Adapter

CONDITIONS = "gaussian_noise,defocus_blur,fog,contrast,jpeg_compression"
WAYS = ("none", "reset at each change", "memory")

Images = tuple[Tensor, Tensor]
"""Preprocessed images (N, 3, H, W), and their classes (N,)."""


def read(root: str, model: torch.nn.Module, conditions: str, severity: int, most: int) -> list[Images]:
    """At most so many images of each condition, in an order mixed by a fixed seed."""
    classes = card_of(model).num_classes
    dataset = open_dataset(root, num_classes=classes, domains=conditions.split(","), severities=[severity])
    preprocessing = preprocessing_of(model)
    transform, data = preprocessing.transform(), []
    for domain in dataset.domains:
        places = np.random.default_rng(0).permutation(len(domain.labels))[:most]
        pixels = torch.stack([transform(domain.load(int(place))) for place in places])
        data.append((preprocessing.normalise(pixels), torch.from_numpy(domain.labels[places]).long()))
    return data


def walk(data: list[Images], adapter: Adapter, visits: int, count: int, batch: int, *, reset: bool) -> np.ndarray:
    """Errors in % of each visit to each condition: shape (visits, conditions)."""
    found = np.zeros((visits, len(data)))
    for visit in range(visits):
        for number, (images, labels) in enumerate(data):
            if reset:
                adapter.reset()
            for places in (torch.arange(count) + visit * count).remainder(len(images)).split(batch):
                adapter.recall(images[places], torch.ones(len(places), dtype=torch.bool), (0, 0))
                wrong = adapter.predict(images[places]).argmax(1) != labels[places]
                found[visit, number] += 100 * float(wrong.sum()) / count
    return found


def stages(visits: int) -> dict[str, slice]:
    """The first visit, the next ones, and the rest, as far as there are any."""
    cuts = sorted({0, 1, min(5, visits), visits})
    names = {
        (first, last): f"visit {last}" if last == first + 1 else f"visits {first + 1} to {last}"
        for first, last in pairwise(cuts)
    }
    return {name: slice(*cut) for cut, name in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--model-kwargs", nargs="*", default=[], metavar="KEY=NUMBER")
    parser.add_argument("--num-classes", type=int)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--conditions", default=CONDITIONS)
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--visits", type=int, default=20, help="of each condition")
    parser.add_argument("--images", type=int, default=60, help="of each visit")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--methods", default="source,published,pull,both", help="which of these, with commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of these, with commas")
    args = parser.parse_args()
    given: dict[str, Any] = {key: (getattr(args, key),) * 3 for key in ("mean", "std") if getattr(args, key)}
    given["model_kwargs"] = {key: int(number) for key, _, number in (text.partition("=") for text in args.model_kwargs)}
    model = load_model(args.model, checkpoint=args.checkpoint, num_classes=args.num_classes, **given)
    data = read(args.root, model, args.conditions, args.severity, args.visits * args.images)
    pull = method_config("rem", {"lr": 1e-2, "anchor": "auto"}, batch_size=args.batch_size)
    methods: dict[str, tuple[str, MethodConfig, RunOptions]] = {
        "source": ("source", MethodConfig(), RunOptions(guard=None)),
        "published": ("rem", method_config("rem", {}, batch_size=args.batch_size), RunOptions(guard=None)),
        "pull": ("rem", pull, RunOptions(guard=None)),
        "both": ("rem", pull, RunOptions()),
    }
    parts = stages(args.visits)
    print(f"| method | memory | {' | '.join(parts)} | all | worst condition | recalled | ms per frame |")
    print(f"|---|---|{'---|' * (len(parts) + 4)}", flush=True)
    for name in args.methods.split(","):
        kind, config, options = methods[name]
        for way in ["none"] if kind == "source" else args.ways.split(","):
            torch.manual_seed(0)
            method = build_method(kind, model, config)
            memory = Memory(method, REMEMBERED) if way == "memory" else None
            adapter = Adapter(method, guarded(method, options.guard, config), memory=memory)
            started = time.process_time()
            found = walk(data, adapter, args.visits, args.images, args.batch_size, reset=way == WAYS[1])
            spent = 1000 * (time.process_time() - started) / (found.size * args.images)
            cells = [f"{found[part].mean():.1f}" for part in (*parts.values(), slice(None))]
            recalled = f"{len(memory.events())} of {found.size - len(data)}" if memory else ""
            worst = f"{found.mean(0).max():.1f}"
            print(f"| {name} | {way} | {' | '.join(cells)} | {worst} | {recalled} | {spent:.1f} |", flush=True)
            method.reset()


if __name__ == "__main__":
    main()
