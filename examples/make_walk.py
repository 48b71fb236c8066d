"""Make a stream of changing corruptions at a constant accuracy, following CCC's generator, for remtta eval.

    python examples/make_walk.py photographs/ walk/ --checkpoint vit.safetensors --accuracy 0.4 --images 3000
    python examples/make_walk.py photographs/ video/ --severity 3 --pan 25
    remtta eval walk/ --checkpoint vit.safetensors --methods source,rem,remtta

Every image has two corruptions. One fades while the next grows, in steps of one severity from 0 to 5, with --speed
images per step. The path of severities keeps the source model's accuracy as near to --accuracy as possible, by a table
that is measured first, with --calibration images for each pair of severities. With --severity no model is needed: a
corruption fades from this severity to clear images, then the next one grows. With --pan N each photograph gives N
frames of a camera that moves and zooms over it.

SRC is a tree of class folders. Follows Continually Changing Corruptions (Press et al., NeurIPS 2023, arXiv:2306.05401),
which has severities in steps of a quarter and a ResNet-50's table of all pairs; results are not comparable.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from remtta import load_model
from remtta.corruptions import corrupt
from remtta.evaluation import open_dataset
from remtta.evaluation.domains import Domain
from remtta.models.card import card_of
from remtta.models.preprocessing import preprocessing_of

CORRUPTIONS = "gaussian_noise,defocus_blur,fog,contrast,jpeg_compression"
LEVELS = 6  # severities, 0 among them

Levels = tuple[int, int]
"""Severities of the fading and of the growing corruption."""


def corrupted(image: Image.Image, names: tuple[str, str], levels: Levels, rng: np.random.Generator) -> Image.Image:
    """Apply two corruptions to an image, one after the other."""
    for name, severity in zip(names, levels, strict=True):
        if severity:
            image = corrupt(image, name, severity, rng)
    return image


def accuracies(model: nn.Module, domain: Domain, names: tuple[str, str], count: int) -> np.ndarray:
    """Return the model's accuracy on `count` images by both severities: shape (6, 6)."""
    preprocessing = preprocessing_of(model)
    transform, rng = preprocessing.transform(), np.random.default_rng(0)
    places = rng.permutation(len(domain.labels))[:count]
    labels, table = torch.from_numpy(domain.labels[places]), np.zeros((LEVELS, LEVELS))

    @torch.no_grad()
    def predicted(levels: Levels) -> Tensor:
        images = [transform(corrupted(domain.load(int(place)), names, levels, rng)) for place in places]
        classes: Tensor = model(preprocessing.normalise(torch.stack(images))).argmax(1)
        return classes

    for levels in np.ndindex(LEVELS, LEVELS):
        table[levels] = float((predicted((levels[0], levels[1])) == labels).double().mean())
    return table


def way(table: np.ndarray, accuracy: float) -> list[Levels]:
    """Return the path from one corruption alone to the other alone, in steps of one severity, nearest to an accuracy.

    For each pair of severities, only the path with the least mean distance is extended. The first corruption begins at
    any severity above 0, and the second ends at any above 0.
    """
    found: dict[Levels, list[Levels]] = {}

    def distance(steps: list[Levels]) -> float:
        return float(np.mean([abs(table[step] - accuracy) for step in steps]))

    for first in range(LEVELS - 1, -1, -1):
        for second in range(LEVELS):
            here = (first, second)
            before = [found[last] for last in ((first + 1, second), (first, second - 1)) if last in found]
            ways = [[*steps, here] for steps in before] + ([[here]] if first and not second else [])
            found[here] = min(ways, key=distance)
    return min((found[0, second] for second in range(1, LEVELS)), key=distance)


def measured(model: nn.Module, domain: Domain, pair: tuple[str, str], args: argparse.Namespace) -> list[Levels]:
    """Return and print the path between two corruptions at the requested accuracy."""
    table = accuracies(model, domain, pair, args.calibration)
    found = way(table, args.accuracy)
    shown = ", ".join(f"{one}/{other} {100 * table[one, other]:.0f} %" for one, other in found)
    print(f"{' to '.join(pair)}: {shown}", flush=True)
    return found


def fading(severity: int) -> list[Levels]:
    """Return the path from one corruption at a severity to clear images, and on to the other at the same severity."""
    return [*((level, 0) for level in range(severity, 0, -1)), *((0, level) for level in range(severity + 1))]


def panned(image: Image.Image, length: int, rng: np.random.Generator) -> Iterator[Image.Image]:
    """Yield frames of a camera that moves and zooms evenly from one window of an image to another.

    Windows are squares of 70 to 100 % of the short side at random places; frames are as large as the short side.
    """
    side = min(image.size)
    windows = []
    for _ in range(2):
        width = side * rng.uniform(0.7, 1)
        left, top = rng.uniform(0, 1, 2) * (np.array(image.size) - width)
        windows.append(np.array([left, top, left + width, top + width]))
    for part in np.linspace(0, 1, length):
        box = tuple((1 - part) * windows[0] + part * windows[1])
        yield image.resize((side, side), Image.Resampling.BICUBIC, box=box)


def scenes(domain: Domain, pan: int, rng: np.random.Generator) -> Iterator[tuple[Image.Image, int]]:
    """Yield random photographs with their labels, without end; or `pan` frames of each."""
    while True:
        place = int(rng.integers(len(domain.labels)))
        image, label = domain.load(place), int(domain.labels[place])
        shots = panned(image, pan, rng) if pan > 1 else [image]
        yield from ((shot, label) for shot in shots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint")
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--accuracy", type=float, default=0.4)
    parser.add_argument("--severity", type=int, choices=range(1, LEVELS), help="fade from this severity to 0 and back")
    parser.add_argument("--num-classes", type=int, default=1000, help="with --severity: number of classes of the model")
    parser.add_argument("--pan", type=int, default=1, metavar="N", help="number of frames per photograph")
    parser.add_argument("--corruptions", default=CORRUPTIONS)
    parser.add_argument("--calibration", type=int, default=50, help="images for each number of the table")
    parser.add_argument("--speed", type=int, default=50, help="images per step")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = None if args.severity else load_model(args.model, checkpoint=args.checkpoint, mean=args.mean, std=args.std)
    classes = args.num_classes if model is None else card_of(model).num_classes
    (domain,) = open_dataset(args.source, num_classes=classes).domains
    rng, names = np.random.default_rng(args.seed), args.corruptions.split(",")
    frames, ways = scenes(domain, args.pan, rng), dict[tuple[str, str], list[Levels]]()
    last, made = str(rng.choice(names)), 0
    args.destination.mkdir(parents=True)
    with tarfile.open(args.destination / "serial_00000.tar", "w") as tar:
        while made < args.images:
            pair = last, str(rng.choice([name for name in names if name != last]))
            if pair not in ways:
                ways[pair] = measured(model, domain, pair, args) if model else fading(args.severity)
            for levels in ways[pair]:
                for shot, label in itertools.islice(frames, min(args.speed, args.images - made)):
                    write(tar, f"sample_{made}", corrupted(shot, pair, levels, rng), label, pair, levels)
                    made += 1
            last = pair[1]
    all_ways = {"+".join(pair): steps for pair, steps in ways.items()}
    goal = {"accuracy": args.accuracy} if model else {"severity": args.severity}
    (args.destination / "walk.json").write_text(json.dumps({**goal, "pan": args.pan, "ways": all_ways}, indent=2))


def write(
    tar: tarfile.TarFile, key: str, image: Image.Image, label: int, names: tuple[str, str], levels: Levels
) -> None:
    """Add a sample in the format of CCC's files."""
    content = io.BytesIO()
    image.save(content, "jpeg", quality=85)
    info = f"++n1++{names[0]}++s1++{levels[0]}++n2++{names[1]}++s2++{levels[1]}"
    for name, data in {"info": info.encode(), "input.jpg": content.getvalue(), "output.cls": b"%d" % label}.items():
        member = tarfile.TarInfo(f"{key}.{name}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    main()
