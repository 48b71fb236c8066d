"""Adapt to a video and print when the prediction changes.

python examples/adapt_video.py clip.mp4 --checkpoint vit.safetensors --output run1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from remtta import RemttaError, RunOptions, adapt_stream, load_model, open_stream


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--checkpoint", help="weights; timm's pretrained ones by default")
    parser.add_argument("--every", type=int, default=5, help="take every n-th frame: neighbours are alike")
    parser.add_argument("--output", default="run1")
    args = parser.parse_args(argv)
    try:
        summary = adapt_stream(
            load_model(args.model, checkpoint=args.checkpoint),
            open_stream(args.video, frame_stride=args.every),
            args.output,
            options=RunOptions(batch_size=16),
        )
    except RemttaError as error:
        raise SystemExit(f"Error: {error}") from None
    shown = None
    with open(Path(args.output) / "predictions.jsonl", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if "class" in row and row["class"] != shown:
                shown = row["class"]
                print(f"{row['time_s']:8.2f} s  {row['label'] or shown}  ({row['prob']:.0%})")
    print(summary.report())


if __name__ == "__main__":
    main()
