"""Adapt inside your own loop, here over a video read by OpenCV.

python examples/own_loop.py clip.mp4 --model vit_base_patch16_224 --state adapter.pt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import torch

from remtta import Adapter, RemttaError, load_model


def pictures(source: str) -> Iterator[Any]:
    """Yield a video's frames as RGB arrays (H, W, 3)."""
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        raise SystemExit(f"Error: {source} cannot be opened")
    while (read := capture.read())[0]:
        yield cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB)
    capture.release()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a video, or the address of a camera")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--checkpoint", help="weights; timm's pretrained ones by default")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--state", type=Path, help="go on from this file, and write it at the end")
    args = parser.parse_args(argv)
    try:
        adapter = Adapter(load_model(args.model, checkpoint=args.checkpoint), batch_size=args.batch_size)
        if args.state and args.state.exists():
            adapter.load_state_dict(torch.load(args.state, weights_only=True))
        frames = pictures(args.source)
        while images := list(islice(frames, args.batch_size)):
            probs = adapter(images)  # predicts, then adapts
            print(probs.argmax(1).tolist())
    except RemttaError as error:
        raise SystemExit(f"Error: {error}") from None
    if args.state:
        torch.save(adapter.state_dict(), args.state)
    moved = max(change.abs().max().item() for change in adapter.delta().values())
    print(f"largest change of a weight or of the head's bias: {moved:.2g}")


if __name__ == "__main__":
    main()
