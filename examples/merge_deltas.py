"""What the average of three deltas of one condition is worth on a fourth stream, beside each of them alone.

    python examples/merge_deltas.py cifar10_c/ --checkpoint vit_cifar10.safetensors

ROOT is an ImageNet-C-like tree at one severity; the model is the CIFAR-10 ViT of train_cifar10_model.py. The images of
each corruption are shuffled and parted in four: on three parts `remtta adapt` runs with its defaults and batches of 20,
and the fourth is predicted by the source weights plus a delta alone. It prints a Markdown table of errors in %.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from remtta import Delta, RunOptions, adapt_stream, apply_delta, load_delta, load_model
from remtta.deltas.mixing import average, scaled
from remtta.models.preprocessing import preprocessing_of

NAME = "vit_tiny_patch16_224"
MODEL: dict[str, Any] = {
    "model_kwargs": {"img_size": 32, "patch_size": 4, "depth": 6},
    "num_classes": 10,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 1.0,
}
STREAMS = 3


def parts(domain: Path, rng: np.random.Generator) -> list[list[Path]]:
    """The images of a domain, `<domain>/<severity>/<class>/*`, in four parts of about one size, in any order."""
    images = sorted(path for path in domain.glob("*/*/*") if path.is_file())
    return [[images[place] for place in part] for part in np.array_split(rng.permutation(len(images)), STREAMS + 1)]


def error(model: nn.Module, delta: Delta | None, images: list[Path]) -> float:
    """Share of images of which a model with a delta does not say the class, which their folder names; in %."""
    if delta is not None:
        apply_delta(model, delta)
    preprocessing = preprocessing_of(model)
    transform = preprocessing.transform()
    pixels = torch.stack([transform(Image.open(path).convert("RGB")) for path in images])
    classes = sorted(folder.name for folder in images[0].parent.parent.iterdir())
    labels = torch.tensor([classes.index(path.parent.name) for path in images])
    with torch.inference_mode():
        said = torch.cat([model(batch).argmax(1) for batch in preprocessing.normalise(pixels).split(100)])
    return 100 * float((said != labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--domains", help="which, with commas; all by default")
    args = parser.parse_args()

    def fresh() -> nn.Module:
        return load_model(NAME, **MODEL, checkpoint=args.checkpoint)

    names = (
        args.domains.split(",") if args.domains else sorted(path.name for path in args.root.iterdir() if path.is_dir())
    )
    print("| condition | source | each alone | average | half the average |\n|---|---|---|---|---|", flush=True)
    table: list[list[float]] = []
    for name in names:
        *seen, unseen = parts(args.root / name, np.random.default_rng(0))
        with tempfile.TemporaryDirectory() as scratch:
            runs = [Path(scratch) / str(number) for number in range(STREAMS)]
            for images, run in zip(seen, runs, strict=True):
                adapt_stream(fresh(), images, run, options=RunOptions(batch_size=20))
            deltas = [load_delta(run) for run in runs]
        mean = average(deltas)
        table.append([error(fresh(), each, unseen) for each in (None, *deltas, mean, scaled(mean, 0.5))])
        print(row(name, table[-1]), flush=True)
    print(row("mean", np.mean(table, axis=0).tolist()))


def row(name: str, errors: list[float]) -> str:
    """A line of the table."""
    source, *each, mean, half = (f"{value:.1f}" for value in errors)
    return f"| {name} | {source} | {', '.join(each)} | {mean} | {half} |"


if __name__ == "__main__":
    main()
