"""What mixed answers and the guard do on streams made to harm: sorted, alternating, of one class, with noise between.

    python examples/guard_streams.py cifar10_c/ --checkpoint vit_cifar10.safetensors
    python examples/guard_streams.py cifar10_c/ --checkpoint vit_cifar10.safetensors --streams plain --lr 1e-3
        --anchor 0 --guard none --guard answer=adapted --guard default --guard window=200,least=64

ROOT is an ImageNet-C-like tree at one severity; the model is the CIFAR-10 ViT of train_cifar10_model.py. For every
stream, learning rate and setting of the guard it prints a row of a Markdown table: the mean error over the domains,
the source model's, and the domain that is worst against the source.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.errors import UsageError
from remtta.evaluation import open_dataset
from remtta.guard.guard import guarded
from remtta.guard.observed import ObservedMethod
from remtta.methods.method import build_method
from remtta.methods.settings import method_config
from remtta.models.preprocessing import preprocessing_of
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


def one_class(data: list[Images], rng: np.random.Generator) -> Images:
    """A single class of every domain, from the first frame on."""
    return plain([(x[y == 3], y[y == 3], d[y == 3]) for x, y, d in data], rng)


STREAMS = {
    "plain": plain,
    "sorted": class_sorted,
    "alternating": alternating,
    "noise": with_noise,
    "black": with_black,
    "parked": parked,
    "one class": one_class,
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


def errors(predict: Callable[[Tensor], Tensor], stream: Images) -> list[Tensor]:
    """100 for each image of each domain that is classified wrongly, 0 for the others: the mean is the error in %."""
    images, labels, domains = stream
    wrong = torch.cat([predict(batch).argmax(1) for batch in images.split(BATCH)]) != labels
    return [100 * wrong[domains == number].float() for number in range(int(domains.max()) + 1)]


def mean(found: list[Tensor]) -> float:
    """Mean of the domains' errors, in %."""
    return float(torch.stack([domain.mean() for domain in found]).mean())


def worst(found: list[Tensor], source: list[Tensor], names: list[str]) -> str:
    """The domain that is worst against the source, with the standard error of the paired difference."""
    differences = [adapted - before for adapted, before in zip(found, source, strict=True)]
    number = int(torch.stack([difference.mean() for difference in differences]).argmax())
    difference = differences[number]
    return f"{difference.mean():+.1f} ± {difference.std() / len(difference) ** 0.5:.1f} {names[number]}"


def guard_options(text: str) -> GuardOptions | None:
    """A guard from "default", "none", or NAME=VALUE,... in place of some of the defaults."""
    if text == "none":
        return None
    default = GuardOptions("rollback", "both")
    defaults = vars(default)
    settings = {}
    for pair in [] if text == "default" else text.split(","):
        name, found, value = pair.partition("=")
        if not found or name not in defaults:
            raise UsageError(f'--guard takes default, none or NAME=VALUE,... of {", ".join(defaults)}, got "{pair}"')
        try:
            settings[name] = type(defaults[name])(value)
        except ValueError:
            raise UsageError(f'--guard {name} must be a number such as {defaults[name]}, got "{value}"') from None
    return replace(default, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--method", default="rem")
    parser.add_argument("--lr", default="3e-3,1e-2,1e-1", help="learning rates, with commas")
    parser.add_argument("--anchor", default="auto", help="share of the way back after each step, or auto")
    parser.add_argument("--streams", default=",".join(STREAMS), help="which streams, with commas")
    parser.add_argument("--limit", type=int, default=300, help="images per domain")
    parser.add_argument(
        "--guard",
        action="append",
        metavar="NAME=VALUE,...",
        help="default, none, or fields of GuardOptions; repeatable",
    )
    args = parser.parse_args()
    try:
        settings = {text: guard_options(text) for text in args.guard or ["default"]}
    except UsageError as error:
        parser.error(str(error))

    def fresh() -> torch.nn.Module:
        return load_model(**MODEL, checkpoint=args.checkpoint)

    anchor = args.anchor if args.anchor == "auto" else float(args.anchor)
    data, names = read(args.root, fresh(), args.limit)
    print("| stream | learning rate | guard | error % | source | worst domain | rollbacks | weight |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for kind in args.streams.split(","):
        stream = STREAMS[kind](data, np.random.default_rng(0))
        source = errors(build_method("source", fresh()), stream)
        for lr in args.lr.split(","):
            config = method_config(args.method, {"lr": float(lr), "anchor": anchor}, batch_size=BATCH)
            for setting, options in settings.items():
                torch.manual_seed(0)
                method = build_method(args.method, fresh(), config)
                guard = guarded(method, options, config)
                weights: list[float] = []

                adapter = ObservedMethod(method, [guard] if guard else [])

                def step(images: Tensor, adapter: ObservedMethod = adapter, by: list[float] = weights) -> Tensor:
                    answers = adapter.predict(images)
                    by.append(answers.weight)
                    return answers.logits

                found = errors(step, stream)
                print(
                    f"| {kind} | {args.method} {lr} | {setting} | {mean(found):.1f} | {mean(source):.1f} "
                    f"| {worst(found, source, names)} "
                    f"| {guard.judge.total_alarms if guard else ''} | {np.mean(weights):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
