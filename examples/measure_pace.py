"""What leaving updates out costs and saves: --adapt auto beside simpler rules.

    python examples/measure_pace.py cifar10_c/ --num-classes 10 --model-kwargs img_size=32 patch_size=4 depth=6
        --checkpoint vit_cifar10.safetensors --mean 0.5 --std 0.5 --conditions fog,contrast --severity 5 --images 500

ROOT is a tree of corrupted images that remtta eval takes. Its conditions come one after the other, --images of each,
in an order mixed by a fixed seed, and from the beginning again where there are fewer. Prints a Markdown table of rules
by which batches are learned from: all; by the pace of --adapt auto; one in K; the same number at random; all, but of
these only confident images. What is not learned from takes one forward pass. Errors in %, the share of frames that were
learned from, and CPU time in multiples of the source model's on the same frames.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.evaluation import open_dataset
from remtta.evaluation.domains import Domain
from remtta.guard.guard import guarded
from remtta.guard.observed import ObservedMethod
from remtta.guard.pace import Pace
from remtta.methods.method import Method, build_method
from remtta.methods.settings import METHOD_TABLE, method_config
from remtta.models.preprocessing import preprocessing_of
from remtta.options import GuardOptions

_CONFIDENT = 0.4  # entropy as a fraction of log C, EATA's

Wants = Callable[[Tensor], bool]


def batches(args: argparse.Namespace, domains: list[Domain], model: torch.nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Preprocessed images (B, 3, H, W) and their classes (B,), condition after condition."""
    preprocessing = replace(preprocessing_of(model), crop_pct=1.0)
    transform = preprocessing.transform()
    for domain in domains:
        order = np.random.default_rng(0).permutation(len(domain.labels))
        places = np.resize(order, args.images)
        loaded = {place: transform(domain.load(int(place))) for place in order[: args.images]}
        for chosen in np.split(places, range(args.batch_size, len(places), args.batch_size)):
            pixels = torch.stack([loaded[place] for place in chosen])
            yield preprocessing.normalise(pixels), torch.from_numpy(domain.labels[chosen]).long()


def rule(name: str, method: Method, every: int) -> Wants:
    """Which batches are learned from."""
    if name == "auto":
        pace = Pace(method)
        return lambda pixels: pace.before(pixels) is None
    if name == "every":
        counted = iter(range(10**9))
        return lambda pixels: next(counted) % every == 0
    if name == "random":
        generator = np.random.default_rng(1)
        return lambda pixels: bool(generator.random() < 1 / every)
    return lambda pixels: True


def run(name: str, args: argparse.Namespace, domains: list[Domain], model: torch.nn.Module) -> str:
    """A row of the table."""
    kind = "source" if name == "source" else args.method
    settings: dict[str, Any] = {"precision": args.precision}
    settings |= {"confident_below": _CONFIDENT} if name == "confident" else {}
    named = METHOD_TABLE[args.method]
    config = method_config(kind, settings, batch_size=args.batch_size)
    torch.manual_seed(0)
    method = build_method(kind, model, config)
    options = GuardOptions(action=named.action, answer=named.answer)
    guard = guarded(method, options, config, sparing=name not in ("always", "confident"))
    adapter, wants = ObservedMethod(method, [guard] if guard else []), rule(name, method, args.every)
    wrong: list[Tensor] = []
    learned, spent = 0, 0.0
    for pixels, labels in batches(args, domains, model):
        started = time.process_time()
        fit = torch.full((len(pixels),), method.adapts and wants(pixels))
        wrong.append(adapter.predict(pixels, fit).logits.argmax(1) != labels)
        spent += time.process_time() - started
        learned += int(fit.sum())
    method.reset()
    errors = 100 * torch.cat(wrong).float()
    args.base = spent if name == "source" else args.base
    each = " ".join(f"{part.mean():.1f}" for part in errors.split(args.images))
    share = 100 * learned / len(errors)
    return f"| {name} | {errors.mean():.2f} | {share:.1f} | {spent / args.base:.2f} | {each} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--model-kwargs", nargs="*", default=[], metavar="KEY=NUMBER")
    parser.add_argument("--num-classes", type=int)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--conditions", help="which, with commas; all that there are without")
    parser.add_argument("--severity", type=int)
    parser.add_argument("--images", type=int, default=500, help="of each condition")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--method", default="remtta", choices=METHOD_TABLE)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--every", type=int, default=2, metavar="K")
    parser.add_argument("--rules", default="always,auto,every,random,confident", help="which of these, with commas")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    given: dict[str, Any] = {key: (getattr(args, key),) * 3 for key in ("mean", "std") if getattr(args, key)}
    given["model_kwargs"] = {key: int(number) for key, _, number in (text.partition("=") for text in args.model_kwargs)}
    model = load_model(args.model, checkpoint=args.checkpoint, num_classes=args.num_classes, **given)
    classes = model.num_classes
    assert isinstance(classes, int)
    dataset = open_dataset(
        args.root,
        num_classes=classes,
        domains=args.conditions.split(",") if args.conditions else None,
        severities=[args.severity] if args.severity else None,
    )
    print("| learned from | error | frames | time | each condition |\n|---|---|---|---|---|")
    for name in ["source", *args.rules.split(",")]:
        print(run(name, args, list(dataset.domains), model), flush=True)


if __name__ == "__main__":
    main()
