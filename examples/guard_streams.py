"""What the guard does on streams made to harm: class-sorted, alternating, with noise or black frames between.

    python examples/guard_streams.py cifar10_c/ --checkpoint vit_cifar10.safetensors --lr 1e-3,3e-3,1e-2,3e-2

ROOT is an ImageNet-C-like tree at one severity; the model is the CIFAR-10 ViT of train_cifar10_model.py. For every
stream and learning rate it prints the mean error of source, method and guarded method, and the worst domain against
the source.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.config import method_config
from remtta.evaluation import open_dataset
from remtta.guard import guarded
from remtta.methods import build_method
from remtta.models import preprocessing_of
from remtta.options import GuardOptions

MODEL: dict[str, Any] = {
    "name": "vit_tiny_patch16_224",
    "model_kwargs": {"img_size": 32, "patch_size": 4, "depth": 6},
    "num_classes": 10,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 1.0,
}
BATCH = 20
TURN = 60  # images of one domain before the other comes, where two alternate
PARKED = 1000  # images of a single class
INTRUDERS = 100  # images of noise or black between two domains

Images = tuple[Tensor, Tensor, Tensor]
"""Preprocessed images (N, 3, H, W); labels (N,), -1 for images without any; numbers of their domains (N,)."""


def plain(data: list[Images], rng: np.random.Generator) -> Images:
    """One domain after the other."""
    return _joined(data)


def class_sorted(data: list[Images], rng: np.random.Generator) -> Images:
    """One class after the other within each domain: the long single-class runs of a parked camera."""
    return plain([(x[y.argsort(stable=True)], y.sort().values, d) for x, y, d in data], rng)


def alternating(data: list[Images], rng: np.random.Generator) -> Images:
    """Two domains in turns, then the next two."""
    turns: list[Images] = []
    for first in range(0, len(data) - 1, 2):
        one, other = (_turns(domain) for domain in data[first : first + 2])
        turns += [turn for both in zip(one, other, strict=True) for turn in both]
    return plain(turns + data[len(data) // 2 * 2 :], rng)


def with_noise(data: list[Images], rng: np.random.Generator) -> Images:
    """White noise between the domains."""
    return _with_intruders(data, lambda shape: torch.from_numpy(rng.uniform(-1, 1, shape)).float())


def with_black(data: list[Images], rng: np.random.Generator) -> Images:
    """Black frames between the domains."""
    return _with_intruders(data, lambda shape: torch.full(shape, -1.0))


def parked(data: list[Images], rng: np.random.Generator) -> Images:
    """One domain, then a thousand images of a single class of the next: a camera that looks at one thing."""
    images, labels, domains = data[1]
    chosen = (labels == 0).nonzero().squeeze(1)
    chosen = chosen.repeat(PARKED // len(chosen) + 1)[:PARKED]
    return _joined([data[0], (images[chosen], labels[chosen], domains[chosen])])


STREAMS = {
    "plain": plain,
    "sorted": class_sorted,
    "alternating": alternating,
    "noise": with_noise,
    "black": with_black,
    "parked": parked,
}


def _joined(parts: list[Images]) -> Images:
    images, labels, domains = ([part[place] for part in parts] for place in range(3))
    return torch.cat(images), torch.cat(labels), torch.cat(domains)


def _turns(domain: Images) -> list[Images]:
    images, labels, domains = (part.split(TURN) for part in domain)
    return list(zip(images, labels, domains, strict=True))


def _with_intruders(data: list[Images], make: Callable[[tuple[int, ...]], Tensor]) -> Images:
    parts: list[Images] = []
    for images, labels, domains in data:
        nobody = torch.full((INTRUDERS,), -1)
        parts += [(images, labels, domains), (make((INTRUDERS, *images.shape[1:])), nobody, nobody)]
    return _joined(parts)


def read(root: str, model: torch.nn.Module, limit: int) -> tuple[list[Images], list[str]]:
    """The first `limit` images of each domain in an order mixed by a fixed seed, and the domains' names."""
    dataset = open_dataset(root, num_classes=10)
    preprocessing = preprocessing_of(model)
    transform = preprocessing.transform()
    data = []
    for number, domain in enumerate(dataset.domains):
        order = np.random.default_rng(0).permutation(len(domain.sources))[:limit]
        pixels = torch.stack([transform(domain.load(int(place))) for place in order])
        labels = torch.from_numpy(domain.labels[order]).long()
        data.append((preprocessing.normalise(pixels), labels, torch.full((len(order),), number)))
    return data, [domain.name for domain in dataset.domains]


def errors(predict: Callable[[Tensor], Tensor], stream: Images) -> Tensor:
    """Error of each domain, in %."""
    images, labels, domains = stream
    wrong = torch.cat([predict(batch).argmax(1) for batch in images.split(BATCH)]) != labels
    return torch.stack([wrong[domains == number].float().mean() * 100 for number in range(int(domains.max()) + 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--method", default="rem")
    parser.add_argument("--lr", default="1e-3", help="learning rates, with commas")
    parser.add_argument("--streams", default=",".join(STREAMS), help="which streams, with commas")
    parser.add_argument("--limit", type=int, default=300, help="images per domain")
    parser.add_argument("--guarded-only", action="store_true", help="leave out the method without the guard")
    args = parser.parse_args()

    def fresh() -> torch.nn.Module:
        return load_model(**MODEL, checkpoint=args.checkpoint)

    data, names = read(args.root, fresh(), args.limit)
    for kind in args.streams.split(","):
        stream = STREAMS[kind](data, np.random.default_rng(0))
        source = errors(build_method("source", fresh()), stream)
        for lr in args.lr.split(","):
            config = method_config(args.method, {"lr": float(lr)}, batch_size=BATCH)
            for options in (GuardOptions(),) if args.guarded_only else (None, GuardOptions()):
                torch.manual_seed(0)
                method = build_method(args.method, fresh(), config)
                guard = guarded(method, options, config)
                found = errors(guard or method, stream)
                worst = int((found - source).argmax())
                print(
                    f"{kind:<12} {args.method} {lr:<6} {'guarded' if guard else 'plain':<8} mean {found.mean():.1f} "
                    f"(source {source.mean():.1f}), worst {found[worst] - source[worst]:+.1f} ({names[worst]})"
                    + (f", {guard.total_alarms} rollbacks" if guard else ""),
                    flush=True,
                )


if __name__ == "__main__":
    main()
