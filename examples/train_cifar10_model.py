"""Train a small source ViT for CIFAR-10 from a folder of images, on clean images only.

The folder holds `train/<class>/*` and, to measure the error, `test/<class>/*`;
classes are sorted by name. The model is timm's vit_tiny_patch16_224 at 32 pixels
with patches of 4 and 6 blocks (2.7 million weights). The augmentation is random
crops, flips and, optionally, MixUp, never the corruptions.

    python examples/train_cifar10_model.py ./cifar10 vit_cifar10.safetensors

    remtta corrupt ./cifar10/test ./cifar10-c --severity 5

    remtta eval ./cifar10-c --severity 5 --methods source,rem --batch-size 20 \\
        --model vit_tiny_patch16_224 --checkpoint vit_cifar10.safetensors \\
        --model-kwargs img_size=32 patch_size=4 depth=6 --num-classes 10 \\
        --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --crop-pct 1.0 --output ./results
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MODEL_NAME = "vit_tiny_patch16_224"
IMAGE_SIZE = 32
MODEL_KWARGS: dict[str, Any] = {"img_size": IMAGE_SIZE, "patch_size": 4, "depth": 6}
WEIGHT_DECAY = 0.05
WARMUP_SHARE = 0.05  # of all steps


def transform(augment: bool) -> v2.Compose:
    """Convert a PIL image to (3, 32, 32) in [-1, 1]; with crops and flips for training."""
    crop = [v2.RandomCrop(IMAGE_SIZE, padding=4), v2.RandomHorizontalFlip()] if augment else []
    size = v2.Resize((IMAGE_SIZE, IMAGE_SIZE), antialias=True)  # leaves CIFAR's own size as it is
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    return v2.Compose([size, *crop, *to_tensor])


def batches(loader: DataLoader[Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images (B, 3, H, W) and labels (B,) on the device."""
    for images, labels in loader:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine to nearly 0."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.no_grad()
def error(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Return the error in percent."""
    model.eval()
    wrong = torch.zeros((), device=device)
    count = 0
    for images, labels in batches(loader, device):
        wrong += (model(images).argmax(1) != labels).sum()
        count += len(labels)
    model.train()
    return 100 * wrong.item() / count


def save(model: nn.Module, path: Path) -> None:
    """Write a half-precision checkpoint for `remtta.load_model`."""
    save_file({name: tensor.half().cpu() for name, tensor in model.state_dict().items()}, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with train/<class>/* and perhaps test/<class>/*")
    parser.add_argument("output", type=Path, help="where to write the half-precision safetensors checkpoint")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after the warm-up")
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.0, help="MixUp's alpha, such as 0.2; 0 for none")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "num_workers": args.workers,
        "persistent_workers": args.workers > 0,
        "pin_memory": device.type == "cuda",
    }
    train_set = ImageFolder(args.data / "train", transform(augment=True))
    train = DataLoader(train_set, shuffle=True, **options)
    test = None
    if (args.data / "test").is_dir():
        test_set = ImageFolder(args.data / "test", transform(augment=False))
        if test_set.classes != train_set.classes:
            raise SystemExit("Error: train and test do not have the same classes")
        test = DataLoader(test_set, **options)
    num_classes = len(train_set.classes)
    mixup = v2.MixUp(alpha=args.mixup, num_classes=num_classes) if args.mixup else None

    model = timm.create_model(MODEL_NAME, pretrained=False, num_classes=num_classes, **MODEL_KWARGS).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}], lr=args.lr
    )
    step, steps = 0, args.epochs * len(train)
    started = time.monotonic()
    for epoch in range(args.epochs):
        total = torch.zeros((), device=device)
        for images, labels in batches(train, device):
            targets = labels
            if mixup is not None:
                images, targets = mixup(images, labels)  # targets (B, C)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, args.lr)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(images)
            loss = nn.functional.cross_entropy(logits.float(), targets, label_smoothing=args.label_smoothing)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach() * len(labels)
            step += 1
        told = "" if test is None else f", test error {error(model, test, device):.2f} %"
        elapsed = time.monotonic() - started
        print(f"epoch {epoch + 1}: loss {total.item() / len(train_set):.3f}{told}, {elapsed:.0f} s", flush=True)
        save(model, args.output)


if __name__ == "__main__":
    main()
