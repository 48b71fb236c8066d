"""Make a stream of changing corruptions in the format of CCC, for remtta eval.

    python examples/make_walk.py photographs/ video/ --severity 3 --pan 25
    remtta eval video/ --checkpoint vit.safetensors --methods source,rem,remtta

A corruption fades from --severity to clear images, then the next one grows, in steps of one severity with --speed
images each. With --pan N each photograph gives N frames of a camera that moves and zooms over it. SRC is a tree of
class folders. The format is that of Continually Changing Corruptions (Press et al., NeurIPS 2023, arXiv:2306.05401).
"""

from __future__ import annotations

import argparse
import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.lab.corruptions import SEVERITIES, corrupt
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.domains import Domain

CORRUPTIONS = "gaussian_noise,defocus_blur,fog,contrast,jpeg_compression"

Levels = tuple[int, int]
"""Severities of the fading and of the growing corruption."""


def corrupted(image: Image.Image, names: tuple[str, str], levels: Levels, rng: np.random.Generator) -> Image.Image:
    """Apply two corruptions to an image, one after the other."""
    for name, severity in zip(names, levels, strict=True):
        if severity:
            image = corrupt(image, name, severity, rng)
    return image


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
    parser.add_argument("--severity", type=int, choices=SEVERITIES, default=3, help="fade from this one to 0 and back")
    parser.add_argument("--num-classes", type=int, default=1000, help="of the model that is evaluated")
    parser.add_argument("--pan", type=int, default=1, metavar="N", help="number of frames per photograph")
    parser.add_argument("--corruptions", default=CORRUPTIONS)
    parser.add_argument("--speed", type=int, default=50, help="images per step")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (domain,) = open_dataset(args.source, num_classes=args.num_classes).domains
    rng, names = np.random.default_rng(args.seed), args.corruptions.split(",")
    frames, path = scenes(domain, args.pan, rng), fading(args.severity)
    last, made = str(rng.choice(names)), 0
    args.destination.mkdir(parents=True)
    with tarfile.open(args.destination / "serial_00000.tar", "w") as tar:
        while made < args.images:
            pair = last, str(rng.choice([name for name in names if name != last]))
            for levels in path:
                for shot, label in itertools.islice(frames, min(args.speed, args.images - made)):
                    write(tar, f"sample_{made}", corrupted(shot, pair, levels, rng), label, pair, levels)
                    made += 1
            last = pair[1]


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
