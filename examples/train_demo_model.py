"""Train the small ViT that `remtta demo` adapts, from road signs drawn on the fly.

    python examples/train_demo_model.py model.safetensors

Every batch is drawn afresh, so the model sees each image once. The images are
daylight only: the augmentation is random erasing and random patch dropping,
never the demo's own noise, blur, fog, dusk or compression.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from remtta.lab.demo.demo_model import ARCHITECTURE, CLASS_NAMES, MODEL_KWARGS
from remtta.lab.demo.signs import IMAGE_SIZE, render_sign

BATCH_SIZE = 256
WARMUP_STEPS = 150
LEARNING_RATE = 1e-3


def draw_batch(rng: np.random.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Return images (B, 3, H, W) in [-1, 1] and labels (B,)."""
    labels = rng.integers(0, len(CLASS_NAMES), size)
    images = np.stack([render_sign(int(label), rng) for label in labels])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1.0), torch.from_numpy(labels)


def erase(images: Tensor, rng: np.random.Generator) -> None:
    """Cover a random rectangle of every other image with one random colour."""
    for image in images[::2]:
        height, width = (int(v) for v in rng.integers(4, 20, 2))
        top, left = int(rng.integers(0, IMAGE_SIZE - height)), int(rng.integers(0, IMAGE_SIZE - width))
        colour = torch.from_numpy(rng.uniform(-1, 1, (3, 1, 1)))
        image[:, top : top + height, left : left + width] = colour


@torch.no_grad()
def clean_error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    wrong = sum(
        (model(chunk).argmax(1) != target).sum().item()
        for chunk, target in zip(images.split(256), labels.split(256), strict=True)
    )
    model.train()
    return float(wrong) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="where to write the half-precision safetensors checkpoint")
    parser.add_argument("--steps", type=int, default=2000, help="batches of 256 images")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = timm.create_model(
        ARCHITECTURE, pretrained=False, num_classes=len(CLASS_NAMES), patch_drop_rate=0.25, **MODEL_KWARGS
    )
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}], lr=LEARNING_RATE
    )
    test_images, test_labels = draw_batch(np.random.default_rng(args.seed + 1_000_000), 2000)
    started = time.monotonic()
    for step in range(args.steps):
        progress = (step - WARMUP_STEPS) / max(1, args.steps - WARMUP_STEPS)
        scale = (step + 1) / WARMUP_STEPS if progress < 0 else 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * scale
        images, labels = draw_batch(rng, BATCH_SIZE)
        erase(images, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            error = 100 * clean_error(model, test_images, test_labels)
            elapsed = time.monotonic() - started
            print(f"step {step + 1}: loss {loss.item():.3f}, clean error {error:.2f} %, {elapsed:.0f} s", flush=True)
            save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, args.output)
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, args.output)


if __name__ == "__main__":
    main()
