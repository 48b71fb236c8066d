"""Train a small source ResNet or ConvNeXt for CIFAR-10 from a folder of clean images, in a given time.

The folder holds `train/<class>/*` and, to measure the error, `test/<class>/*`;
classes are sorted by name. Both models are timm's, with strides so small that
the last feature map has 4 x 4 positions for REM to mask: a resnet18 of half the
width at 64 pixels (2.8 million weights, batch norms), and a convnext_atto at 32
pixels with fewer blocks, and with 3 x 3 instead of 7 x 7 kernels, which are faster
on CPUs (1.2 million weights, layer norms). The augmentation is random crops and
flips, never the corruptions. The learning rate depends on the remaining time, so
training also ends properly on a slow machine.

    python examples/train_cifar10_conv.py ./cifar10 resnet.safetensors --model resnet --minutes 30

    remtta corrupt ./cifar10/test ./cifar10-c --severity 5

    remtta eval ./cifar10-c --severity 5 --methods source,norm,tent,rem --batch-size 64 \\
        --model resnet18 --checkpoint resnet.safetensors --num-classes 10 --input-size 64 \\
        --model-kwargs output_stride=16 "channels=(32,64,128,256)" \\
        --mean 0.5 --std 0.5 --crop-pct 1.0 --interpolation bicubic --output ./results

For --model convnext: --model convnext_atto --input-size 32 --model-kwargs patch_size=2 output_stride=8 \\
    "depths=(1,2,3,1)" "dims=(32,64,128,256)" "kernel_sizes=(3,3,3,3)".
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

STORED = 32  # pixels, CIFAR's own
PADDING = 4
WARMUP_SHARE = 0.05  # of the time


class Recipe(NamedTuple):
    """A timm model, the side of its images in pixels, and its training settings."""

    name: str
    kwargs: dict[str, Any]
    size: int
    lr: float  # at a batch of 128
    weight_decay: float
    sgd: bool


RECIPES = {
    "resnet": Recipe(
        "resnet18", {"channels": (32, 64, 128, 256), "output_stride": 16}, 64, lr=0.1, weight_decay=5e-4, sgd=True
    ),
    "convnext": Recipe(
        "convnext_atto",
        {
            "patch_size": 2,
            "output_stride": 8,
            "depths": (1, 2, 3, 1),
            "dims": (32, 64, 128, 256),
            "kernel_sizes": (3, 3, 3, 3),
        },
        32,
        lr=2e-3,
        weight_decay=0.05,
        sgd=False,
    ),
}


def read(folder: Path) -> tuple[Tensor, Tensor, list[str]]:
    """Return all images, uint8 (N, 3, 32, 32), their labels (N,), and the class names."""
    transform = v2.Compose([v2.Resize((STORED, STORED), antialias=True), v2.PILToTensor()])
    images = ImageFolder(folder, transform)
    return torch.stack([image for image, _ in images]), torch.tensor(images.targets), images.classes


def preprocess(images: Tensor, size: int) -> Tensor:
    """Convert uint8 images to [-1, 1], at the model's size."""
    scaled = images.float() / 127.5 - 1
    return scaled if size == STORED else F.interpolate(scaled, size=(size, size), mode="bicubic").clamp(-1, 1)


def augment(images: Tensor) -> Tensor:
    """Return a random crop of each padded image, mirrored with probability 1/2."""
    count, channels = images.shape[:2]
    padded = F.pad(images.float(), [PADDING] * 4, mode="reflect").to(images.dtype)
    top, left = torch.randint(2 * PADDING + 1, (2, count, 1))
    rows, columns = top + torch.arange(STORED), left + torch.arange(STORED)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
    picked = torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None]
    return padded[(*picked, rows[:, None, :, None], columns[:, None, None, :])]


def learning_rate(share: float, peak: float) -> float:
    """Return the learning rate at a fraction of the time: linear warm-up, then half a cosine to 0."""
    if share < WARMUP_SHARE:
        return peak * (share + 0.1 * WARMUP_SHARE) / (1.1 * WARMUP_SHARE)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP_SHARE) / (1 - WARMUP_SHARE))))


def make_optimizer(model: nn.Module, recipe: Recipe, lr: float) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum, or AdamW; without weight decay for norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True) if recipe.sgd else torch.optim.AdamW(groups, lr)


@torch.no_grad()
def error(model: nn.Module, images: Tensor, labels: Tensor, size: int, device: torch.device) -> float:
    """Return the error in percent."""
    model.eval()
    wrong = 0
    for part, truth in zip(images.split(256), labels.split(256), strict=True):
        wrong += int((model(preprocess(part.to(device), size)).argmax(1).cpu() != truth).sum())
    model.train()
    return 100 * wrong / len(labels)


def save(model: nn.Module, path: Path) -> None:
    """Write a checkpoint for `remtta.load_model`: weights in half precision, statistics unchanged."""
    halved = {name for name, _ in model.named_parameters()}
    state = {n: (t.half() if n in halved else t).cpu().contiguous() for n, t in model.state_dict().items()}
    save_file(state, path)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    args: argparse.Namespace,
    recipe: Recipe,
    started: float,
) -> float:
    """Train for one pass in random order, or until the time is up; return the mean loss."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for chosen in torch.randperm(len(images)).split(args.batch_size):
        share = (time.monotonic() - started) / (60 * args.minutes)
        if share >= 1 and count:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share, recipe.lr * args.batch_size / 128)
        inputs = preprocess(augment(images[chosen]).to(device), recipe.size).contiguous(
            memory_format=torch.channels_last
        )
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float(), labels[chosen].to(device), label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        total, count = total + float(loss.detach()) * len(chosen), count + len(chosen)
    return total / count


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with train/<class>/* and perhaps test/<class>/*")
    parser.add_argument("output", type=Path, help="where to write the safetensors checkpoint")
    parser.add_argument("--model", choices=RECIPES, default="resnet")
    parser.add_argument("--minutes", type=float, default=30.0, help="time for training")
    parser.add_argument("--start", type=Path, help="go on from such a checkpoint, at half the learning rate")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--bfloat16", action="store_true", help="train under autocast: twice as fast where it is native"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = RECIPES[args.model]
    images, labels, classes = read(args.data / "train")
    test = read(args.data / "test") if (args.data / "test").is_dir() else None
    if test is not None and test[2] != classes:
        raise SystemExit("Error: train and test do not have the same classes")
    model: nn.Module = timm.create_model(recipe.name, pretrained=False, num_classes=len(classes), **recipe.kwargs)
    if args.start:
        model.load_state_dict(load_file(args.start))
        recipe = recipe._replace(lr=recipe.lr / 2)
    model = model.to(device).to(memory_format=torch.channels_last).train()
    optimizer = make_optimizer(model, recipe, recipe.lr)
    started, epoch = time.monotonic(), 0
    while time.monotonic() - started < 60 * args.minutes:
        epoch += 1
        loss = train_epoch(model, optimizer, images, labels, args, recipe, started)
        told = "" if test is None else f", test error {error(model, test[0], test[1], recipe.size, device):.2f} %"
        print(f"epoch {epoch}: loss {loss:.3f}{told}, {time.monotonic() - started:.0f} s", flush=True)
        save(model, args.output)


if __name__ == "__main__":
    main()
