"""Classify a folder of images, or a camera's frames, with a file that adapts itself; without remtta and torch.

remtta export model.onnx --adaptive --output adaptive.onnx
python examples/device/classify.py adaptive.onnx frames/ --state state.npy > predictions.jsonl

Needs numpy, onnxruntime and Pillow; OpenCV for a camera, which is named by its number.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image


def pictures(source: str) -> Iterator[tuple[str, Image.Image]]:
    """Yield the names and pictures of a folder, in the order of their names, or of a camera."""
    if not source.isdigit():
        for path in sorted(
            path for path in Path(source).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png")
        ):
            yield str(path), Image.open(path).convert("RGB")
        return
    import cv2

    camera = cv2.VideoCapture(int(source))
    while (read := camera.read())[0]:
        yield f"camera {source}", Image.fromarray(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))


class Classifier:
    """A file that adapts itself, with its state."""

    def __init__(self, model: Path, state: Path | None) -> None:
        options = onnxruntime.SessionOptions()
        options.enable_mem_pattern = False  # which takes memory for each number of rows that the classifier sees
        self.session = onnxruntime.InferenceSession(str(model), options)
        facts = self.session.get_modelmeta().custom_metadata_map
        if "adaptive" not in facts:
            raise SystemExit(f"{model} does not adapt itself; remtta export --adaptive makes a file of it that does")
        self.labels, self.preprocessing = json.loads(facts["labels"]), json.loads(facts["preprocessing"])
        self.names = json.loads(facts["adaptive"])
        self.images, zero = self.session.get_inputs()
        if self.images.shape[0] not in (1, "batch"):
            raise SystemExit(
                f"{model} takes {self.images.shape[0]} images at once; export its classifier for any number"
            )
        self.state = np.load(state) if state and state.exists() else np.zeros(zero.shape, np.float32)
        if list(self.state.shape) != zero.shape:  # one of another model with as many classes begins anew
            raise SystemExit(f"{state} has {self.state.size} numbers, not {zero.shape[0]}: it is another model's")

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        """Return the fields of a prediction."""
        inputs = {"images": self.preprocess(image)[None], "state": self.state}
        (values,), self.state, status = self.session.run(None, inputs)
        if self.session.get_outputs()[0].name == "logits":
            values = np.exp(values - values.max())
            values /= values.sum()
        found = int(values.argmax())
        label = {"label": self.labels[found]} if self.labels else {}
        numbers = {name: round(float(value), 4) for name, value in zip(self.names, status, strict=True)}
        return {"class": found, **label, "prob": round(float(values[found]), 4), "status": numbers}

    def preprocess(self, image: Image.Image) -> np.ndarray:
        """Resize the short side of an image, cut out the centre, and normalise it."""
        of, (height, width) = self.preprocessing, self.preprocessing["input_size"]
        scale = min(image.width / int(width / of["crop_pct"]), image.height / int(height / of["crop_pct"]))
        size = int(image.width / scale + 1e-6), int(image.height / scale + 1e-6)
        left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
        resized = image.resize(size, Image.Resampling[of["interpolation"].upper()])
        resized = resized.crop((left, top, left + width, top + height))
        pixels = np.asarray(resized) if self.images.shape[-1] == 3 else np.asarray(resized).transpose(2, 0, 1)
        if self.images.type == "tensor(uint8)":  # the file normalises them
            return pixels
        axes = (1, 1, 3) if self.images.shape[-1] == 3 else (3, 1, 1)
        mean, std = (np.reshape(of[name], axes) for name in ("mean", "std"))
        return ((pixels / 255 - mean) / std).astype(np.float16 if "float16" in self.images.type else np.float32)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what remtta export --adaptive wrote, for one image at a time or any")
    parser.add_argument("source", help="a folder of images, or the number of a camera")
    parser.add_argument("--state", type=Path, help="go on from this file, and write it after every image")
    args = parser.parse_args(argv)
    classify = Classifier(args.model, args.state)
    for name, image in pictures(args.source):
        print(json.dumps({"source": name, **classify(image)}), flush=True)
        if args.state is not None:
            with open(temporary := args.state.with_suffix(".tmp"), "wb") as file:
                np.save(file, classify.state)
            os.replace(temporary, args.state)


if __name__ == "__main__":
    main()
