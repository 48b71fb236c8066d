"""Check whether the preprocessing suits the model, by comparing its predictions under several alternatives."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data import constants
from torch import Tensor, nn

from remtta.errors import StreamError, counted
from remtta.evaluation.datasets import labels_by_folder
from remtta.guard.evidence import mutual_information
from remtta.methods.losses import entropy
from remtta.methods.support import refused_methods, support_in
from remtta.models.card import card_of
from remtta.models.preprocessing import Preprocessing
from remtta.streams.decoding_budget import Budget
from remtta.streams.images import natural_key
from remtta.streams.prefetch import DecodedFrame, prefetch
from remtta.streams.sources import open_stream

MIN_IMAGES = 16  # with fewer, the right preprocessing was missed on corrupted images
NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "0.5": (constants.IMAGENET_INCEPTION_MEAN, constants.IMAGENET_INCEPTION_STD),
    "ImageNet's": (constants.IMAGENET_DEFAULT_MEAN, constants.IMAGENET_DEFAULT_STD),
    "CLIP's": (constants.OPENAI_CLIP_MEAN, constants.OPENAI_CLIP_STD),
    "none": ((0.0,) * 3, (1.0,) * 3),
}
"""Means and standard deviations with which published image classifiers were trained."""

_CROPS, _FILTERS = (0.875, 1.0), ("bilinear", "bicubic")
_RESAMPLINGS = 200
_SURE, _SURE_BY_LABELS = 2.0, 3.0  # standard errors of a significant lead; with labels, more candidates compete
_MIN_PER_CLASS, _MIN_CLASSES = 4, 3
_COMMON = 3
_BATCH = 25


@dataclass(frozen=True)
class Candidate:
    """A preprocessing to try, with a readable title; `swapped` exchanges the red and blue channels."""

    title: str
    preprocessing: Preprocessing
    swapped: bool = False

    @property
    def geometry(self) -> tuple[float, str]:
        """The settings that decide which pixels are seen: crop and interpolation."""
        return self.preprocessing.crop_pct, self.preprocessing.interpolation


@dataclass(frozen=True)
class Finding:
    """The model's logits (N, C) under a candidate, and their accuracy if labels are known."""

    candidate: Candidate
    logits: Tensor
    accuracy: float | None = None

    @property
    def information(self) -> float:
        """Mutual information between image and prediction, in nats."""
        return mutual_information(self.logits)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        predicted = Counter(self.logits.argmax(-1).tolist())
        return {
            "title": self.candidate.title,
            **self.candidate.preprocessing.as_dict(),
            "red_and_blue_swapped": self.candidate.swapped,
            "entropy": float(entropy(self.logits).mean()),
            "information": self.information,
            "classes": len(predicted),
            "most_common": [{"class": number, "images": count} for number, count in predicted.most_common(_COMMON)],
            "accuracy": self.accuracy,
        }


class Better(NamedTuple):
    """A candidate's lead over the configured preprocessing in "accuracy" (a share) or "information" (nats)."""

    finding: Finding
    by: str
    lead: float
    standard_error: float

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        numbers = {"by": self.by, "lead": self.lead, "standard_error": self.standard_error}
        return {"title": self.finding.candidate.title, **numbers}


def examine(
    model: nn.Module,
    source: str,
    *,
    limit: int = 100,
    class_map: Mapping[str, int] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Compare a model's predictions on images of a source under its own and under other preprocessings.

    Args:
        model: A classifier with the preprocessing to check.
        source: Images, as accepted by `open_stream`; class folders in a layout of `open_dataset` serve as labels.
        limit: Maximum number of images, spread evenly over the source if its length is known.
        wait: Called between batches; may raise to stop.

    Returns:
        The contents of `--json`: whether everything `fits`; the `candidates`, the configured one first; the `better`
        candidate, or None; the `class_order`, or None if there are too few images per class folder; how `labels` were
        mapped, or why there are none; what `rem` would mask and adapt.

    Raises:
        UsageError: If the source does not exist.
        StreamError: If too few images can be read.
    """
    card = card_of(model)
    candidates = candidates_of(card.preprocessing)
    ways = {each.geometry: each.preprocessing for each in candidates}
    frames = _read(source, limit, ways.values(), wait)
    readable = [frame for frame in frames if frame.image is not None]
    stacked = torch.stack([frame.image for frame in readable if frame.image is not None], dim=1)
    images = dict(zip(ways, stacked, strict=True))  # by geometry, uint8 (N, 3, H, W)
    now = images[candidates[0].geometry]
    sources = [frame.source for frame in readable]
    numbers, how = labels_by_folder(
        source, sources, num_classes=card.num_classes, labels=card.labels, class_map=class_map
    )
    labels = None if numbers is None else torch.tensor(numbers)
    findings = [
        _finding(model, each, own, labels, wait)
        for each in candidates
        if (own := images[each.geometry]) is now or not torch.equal(own, now)
    ]
    order = None if labels is None else class_order(findings, labels, [Path(path).parent.name for path in sources], how)
    better = better_than(findings, None if order is not None and not order["fits"] else labels)
    support = support_in(model, card.name, refused=refused_methods(model, ["rem"]))
    rem = {"masks": list(support.masks), "adapts": support.adapts, "weights": support.num_adapted}
    return {
        "fits": better is None and (order is None or order["fits"]),
        "model": {**card.origin, "num_classes": card.num_classes, "base_sha256": card.sha256},
        "source": source,
        "images": len(readable),
        "unreadable": len(frames) - len(readable),
        "candidates": [finding.as_dict() for finding in findings],
        "better": better and better.as_dict(),
        "class_order": order,
        "labels": how,
        "rem": {**rem, "refused": support.refused.get("rem")},
    }


def candidates_of(configured: Preprocessing) -> list[Candidate]:
    """Return the configured preprocessing first, then others with which a model may have been trained."""
    own = (configured.mean, configured.std)
    titles = {pair: title for title, pair in NORMALISATIONS.items()}
    named = {titles.get(own, "as configured"): own} | dict(NORMALISATIONS)
    normalised = [
        Candidate(f"mean, std: {title}", replace(configured, mean=mean, std=std))
        for title, (mean, std) in named.items()
    ]
    swapped = [Candidate(f"{each.title}; red, blue swapped", each.preprocessing, swapped=True) for each in normalised]
    crops = [Candidate(f"crop {crop:g}", replace(configured, crop_pct=crop)) for crop in _CROPS]
    filters = [Candidate(kind, replace(configured, interpolation=kind)) for kind in _FILTERS]
    others = [each for each in (*crops, *filters) if each.preprocessing != configured]
    return [*normalised, *swapped, *others]


def better_than(findings: Sequence[Finding], labels: Tensor | None) -> Better | None:
    """Return the best other candidate if it beats the configured one, the first, significantly; else None.

    Labels (N,) decide if they are significant. Otherwise the mutual information of predictions decides, which needs
    fewer images, but only among normalisations and channel orders: it is unreliable for crops and interpolations.
    """
    configured, *others = findings
    leads = [_lead(each, configured, labels) for each in others if labels is not None]
    if surely := [each for each in leads if each.lead > _SURE_BY_LABELS * each.standard_error]:
        return max(surely, key=lambda each: each.lead)
    worse = {id(each.finding) for each in leads if each.lead < -_SURE * each.standard_error}
    where = configured.candidate.geometry
    alike = [each for each in others if each.candidate.geometry == where and id(each) not in worse]
    best = max(alike, key=lambda each: each.information, default=None)
    lead = None if best is None else _lead(best, configured, None)
    return lead if lead and lead.lead > _SURE * lead.standard_error else None


def _lead(other: Finding, configured: Finding, labels: Tensor | None) -> Better:
    """Return a candidate's lead over the configured one, with its standard error by bootstrap."""
    count, generator = len(other.logits), torch.Generator().manual_seed(0)
    draws = torch.randint(count, (_RESAMPLINGS, count), generator=generator)
    if labels is not None:
        gained = (other.logits.argmax(-1) == labels).double() - (configured.logits.argmax(-1) == labels).double()
        return Better(other, "accuracy", float(gained.mean()), float(gained[draws].mean(1).std()))
    leads = [mutual_information(other.logits[draw]) - mutual_information(configured.logits[draw]) for draw in draws]
    spread = float(torch.tensor(leads, dtype=torch.float64).std())
    return Better(other, "information", other.information - configured.information, spread)


def class_order(findings: Sequence[Finding], labels: Tensor, folders: Sequence[str], how: str) -> dict[str, Any] | None:
    """Check whether class folders are mapped to the right classes, using the most informative candidate.

    Each half of a folder's images predicts the class of the other half. If that is right far more often than the
    folder's label, the classes are in another order. A class that several folders are mostly predicted as belongs to
    none of them: under a strong shift a model predicts one class for most images.

    Returns:
        `how`; `accuracy`, the share of images predicted as their folder's class; `own`, the share predicted as the most
        common prediction for the other half of their folder; `fits`, whether `accuracy` is not significantly below
        `own`; and `mistaken`, the folders mostly predicted as another class, with that class. None if there are too few
        images.
    """
    predicted = max(findings, key=lambda finding: finding.information).logits.argmax(-1)
    members = {name: [place for place, other in enumerate(folders) if other == name] for name in folders}
    whole = {name: places for name, places in members.items() if len(places) >= _MIN_PER_CLASS}
    if len(whole) < _MIN_CLASSES:
        return None
    own, right = [], []
    mostly = {name: int(predicted[whole[name]].mode().values) for name in sorted(whole, key=natural_key)}
    for name, places in whole.items():
        others = {most for folder, most in mostly.items() if folder != name}
        for half, other in ((places[::2], places[1::2]), (places[1::2], places[::2])):
            usual = int(predicted[other].mode().values)
            own.append((predicted[half] == usual) & (usual not in others))
            right.append(predicted[half] == labels[half])
    mistaken = {name: most for name, most in mostly.items() if most != int(labels[whole[name][0]])}
    by_half, by_label = torch.cat(own).double(), torch.cat(right).double()
    gained = by_half - by_label
    error = float(gained.std()) / len(gained) ** 0.5
    return {
        "how": how,
        "accuracy": float(by_label.mean()),
        "own": float(by_half.mean()),
        "fits": float(gained.mean()) <= _SURE * error,
        "mistaken": mistaken,
    }


def _read(source: str, limit: int, ways: Collection[Preprocessing], wait: Callable[[], None]) -> list[DecodedFrame]:
    """Read frames spread over the source, each with an image (K, 3, H, W) under the K preprocessings."""
    stream = open_stream(source)
    count = stream.num_frames or limit
    spread = {place * count // limit for place in range(limit)} if count > limit else range(count)
    chosen = (frame for place, frame in enumerate(itertools.islice(stream.frames, count)) if place in spread)
    transforms = [way.transform() for way in ways]
    memory = Budget(afterwards=min(ways, key=lambda way: way.crop_pct).resized_bytes)
    try:
        frames = list(prefetch(chosen, partial(_stacked, transforms), ahead=2 * _BATCH, memory=memory, wait=wait))
    finally:
        stream.close()
    if (readable := sum(frame.image is not None for frame in frames)) < MIN_IMAGES:
        reason = next((f"; {frame.source}: {frame.error}" for frame in frames if frame.error), "")
        raise StreamError(f"{source}: {counted(readable, 'readable image')}, and the doctor needs {MIN_IMAGES}{reason}")
    return frames


def _stacked(transforms: Sequence[Callable[[Image.Image], Tensor]], image: Image.Image) -> Tensor:
    return torch.stack([torch.as_tensor(transform(image)) for transform in transforms])


@torch.inference_mode()
def _finding(
    model: nn.Module, candidate: Candidate, images: Tensor, labels: Tensor | None, wait: Callable[[], None]
) -> Finding:
    device, answers = next(model.parameters()).device, []
    for batch in images.split(_BATCH):
        wait()
        pixels = batch.to(device).flip(1) if candidate.swapped else batch.to(device)
        answers.append(model(candidate.preprocessing.normalise(pixels)).float().cpu())
    logits = torch.cat(answers)
    return Finding(candidate, logits, None if labels is None else float((logits.argmax(-1) == labels).double().mean()))
