"""Compare a file that adapts itself with the method `fast` of its classifier, on your own images.

    remtta export model.onnx --adaptive --output adaptive.onnx
    python examples/check_adaptive.py adaptive.onnx model.onnx images/ --streams 1 4 20 50 20-sorted

Prints a Markdown table; each row is a stream of all images below a folder in batches of that size, shuffled, or sorted
by the name of their folder. In its middle, an image of NaN, which `fast` never sees, must leave the state as it was,
and a new session with the stored state must return the same as the old one, bit for bit; the stream continues in it.
Ends with exit code 1 if a row has something else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image
from torch import Tensor

from remtta import Adapter, load_model
from remtta.backbones.lookup import backbone_of
from remtta.models.preprocessing import preprocessing_of

Row = dict[str, Any]


class Device:
    """The loop on a device: a session, the state, and the temperature of the last predictions."""

    def __init__(self, path: Path, state: np.ndarray | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.images, zero = self.session.get_inputs()
        self.state = np.zeros(zero.shape, np.float32) if state is None else state
        self.temperature, names = 1.0, json.loads(self.session.get_modelmeta().custom_metadata_map["adaptive"])
        self._place = names.index("temperature")

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities (B, C) of preprocessed images (B, 3, H, W)."""
        given = images.permute(0, 2, 3, 1) if self.images.shape[-1] == 3 else images
        kind = np.float16 if self.images.type == "tensor(float16)" else np.float32
        feeds = {"images": given.numpy().astype(kind), "state": self.state}
        returned, self.state, status = self.session.run(None, feeds)
        values, self.temperature = torch.from_numpy(returned), float(status[self._place])
        return values.softmax(-1) if self.session.get_outputs()[0].name == "logits" else values


def remember(model: Any) -> None:
    """Compute the logits of an image once, as long as they depend on no other image: they are the same each time."""
    known: dict[int, Tensor] = {}
    forward: Callable[[Tensor], Tensor] = model.forward

    def remembered(images: Tensor) -> Tensor:
        keys = [hash(image.numpy().tobytes()) for image in images]
        if new := [place for place, key in enumerate(keys) if key not in known]:
            known.update(zip((keys[place] for place in new), forward(images[new]), strict=True))
        return torch.stack([known[key] for key in keys])

    model.forward = remembered


def compare(file: Path, model: Any, batches: list[list[Path]], load: Callable[[Path], Tensor]) -> Row:
    """Compare a stream: the images whose classes differ, the largest difference of a probability, and two checks."""
    device, adapter = Device(file), Adapter(model, "fast", batch_size=len(batches[0]), precision="fp32")
    row: Row = {"other classes": 0, "largest difference": 0.0}
    for number, paths in enumerate(batches):
        images = torch.stack([load(path) for path in paths])
        prediction, count = adapter.pipeline.predict(images), len(images)
        adapter.pipeline.learn()
        if number == len(batches) // 2:
            nan, before = torch.full_like(images[:1], torch.nan), device.state
            device(nan)
            row["NaN ignored"] = device.state.tobytes() == before.tobytes()
            images = torch.cat([images, nan]) if count > 1 else images
            restarted, got = Device(file, device.state), device(images)
            same = restarted(images).numpy().tobytes() == got.numpy().tobytes()
            row["restart exact"] = same and restarted.state.tobytes() == device.state.tobytes()
            device = restarted
        else:
            got = device(images)
        got, raw = got[:count], prediction.logits * (prediction.temperature or 1.0)
        expected = (raw / device.temperature).softmax(-1)
        row["other classes"] += int((got.argmax(-1) != expected.argmax(-1)).sum())
        row["largest difference"] = max(row["largest difference"], float((got - expected).abs().max()))
    adapter.reset()  # also the statistics of batch norms
    adapter.close()
    return row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what remtta export --adaptive wrote, for any number of images")
    parser.add_argument("model", help="its classifier: an ONNX file, or what remtta's --model takes")
    parser.add_argument("images", type=Path, help="a folder of images in folders")
    parser.add_argument("--checkpoint", help="weights of the classifier")
    parser.add_argument("--mean", type=float, metavar="M", help="of pixels, of all channels; also --std, --crop-pct")
    parser.add_argument("--std", type=float, metavar="S")
    parser.add_argument("--crop-pct", type=float)
    parser.add_argument("--streams", nargs="+", default=["20"], metavar="B", help="batch sizes, also 20-sorted")
    parser.add_argument("--limit", type=int, metavar="N", help="images of a stream, drawn at random")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of a probability")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    given = {name: getattr(args, name) for name in ("checkpoint", "mean", "std", "crop_pct")}
    model = load_model(args.model, **given)
    if not backbone_of(model).batch_norms:
        if "norm_channels" in Device(args.file).session.get_modelmeta().custom_metadata_map:
            sys.exit(
                f"batch norms of {args.file} follow the stream, and {args.model} has none: name the model in torch"
            )
        remember(model)
    preprocessing = preprocessing_of(model)
    transform = preprocessing.transform()

    def load(path: Path) -> Tensor:
        return preprocessing.normalise(transform(Image.open(path).convert("RGB"))[None])[0]

    paths = sorted(path for path in args.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    random.Random(0).shuffle(paths)
    paths, right = paths[: args.limit], True
    for name in args.streams:
        size, order = int(name.removesuffix("-sorted")), "sorted" if name.endswith("-sorted") else "shuffled"
        stream = sorted(paths, key=lambda path: path.parent.name) if order == "sorted" else paths
        batches = [stream[start : start + size] for start in range(0, len(stream), size)]
        row = {"order": order, "batch": size, "images": len(stream), **compare(args.file, model, batches, load)}
        if name == args.streams[0]:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
        cells = (f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values())
        print(f"| {' | '.join(cells)} |", flush=True)
        close = row["largest difference"] <= args.tolerance
        right = right and close and not row["other classes"] and row["NaN ignored"] and row["restart exact"]
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
