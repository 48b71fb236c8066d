"""Ways to make a model's inputs of images, and which one fits it better by what it says of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_INCEPTION_MEAN,
    IMAGENET_INCEPTION_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from torch import Tensor

from remtta.guard.evidence import mutual_information
from remtta.methods.losses import entropy
from remtta.models.preprocessing import Preprocessing
from remtta.streams.images import natural_key

NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "0.5": (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD),
    "ImageNet's": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "CLIP's": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "none": ((0.0,) * 3, (1.0,) * 3),
}
"""Means and deviations that published classifiers of photographs were trained with."""

_CROPS, _FILTERS = (0.875, 1.0), ("bilinear", "bicubic")
_RESAMPLINGS = 200
_SURE, _SURE_BY_LABELS = 2.0, 3.0  # standard errors of a lead that is no chance; labels choose among more
_LEAST_PER_CLASS, _LEAST_CLASSES = 4, 3
_COMMON = 3


@dataclass(frozen=True)
class Candidate:
    """A way to make inputs of images.

    Attributes:
        title: For people.
        preprocessing: Resize, crop and normalisation.
        swapped: Red and blue change places.
    """

    title: str
    preprocessing: Preprocessing
    swapped: bool = False


@dataclass(frozen=True)
class Finding:
    """What the model says of the images under a candidate.

    Attributes:
        candidate: It.
        logits: Shape (N, C).
        accuracy: Share of right predictions, where classes are known.
    """

    candidate: Candidate
    logits: Tensor
    accuracy: float | None = None

    @property
    def entropy(self) -> float:
        """Mean of the predictions', in nats."""
        return float(entropy(self.logits).mean())

    @property
    def information(self) -> float:
        """Mutual information between image and prediction in nats: how much the predictions tell apart."""
        return mutual_information(self.logits)

    @property
    def common(self) -> list[tuple[int, int]]:
        """The classes predicted most, and how often."""
        return Counter(self.logits.argmax(-1).tolist()).most_common(_COMMON)

    @property
    def classes(self) -> int:
        """How many different classes are predicted."""
        return len(self.logits.argmax(-1).unique())

    def as_dict(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            "title": self.candidate.title,
            **self.candidate.preprocessing.as_dict(),
            "red_and_blue_swapped": self.candidate.swapped,
            "entropy": self.entropy,
            "information": self.information,
            "classes": self.classes,
            "most_common": [{"class": number, "images": count} for number, count in self.common],
            "accuracy": self.accuracy,
        }


@dataclass(frozen=True)
class Better:
    """Another candidate that is better than the configured one by more than chance.

    Attributes:
        finding: Its finding.
        by: "accuracy" or "information".
        lead: By how much, in shares or nats.
        standard_error: Of the lead, by the number of images.
    """

    finding: Finding
    by: str
    lead: float
    standard_error: float


@dataclass(frozen=True)
class ClassOrder:
    """Whether class folders are the classes they are taken for.

    Attributes:
        how: What their numbers go by.
        accuracy: Share of images predicted as the class of their folder.
        own: Share predicted as what the other half of their folder is mostly predicted as.
        fits: Whether the first is no less than the second, but for chance.
        mistaken: Folders mostly predicted as another class, and that class.
    """

    how: str
    accuracy: float
    own: float
    fits: bool
    mistaken: Mapping[str, int]


def candidates_of(configured: Preprocessing) -> list[Candidate]:
    """The configured preprocessing, and others that a model may have been trained with instead."""
    own = (configured.mean, configured.std)
    titles = {pair: title for title, pair in NORMALISATIONS.items()}
    named = {titles.get(own, "as configured"): own} | dict(NORMALISATIONS)
    normalised = [
        Candidate(f"mean, std: {title}", dataclasses.replace(configured, mean=mean, std=std))
        for title, (mean, std) in named.items()
    ]
    crops = [dataclasses.replace(configured, crop_pct=crop) for crop in _CROPS if crop != configured.crop_pct]
    filters = [
        dataclasses.replace(configured, interpolation=kind) for kind in _FILTERS if kind != configured.interpolation
    ]
    return [
        *normalised,
        *(Candidate(f"{each.title}; red, blue swapped", each.preprocessing, swapped=True) for each in normalised),
        *(Candidate(f"crop {each.crop_pct:g}", each) for each in crops),
        *(Candidate(each.interpolation, each) for each in filters),
    ]


def better_than(findings: Sequence[Finding], labels: Tensor | None) -> Better | None:
    """The best of the others, if it is better than the first by more than chance.

    Labels decide where there are enough. Else it goes by how much predictions
    tell apart, which takes fewer images; only among normalisations and orders
    of channels, as it says nothing reliable of crops and filters.

    Args:
        findings: The configured one first.
        labels: Shape (N,).
    """
    configured, *others = findings
    leads = [_lead(each, configured, labels) for each in others if labels is not None]
    if surely := [each for each in leads if each.lead > _SURE_BY_LABELS * each.standard_error]:
        return max(surely, key=lambda each: each.lead)
    worse = {id(each.finding) for each in leads if each.lead < -_SURE * each.standard_error}
    where = geometry(configured.candidate.preprocessing)
    alike = [each for each in others if geometry(each.candidate.preprocessing) == where and id(each) not in worse]
    best = max((each for each in alike), key=lambda each: each.information, default=None)
    lead = None if best is None else _lead(best, configured, None)
    return lead if lead and lead.lead > _SURE * lead.standard_error else None


def _lead(other: Finding, configured: Finding, labels: Tensor | None) -> Better:
    """What another has over the configured one; its standard error by drawing the images again."""
    count, generator = len(other.logits), torch.Generator().manual_seed(0)
    draws = torch.randint(count, (_RESAMPLINGS, count), generator=generator)
    if labels is not None:
        gained = (other.logits.argmax(-1) == labels).double() - (configured.logits.argmax(-1) == labels).double()
        return Better(other, "accuracy", float(gained.mean()), float(gained[draws].mean(1).std()))
    leads = [mutual_information(other.logits[draw]) - mutual_information(configured.logits[draw]) for draw in draws]
    spread = float(torch.tensor(leads, dtype=torch.float64).std())
    return Better(other, "information", other.information - configured.information, spread)


def geometry(way: Preprocessing) -> tuple[float, str]:
    """What of a preprocessing changes where pixels lie, of those that candidates differ in."""
    return way.crop_pct, way.interpolation


def class_order(findings: Sequence[Finding], labels: Tensor, folders: Sequence[str], how: str) -> ClassOrder | None:
    """Whether folders are the classes they are taken for, by the candidate that tells most apart.

    Each half of a folder's images says what the other half should be
    predicted as. Where that is right far more often than the folder's own
    class, the classes are in another order. None where there are too few images to say.

    Args:
        findings: Of all candidates.
        labels: Shape (N,).
        folders: Of each image.
        how: What the labels go by.
    """
    predicted = max(findings, key=lambda finding: finding.information).logits.argmax(-1)
    members = {name: [place for place, other in enumerate(folders) if other == name] for name in folders}
    whole = {name: places for name, places in members.items() if len(places) >= _LEAST_PER_CLASS}
    if len(whole) < _LEAST_CLASSES:
        return None
    own, right, mistaken = [], [], {}
    for name, places in sorted(whole.items(), key=lambda item: natural_key(item[0])):
        for half, other in ((places[::2], places[1::2]), (places[1::2], places[::2])):
            own.append(predicted[half] == predicted[other].mode().values)
        right.append(torch.cat([predicted[half] == labels[half] for half in (places[::2], places[1::2])]))
        most = int(predicted[places].mode().values)
        if most != int(labels[places[0]]):
            mistaken[name] = most
    by_half, by_label = torch.cat(own).double(), torch.cat(right).double()
    gained = by_half - by_label
    error = float(gained.std()) / len(gained) ** 0.5
    fits = float(gained.mean()) <= _SURE * error
    return ClassOrder(how, float(by_label.mean()), float(by_half.mean()), fits, mistaken)
