"""How far estimates of accuracy are off, and what the order of frames is worth, beside other ways.

    python examples/measure_estimates.py imagenetc/ clean/ --model vit_tiny_patch16_224 --checkpoint vit.safetensors
        --mean 0.5 --std 0.5 --adapt

ROOT is a tree of corrupted images that remtta eval takes, CLEAN another, of clean ones; its first half calibrates.
Without --adapt only the source model is measured; with it also REM as remtta adapt runs it, over one domain after the
other, and the mean of both. Prints two Markdown tables: errors of the estimates in points, over windows of 500 images
at most of one domain; errors of the answers in %, by orders of the images of each domain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.evaluation import open_dataset
from remtta.guard.accuracy import LEAST, WINDOW, Calibration, Estimator
from remtta.guard.guard import ALONE
from remtta.guard.smoothing import Smoother
from remtta.methods.registry import build_method
from remtta.methods.settings.presets import preset_of
from remtta.models.card import card_of
from remtta.models.preprocessing import preprocessing_of

BATCH = 50

Said = tuple[Tensor, Tensor]
"""Logits (N, C), and the true classes (N,)."""


def accuracy(said: Said) -> float:
    logits, labels = said
    return float((logits.argmax(1) == labels).double().mean())


def confidence(logits: Tensor) -> Tensor:
    return logits.softmax(-1).amax(1)


def ours(clean: Said, *, calibrated: bool = True) -> Callable[[Tensor], float]:
    """What remtta adapt estimates, with clean images or with the accuracy on them alone."""
    known, classes = accuracy(clean), clean[0].shape[1]
    calibration = Calibration.seen(known, clean[0]) if calibrated else Calibration.unseen(known, classes)

    def estimate(logits: Tensor) -> float:
        estimator = Estimator(calibration, classes)
        estimator.see(ALONE, logits)
        return estimator.estimates["answers"]

    return estimate


def estimators(clean: Said) -> dict[str, Callable[[Tensor], float]]:
    """Ways to estimate an accuracy, by what they are called."""
    known, logits = accuracy(clean), clean[0]
    scale = Calibration.seen(known, logits).scale
    own = float(confidence(logits).mean())
    threshold = float(confidence(logits).quantile(1 - known))
    return {
        "average confidence": lambda new: float(confidence(new).mean()),
        "the same at a temperature": lambda new: float(confidence(new * scale).mean()),
        "difference of confidences": lambda new: known + float(confidence(new).mean()) - own,
        "ATC": lambda new: float((confidence(new) > threshold).double().mean()),
        "remtta, no images": ours(clean, calibrated=False),
        "remtta": ours(clean),
    }


def estimate_table(clean: Said, told: dict[str, list[Said]]) -> None:
    """Print how far each way is off, by who predicts: mean, in brackets the mean with its sign."""
    print(f"| estimate | {' | '.join(told)} |\n|---|{'---|' * len(told)}")
    for name, estimate in estimators(clean).items():
        cells = []
        for domains in told.values():
            windows = [
                window
                for logits, labels in domains
                for window in zip(logits.split(WINDOW), labels.split(WINDOW), strict=True)
            ]
            off = np.array([100 * (estimate(part[0]) - accuracy(part)) for part in windows if len(part[0]) >= LEAST])
            cells.append(f"{np.abs(off).mean():.1f} ({off.mean():+.1f})")
        print(f"| {name} | {' | '.join(cells)} |")


def shuffled(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Places of a domain's images in any order."""
    return rng.permutation(len(labels))


def in_classes(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One class after the other."""
    places = shuffled(labels, rng)
    return places[np.argsort(labels[places], kind="stable")]


def in_runs(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Runs of 5 to 50 images of a class, as far as there are so many, as on video."""
    left = {number: list(rng.permutation(np.flatnonzero(labels == number))) for number in np.unique(labels)}
    places: list[int] = []
    last = -1
    while left:
        last = int(rng.choice([number for number in left if number != last] or list(left)))
        length = rng.integers(5, 51)
        places += left[last][:length]
        left[last] = left[last][length:]
        if not left[last]:
            del left[last]
    return np.array(places)


def smoothed(probs: Tensor, share: float) -> Tensor:
    """Exponential smoothing."""
    answers, now = [], torch.full((probs.shape[1],), 1 / probs.shape[1]).to(probs)
    for each in probs:
        now = share * now + (1 - share) * each
        answers.append(now)
    return torch.stack(answers)


def transitions(probs: Tensor, rate: float = 0.05, forget: float = 0.95) -> Tensor:
    """A Bayesian filter that learns which class follows which, behind a gate: after arXiv:2601.21012, in our words."""
    classes = probs.shape[1]
    matrix = torch.full((classes, classes), 1 / classes).to(probs)
    belief, evidence, answers = matrix[0], 0.0, []
    for each in probs:
        joint = (belief @ matrix) * each
        evidence = forget * evidence + float((joint.sum() * classes).log())
        answer = joint / joint.sum() if evidence > 0 else each
        weight = rate * belief[:, None]
        matrix = matrix * (1 - weight) + weight * each
        belief = answer
        answers.append(answer)
    return torch.stack(answers)


def order_table(domains: list[Said], seeds: int = 3) -> None:
    """Print the errors of a stream of domains, by the order within each."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "raw": lambda logits: logits,
        "exponential, 0.5": lambda logits: smoothed(logits.softmax(-1), 0.5),
        "exponential, 0.8": lambda logits: smoothed(logits.softmax(-1), 0.8),
        "a learned matrix": lambda logits: transitions(logits.softmax(-1)),
        "`--smooth auto`": lambda logits: Smoother(logits.shape[1])(logits),
    }
    print(f"| order | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    for order in (shuffled, in_classes, in_runs):
        errors: dict[str, list[float]] = {name: [] for name in ways}
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            parts = []
            for logits, labels in domains:
                places = torch.from_numpy(order(labels.numpy(), rng))
                parts.append((logits[places], labels[places]))
            stream = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            for name, way in ways.items():
                errors[name].append(100 - 100 * accuracy((way(stream[0]), stream[1])))
        print(f"| {order.__name__.replace('_', ' ')} | {' | '.join(f'{np.mean(e):.1f}' for e in errors.values())} |")


def mean_of(adapted: list[Said], source: list[Said]) -> list[Said]:
    """What both models say together, by halves."""
    halves = [(a[0].softmax(-1) + s[0].softmax(-1)) / 2 for a, s in zip(adapted, source, strict=True)]
    return [(half.log(), said[1]) for half, said in zip(halves, source, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("clean")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--limit", type=int, default=500, help="images of each domain")
    parser.add_argument("--adapt", action="store_true")
    args = parser.parse_args()
    pixels: dict[str, Any] = {key: (getattr(args, key),) * 3 for key in ("mean", "std") if getattr(args, key)}
    model = load_model(args.model, checkpoint=args.checkpoint, **pixels)
    preprocessing = preprocessing_of(model)
    transform = preprocessing.transform()
    method = build_method("rem", model, preset_of("remtta").config("rem", {}, batch_size=BATCH))

    def look(root: str, *, adapt: bool) -> list[tuple[Said, Said]]:
        """What the source and the adapted model say of every domain."""
        dataset, told = open_dataset(root, num_classes=card_of(model).num_classes), []
        for domain in dataset.domains:
            places = np.random.default_rng(0).permutation(len(domain.labels))[: args.limit]
            parts = []
            for some in np.array_split(places, max(1, len(places) // BATCH)):
                images = torch.stack([transform(domain.load(int(place))) for place in some])
                batch = preprocessing.normalise(images)
                source = method.predict_source(batch).float()
                parts.append((source, method(batch).float() if adapt else source))
            labels = torch.from_numpy(domain.labels[places]).long()
            source, adapted = (torch.cat(logits) for logits in zip(*parts, strict=True))
            told.append(((source, labels), (adapted, labels)))
        return told

    ((logits, labels), _), *_ = look(args.clean, adapt=False)
    half = len(logits) // 2
    told = look(args.root, adapt=args.adapt)
    source, adapted = [said[0] for said in told], [said[1] for said in told]
    both = mean_of(adapted, source)
    estimate_table((logits[:half], labels[:half]), {"source": source, **({"adapted": adapted} if args.adapt else {})})
    print()
    order_table(both)


if __name__ == "__main__":
    main()
