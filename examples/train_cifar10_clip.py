"""Train a tiny CLIP for CIFAR-10 on captions made of class names and templates, on clean images only.

The folder holds `train/<class>/*` and, to measure the error, `test/<class>/*`. A caption is one of WATT's templates
with a class name; images of the same class are not negatives of one another. The image tower is that of
train_cifar10_model.py (a ViT at 32 pixels, 2.7 million weights), and may start from its weights; then an hour on one
core is enough. The text tower has 2 blocks of width 64. The result is a folder for open_clip and remtta.

    python examples/train_cifar10_clip.py ./cifar10 ./clip_cifar10 --image-tower vit_cifar10.safetensors --minutes 50

    remtta eval ./cifar10-c --severity 5 --model clip:./clip_cifar10 --prompts watt --methods source,tent,rem,watt \\
        --batch-size 128 --output ./results
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from remtta.zero_shot.prompts import templates_of

IMAGE_SIZE, WIDTH, CONTEXT = 32, 192, 16
WARMUP_SHARE = 0.03  # of the time
MODEL: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {
        "image_size": IMAGE_SIZE,
        "patch_size": 4,
        "width": WIDTH,
        "layers": 6,
        "no_ln_pre": True,
        "norm_kwargs": {"eps": 1e-6},
    },
    "text_cfg": {"context_length": CONTEXT, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}
PREPROCESSING = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}


def start_from(vit: dict[str, Tensor], visual: nn.Module) -> None:
    """Copy the weights of timm's ViT to open_clip's image tower; the patch bias is added to the positions."""
    state = {name: tensor.float() for name, tensor in vit.items() if not name.startswith("head.")}
    bias, positions = state.pop("patch_embed.proj.bias"), state.pop("pos_embed")[0]
    renamed = {
        "class_embedding": state.pop("cls_token").flatten(),
        "conv1.weight": state.pop("patch_embed.proj.weight"),
    }
    renamed["positional_embedding"] = torch.cat([positions[:1], positions[1:] + bias])
    names = [
        *(("blocks.", "transformer.resblocks."), ("norm1", "ln_1"), ("norm2", "ln_2"), ("qkv.", "in_proj_")),
        *(("attn.proj", "attn.out_proj"), ("fc1", "c_fc"), ("fc2", "c_proj")),
    ]
    for name, tensor in state.items():
        new = name.replace("norm.", "ln_post.") if name.startswith("norm.") else name
        for ours, theirs in names:
            new = new.replace(ours, theirs)
        renamed[new] = tensor
    left = visual.load_state_dict(renamed, strict=False)
    if left.unexpected_keys or left.missing_keys != ["proj"]:
        raise SystemExit(f"Error: the weights are not those of train_cifar10_model.py ({left})")


def contrastive_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy in both directions; all captions of an image's class count as correct."""
    same = (labels[:, None] == labels[None]).float()
    targets = same / same.sum(1, keepdim=True)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


@torch.no_grad()
def error(model: Any, loader: DataLoader[Any], captions: Tensor) -> float:
    """Return the error in percent, with captions (C, T, context) averaged over templates."""
    model.eval()
    texts = model.encode_text(captions.flatten(0, 1), normalize=True).unflatten(0, captions.shape[:2])
    texts = F.normalize(texts.mean(1), dim=-1)
    wrong = [(model.encode_image(images) @ texts.T).argmax(1) != labels for images, labels in loader]
    model.train()
    return 100 * torch.cat(wrong).float().mean().item()


def save(model: nn.Module, folder: Path) -> None:
    """Write a folder for open_clip and `--model clip:FOLDER`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_cfg": MODEL, "preprocess_cfg": PREPROCESSING}
    (folder / "open_clip_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with train/<class>/* and perhaps test/<class>/*")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--image-tower", type=Path, help="safetensors of train_cifar10_model.py to start from")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the text tower, falling to nothing")
    parser.add_argument("--image-lr", type=float, default=1e-4, help="of the image tower")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    augment = v2.Compose([v2.RandomCrop(IMAGE_SIZE, padding=4), v2.RandomHorizontalFlip(), *to_tensor])
    train_set = ImageFolder(args.data / "train", augment)
    train = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    tokenizer = open_clip.SimpleTokenizer(context_length=CONTEXT)
    texts = [[each.replace("{}", name) for each in templates_of("watt")] for name in train_set.classes]
    captions = torch.stack([tokenizer(each) for each in texts])  # (C, T, context)

    model: Any = open_clip.CLIP(**MODEL)
    if args.image_tower is not None:
        start_from(load_file(args.image_tower), model.visual)
    fresh = [p for name, p in model.named_parameters() if not name.startswith("visual.") or name == "visual.proj"]
    image = [p for name, p in model.named_parameters() if name.startswith("visual.") and name != "visual.proj"]
    groups = [{"params": fresh, "lr": args.lr}, {"params": image, "lr": args.image_lr}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    peaks = [group["lr"] for group in optimizer.param_groups]

    started, step, recent = time.monotonic(), 0, None
    while (share := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        for images, labels in train:
            share = (time.monotonic() - started) / (60 * args.minutes)
            if share >= 1:
                break
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * (1 - share) * min(1.0, share / WARMUP_SHARE)
            chosen = captions[labels, torch.randint(captions.shape[1], labels.shape)]
            image_features, text_features, scale = model(images, chosen)
            loss = contrastive_loss(scale * image_features @ text_features.T, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6)
            step, recent = step + 1, loss.item() if recent is None else 0.95 * recent + 0.05 * loss.item()
            if step % 10 == 0:
                print(f"step {step}: loss {recent:.3f}, {time.monotonic() - started:.0f} s", flush=True)
        save(model, args.output)
    save(model, args.output)
    if (args.data / "test").is_dir():
        test = DataLoader(ImageFolder(args.data / "test", v2.Compose(to_tensor)), batch_size=500)
        print(f"test error {error(model, test, captions):.2f} %", flush=True)


if __name__ == "__main__":
    main()
