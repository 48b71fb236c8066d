"""Classify a folder of images, or a camera's frames, with a file that adapts itself; without remtta and torch.

remtta export model.onnx --adaptive --output adaptive.onnx
python examples/device/classify.py adaptive.onnx frames/ --state state.npy >> predictions.jsonl

A stop by SIGINT or SIGTERM writes the state. The next run continues the stream, with the first image of the folder.

Needs numpy, onnxruntime and Pillow; OpenCV for a camera, which is named by its number.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

SAVE_EVERY_S = 10.0  # what a power failure loses of the state; each write wears out flash memory


def pictures(source: str) -> Iterator[tuple[str, Image.Image | OSError]]:
    """Yield the names and pictures of a folder, in the order of their names, or of a camera until it fails; an error
    in place of a picture that cannot be read.
    """
    if not source.isdigit():
        suffixes = (".jpg", ".jpeg", ".png")
        if not Path(source).is_dir():
            raise SystemExit(f"{source}: no such folder")
        paths = sorted(path for path in Path(source).rglob("*") if path.suffix.lower() in suffixes)
        if not paths:
            raise SystemExit(f"{source} has no images ({', '.join(suffixes)})")
        for path in paths:
            try:
                with Image.open(path) as image:
                    picture: Image.Image | OSError = to_rgb(image)
            except OSError as error:
                picture = error
            yield str(path), picture
        return
    import cv2

    camera = cv2.VideoCapture(int(source))
    while (read := camera.read())[0]:
        yield f"camera {source}", Image.fromarray(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    raise SystemExit(f"camera {source} returns no frame")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image as remtta does: rotated by its EXIF tag, 16 bits scaled to 8, transparency on white."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


class Classifier:
    """A file that adapts itself, with its state."""

    def __init__(self, model: Path, state: Path | None) -> None:
        if not model.exists():
            raise SystemExit(f"{model}: no such file")
        options = onnxruntime.SessionOptions()
        options.enable_mem_pattern = False  # which takes memory for each number of rows that the classifier sees
        try:
            self.session = onnxruntime.InferenceSession(str(model), options)
        except Exception as error:  # onnxruntime's own, of no common class
            raise SystemExit(f"{model} cannot be loaded by ONNX Runtime: {error}") from error
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
        self.path, self.state = state, np.zeros(zero.shape, np.float32)
        if state and state.exists():
            try:
                self.state = np.load(state)
            except (OSError, ValueError, EOFError) as error:
                raise SystemExit(f"{state} is damaged; remove it to begin a new stream") from error
        if list(self.state.shape) != zero.shape:
            raise SystemExit(f"{state} has {self.state.size} numbers, not {zero.shape[0]}: it is another model's")

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        """Return the fields of a prediction."""
        inputs = {"images": self.preprocess(image)[None], "state": self.state}
        (values,), state, status = self.session.run(None, inputs)
        if self.state[0] not in (0, state[0]):  # the model's number; the file itself would begin a new stream
            raise SystemExit(f"{self.path} is another model's; remove it to begin a new stream")
        self.state = state
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
    parser.add_argument("--state", type=Path, help="go on from this file; written every 10 s, and at the end")
    args = parser.parse_args(argv)
    classify = Classifier(args.model, args.state)
    save(classify.state, args.state)  # at once: it may be impossible
    saved = time.monotonic()
    try:
        for name, image in pictures(args.source):
            row = {"error": str(image)} if isinstance(image, OSError) else classify(image)
            print(json.dumps({"source": name, **row}), flush=True)
            if time.monotonic() - saved > SAVE_EVERY_S:
                save(classify.state, args.state)
                saved = time.monotonic()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        save(classify.state, args.state)


def save(state: np.ndarray, path: Path | None) -> None:
    """Replace a file by a state, whole or not at all."""
    if path is None:
        return
    try:
        with open(temporary := path.with_suffix(".tmp"), "wb") as file:
            np.save(file, state)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as services are stopped
    main()
