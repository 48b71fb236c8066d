"""Adapt inside your own loop over batches.

python examples/own_loop.py ./frames --model vit_base_patch16_224
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import timm
import torch
from PIL import Image

from remtta import REM, REMConfig, RemttaError, load_model, open_stream


def batches(source: str, model: torch.nn.Module, size: int) -> Iterator[torch.Tensor]:
    """Preprocess a stream as the model asks for: batches of shape (B, 3, H, W)."""
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    frames = open_stream(source).frames
    while chunk := list(islice(frames, size)):
        images = [image for frame in chunk if (image := read(frame)) is not None]
        if images:
            yield torch.stack([transform(image) for image in images])


def read(frame: Any) -> Image.Image | None:
    try:
        image: Image.Image = frame.load()
    except RemttaError as error:  # one broken frame must not end a long stream
        print(f"left out {frame.source}: {error}", file=sys.stderr)
        return None
    return image


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="image, folder, glob or video")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--checkpoint", help="weights; timm's pretrained ones by default")
    parser.add_argument("--batch-size", type=int, default=20)
    args = parser.parse_args(argv)
    try:
        model = load_model(args.model, checkpoint=args.checkpoint)
        rem = REM(model, REMConfig(mask_ratios=(0.0, 0.1, 0.2)))
        for images in batches(args.source, model, args.batch_size):
            logits = rem(images)  # predicts, then adapts
            print(logits.argmax(1).tolist())
    except RemttaError as error:
        raise SystemExit(f"Error: {error}") from None
    moved = max(change.abs().max().item() for change in rem.delta().values())
    print(f"{rem.num_updates} updates, largest change of a norm weight: {moved:.2g}")
    rem.reset()  # back to the source weights, exactly


if __name__ == "__main__":
    main()
