"""Train a head for your own classes on a frozen timm model, from a folder of labelled images: a linear probe.

    python examples/linear_probe.py pacs/photo probe.safetensors --model vit_tiny_patch16_224 \
        --checkpoint vit_tiny.safetensors --mean 0.5 --std 0.5
    remtta eval pacs/ --domains art_painting,cartoon,sketch --model vit_tiny_patch16_224 --num-classes 7 \
        --checkpoint probe.safetensors --mean 0.5 --std 0.5

ROOT has a folder per class; CHECKPOINT is a complete checkpoint for remtta and timm. The head is a logistic
regression on the input of the model's own head. Its error is measured on a held-out fifth of the images; then it is
fitted to all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from remtta import load_model
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.domains import Domain
from remtta.models.preprocessing import preprocessing_of

BATCH = 50
STEPS = 200


@torch.no_grad()
def features_of(model: Any, domain: Domain) -> tuple[Tensor, Tensor]:
    """Return the input of the head for every image (N, D), and the labels (N,)."""
    preprocessing, found = preprocessing_of(model), []
    transform = preprocessing.transform()
    for places in torch.arange(len(domain.labels)).split(BATCH):
        images = torch.stack([transform(domain.load(int(place))) for place in places])
        tokens = model.forward_features(preprocessing.normalise(images))
        found.append(model.forward_head(tokens, pre_logits=True))
    return torch.cat(found), torch.from_numpy(domain.labels)


def fitted(features: Tensor, labels: Tensor, num_classes: int, weight_decay: float) -> nn.Linear:
    """Fit a logistic regression by L-BFGS."""
    head = nn.Linear(features.shape[1], num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = functional.cross_entropy(head(features), labels) + weight_decay * head.weight.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return head.requires_grad_(False)


def held_out_error(features: Tensor, labels: Tensor, num_classes: int, weight_decay: float) -> float:
    """Return the error in % on every fifth image of each class, of a head fitted to the others."""
    order = labels.argsort(stable=True)
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[order[::5]] = True
    head = fitted(features[~held], labels[~held], num_classes, weight_decay)
    return 100 * float((head(features[held]).argmax(1) != labels[held]).double().mean())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("destination", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint", help="weights to begin with; timm's own by default")
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    args = parser.parse_args(argv)
    model: Any = load_model(args.model, checkpoint=args.checkpoint, mean=args.mean, std=args.std)
    classes = sorted(folder.name for folder in args.root.iterdir() if folder.is_dir())
    (domain,) = open_dataset(args.root, num_classes=len(classes)).domains
    features, labels = features_of(model, domain)
    error = held_out_error(features, labels, len(classes), args.weight_decay)
    head = fitted(features, labels, len(classes), args.weight_decay)
    model.reset_classifier(len(classes))
    model.get_classifier().load_state_dict(head.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, args.destination)
    print(f"{len(labels)} images of {len(classes)} classes ({', '.join(classes)}); {error:.1f} % error held out")


if __name__ == "__main__":
    main()
