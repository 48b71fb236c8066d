"""Compare estimates of accuracy, and ways to smooth predictions over time, with published alternatives.

    python examples/measure_estimates.py imagenetc/ clean/ --model vit_tiny_patch16_224 --checkpoint vit.safetensors
        --mean 0.5 --std 0.5 --adapt

ROOT is a tree of corrupted images in a layout of remtta eval; CLEAN is one of clean images, of which up to 500 are used
for calibration; they should not be the images of ROOT.
Without --adapt, only the source model is measured; with it also remtta, over one domain after the other, and the mean
of both. Prints two Markdown tables: errors of the estimates in points, over windows of at most 500 images of one
domain; errors of the predictions in %, by the order of the images within each domain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remtta import load_model
from remtta.lab.evaluation.datasets import open_dataset
from remtta.methods.build import build_method
from remtta.methods.table import method_config
from remtta.models.info import model_info
from remtta.models.preprocessing import preprocessing_of
from remtta.pipeline.accuracy import MIN_FRAMES, WINDOW, Calibration, Estimator
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.prediction import Prediction, PredictionTransform
from remtta.pipeline.smoothing import Smoother

BATCH = 50
CALIBRATING = 500  # clean images at most, as in remtta adapt


class Predictions(NamedTuple):
    """A model's predictions for N images."""

    logits: Tensor  # (N, C)
    labels: Tensor  # the true classes, (N,)

    def windows(self) -> list[Predictions]:
        """Split them into windows of the size that remtta uses."""
        return [Predictions(*parts) for parts in zip(*(each.split(WINDOW) for each in self), strict=True)]


def handled(callback: PredictionTransform, logits: Tensor) -> Tensor:
    """Return an adapted model's logits (B, C) after a callback has handled them."""
    prediction = Prediction(logits, torch.ones(len(logits), dtype=torch.bool), adapted=logits, raw_adapted=logits)
    callback(prediction)
    return prediction.logits


def accuracy(predictions: Predictions) -> float:
    return float((predictions.logits.argmax(1) == predictions.labels).double().mean())


def confidence(logits: Tensor) -> Tensor:
    return logits.softmax(-1).amax(1)


def ours(clean: Predictions, *, calibrated: bool = True) -> Callable[[Tensor], float]:
    """Return the estimate of remtta adapt, calibrated on clean images or only on their accuracy."""
    known, classes = accuracy(clean), clean.logits.shape[1]
    calibration = Calibration.fit(known, clean.logits) if calibrated else Calibration.assumed(known, classes)

    def estimate(logits: Tensor) -> float:
        estimator = Estimator(calibration, classes)
        handled(estimator, logits)
        return estimator.estimates["answers"]

    return estimate


def estimators(clean: Predictions) -> dict[str, Callable[[Tensor], float]]:
    """Return estimators of accuracy from logits, by name."""
    known, logits = accuracy(clean), clean.logits
    scale = Calibration.fit(known, logits).scale
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


def estimate_table(clean: Predictions, models: dict[str, list[Predictions]]) -> None:
    """Print each estimator's mean absolute error by model, with the signed mean in brackets."""
    print(f"| estimate | {' | '.join(models)} |\n|---|{'---|' * len(models)}")
    for name, estimate in estimators(clean).items():
        cells = []
        for domains in models.values():
            windows = [
                window
                for predictions in domains
                for window in predictions.windows()
                if len(window.labels) >= MIN_FRAMES
            ]
            off = np.array([100 * (estimate(window.logits) - accuracy(window)) for window in windows])
            cells.append(f"{np.abs(off).mean():.1f} ({off.mean():+.1f})")
        print(f"| {name} | {' | '.join(cells)} |")


def shuffled(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the images of a domain in random order."""
    return rng.permutation(len(labels))


def in_classes(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the images sorted by class."""
    places = shuffled(labels, rng)
    return places[np.argsort(labels[places], kind="stable")]


def in_runs(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the images in runs of up to 5 to 50 of one class, as on video."""
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
    """Smooth predictions exponentially."""
    answers, now = [], torch.full((probs.shape[1],), 1 / probs.shape[1]).to(probs)
    for each in probs:
        now = share * now + (1 - share) * each
        answers.append(now)
    return torch.stack(answers)


def order_table(domains: list[Predictions], seeds: int = 3) -> None:
    """Print the errors of a stream of domains, by the order within each."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "raw": lambda logits: logits,
        "exponential, 0.5": lambda logits: smoothed(logits.softmax(-1), 0.5),
        "`--smooth auto`": lambda logits: handled(Smoother(logits.shape[1]), logits),
    }
    print(f"| order | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    for order in (shuffled, in_classes, in_runs):
        errors: dict[str, list[float]] = {name: [] for name in ways}
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            orders = [torch.from_numpy(order(predictions.labels.numpy(), rng)) for predictions in domains]
            pairs = list(zip(domains, orders, strict=True))
            logits = torch.cat([predictions.logits[places] for predictions, places in pairs])
            labels = torch.cat([predictions.labels[places] for predictions, places in pairs])
            for name, way in ways.items():
                errors[name].append(100 * float((way(logits).argmax(1) != labels).double().mean()))
        print(f"| {order.__name__.replace('_', ' ')} | {' | '.join(f'{np.mean(e):.1f}' for e in errors.values())} |")


def mean_of(adapted: list[Predictions], source: list[Predictions]) -> list[Predictions]:
    """Return the mean of both models' predictions."""
    halves = [(a.logits.softmax(-1) + s.logits.softmax(-1)) / 2 for a, s in zip(adapted, source, strict=True)]
    return [predictions._replace(logits=half.log()) for half, predictions in zip(halves, source, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("clean")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    parser.add_argument("--severity", type=int, help="default: 5, or the only one in ROOT")
    parser.add_argument("--limit", type=int, default=500, help="images of each domain")
    parser.add_argument("--adapt", action="store_true")
    args = parser.parse_args()
    source_model, model = (
        load_model(args.model, checkpoint=args.checkpoint, mean=args.mean, std=args.std) for _ in range(2)
    )
    preprocessing = preprocessing_of(model)
    transform = preprocessing.transform()
    pipeline = Pipeline(build_method("remtta", model, method_config("remtta", {}, batch_size=BATCH)))

    @torch.no_grad()
    def look(root: str, severity: int | None, *, limit: int, adapt: bool) -> list[tuple[Predictions, Predictions]]:
        """Return the source and the adapted model's predictions for each domain."""
        severities = None if severity is None else [severity]
        dataset, found = open_dataset(root, num_classes=model_info(model).num_classes, severities=severities), []
        for domain in dataset.domains:
            places = np.random.default_rng(0).permutation(len(domain.labels))[:limit]
            parts = []
            for some in np.array_split(places, max(1, len(places) // BATCH)):
                images = torch.stack([transform(domain.load(int(place))) for place in some])
                batch, labels = preprocessing.normalise(images), torch.from_numpy(domain.labels[some]).long()
                both = [(each(batch), labels) for each in ([source_model, model] if adapt else [source_model])]
                parts.append((both[0], both[-1]))
                if adapt:
                    pipeline(batch)
            source, adapted = (
                Predictions(*map(torch.cat, zip(*each, strict=True))) for each in zip(*parts, strict=True)
            )
            found.append((source, adapted))
        return found

    (clean, _), *_ = look(args.clean, None, limit=CALIBRATING, adapt=False)
    found = look(args.root, args.severity, limit=args.limit, adapt=args.adapt)
    source, adapted = [first for first, _ in found], [second for _, second in found]
    both = mean_of(adapted, source)
    models = {"source": source, **({"adapted": adapted} if args.adapt else {})}
    estimate_table(clean, models)
    print()
    order_table(both)


if __name__ == "__main__":
    main()
