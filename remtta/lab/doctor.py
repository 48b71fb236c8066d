"""Check a model's preprocessing by comparing its predictions under several alternatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from remtta.errors import StreamError, counted
from remtta.methods.losses import entropy
from remtta.methods.settings.chosen import default_method
from remtta.methods.support import Support, refused_methods, support_in
from remtta.models.info import ModelInfo, model_info
from remtta.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from remtta.models.unwrapping import unwrap_model
from remtta.pipeline.information import mutual_information
from remtta.streams.prefetch import prefetch
from remtta.streams.sources import Stream

MIN_IMAGES = 16  # with fewer, the right preprocessing was missed on corrupted images
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel."""

NORMALISATIONS: Mapping[str, Statistics] = {
    "0.5": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet's": (IMAGENET_MEAN, IMAGENET_STD),
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "none": ((0.0,) * 3, (1.0,) * 3),
}
"""Means and standard deviations with which published image classifiers were trained."""

_RESAMPLINGS = 200
_SIGNIFICANT = 3.0  # standard errors of a significant lead
_BATCH = 25


class Candidate(NamedTuple):
    """A preprocessing to try."""

    title: str
    preprocessing: Preprocessing
    swapped: bool = False  # whether the red and blue channels are exchanged


class Finding(NamedTuple):
    """The model's logits (N, C) under a candidate."""

    candidate: Candidate
    logits: Tensor

    @property
    def information(self) -> float:
        """Mutual information between image and prediction, in nats."""
        return mutual_information(self.logits)

    @property
    def uncertainty(self) -> float:
        """Mean entropy of the predictions, in nats."""
        return float(entropy(self.logits).mean())

    @property
    def num_classes(self) -> int:
        """Number of classes that were predicted."""
        return len(self.logits.argmax(-1).unique())


class Better(NamedTuple):
    """A finding that is significantly better than the configured one, by its lead in mutual information, in nats."""

    finding: Finding
    lead: float
    standard_error: float


@dataclass(frozen=True)
class Diagnosis:
    """A verdict on a model's preprocessing, with the findings that it rests on."""

    info: ModelInfo
    source: str  # of the images
    num_images: int  # readable ones
    num_unreadable: int
    findings: Sequence[Finding]  # the configured preprocessing first
    better: Better | None
    support: Support  # what `rem` would mask and adapt

    @property
    def fits(self) -> bool | None:
        """True if the configured preprocessing fits, False if another fits better; None if the images do not tell."""
        return self.better is None if are_conclusive(self.findings) else None

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of `--json`."""
        better, support = self.better, self.support
        return {
            "fits": self.fits,
            "model": {**self.info.origin, "num_classes": self.info.num_classes, "base_sha256": self.info.sha256},
            "source": self.source,
            "images": self.num_images,
            "unreadable": self.num_unreadable,
            "candidates": [
                {
                    "title": finding.candidate.title,
                    **finding.candidate.preprocessing.as_dict(),
                    "red_and_blue_swapped": finding.candidate.swapped,
                    "entropy": finding.uncertainty,
                    "information": finding.information,
                    "classes": finding.num_classes,
                }
                for finding in self.findings
            ],
            "better": better
            and {
                "title": better.finding.candidate.title,
                "lead": better.lead,
                "standard_error": better.standard_error,
            },
            "rem": {
                "masks": list(support.masks),
                "adapts": support.adapts,
                "weights": support.num_adapted,
                "refused": support.refused.get("rem"),
            },
        }


def examine(
    model: nn.Module,
    stream: Stream,
    *,
    limit: int,
    wait: Callable[[], None],
    on_batch: Callable[[int, int], object] = lambda done, total: None,
) -> Diagnosis:
    """Compare a model's predictions on images of a stream under its own and under other preprocessings. Raise
    StreamError if too few images can be read.

    Args:
        model: A classifier with the preprocessing to check.
        limit: Maximum number of images, spread evenly over the stream if its length is known.
        wait: Called between batches; may raise to stop.
        on_batch: Called with the number of predictions so far, and of all: one per image and preprocessing.
    """
    info = model_info(model)
    images, num_unreadable = read_images(stream, limit, info.preprocessing, wait)
    others = {} if getattr(unwrap_model(model).module, "normalises", False) else NORMALISATIONS  # pixels themselves
    candidates, findings = candidates_of(info.preprocessing, others), list[Finding]()
    for candidate in candidates:
        logits = []
        for batch in images.split(_BATCH):
            wait()
            logits.append(_logits(model, candidate, batch))
            done = len(findings) * len(images) + sum(map(len, logits))
            on_batch(done, len(candidates) * len(images))
        findings.append(Finding(candidate, torch.cat(logits)))
    return Diagnosis(
        info,
        stream.name,
        num_images=len(images),
        num_unreadable=num_unreadable,
        findings=findings,
        better=better_than(findings) if are_conclusive(findings) else None,
        support=support_in(model, info.name, refused=refused_methods(model, ["rem", default_method(info.name)])),
    )


def candidates_of(configured: Preprocessing, others: Mapping[str, Statistics] = NORMALISATIONS) -> list[Candidate]:
    """Return the configured preprocessing first, then other normalisations and channel orders."""
    statistics = (configured.mean, configured.std)
    first = next((title for title, pair in NORMALISATIONS.items() if pair == statistics), "as configured")
    return [
        Candidate(f"mean, std: {title}{suffix}", replace(configured, mean=mean, std=std), swapped=bool(suffix))
        for suffix in ("", "; red, blue swapped")
        for title, (mean, std) in {first: statistics, **others}.items()
    ]


def are_conclusive(findings: Sequence[Finding]) -> bool:
    """Return whether the best candidate's mutual information exceeds its mean entropy.

    Else the model is uncertain of these images under all preprocessings, and a wrong one can have more information: it
    may undo part of a corruption.
    """
    best = max(findings, key=lambda finding: finding.information)
    return best.information > best.uncertainty


def better_than(findings: Sequence[Finding]) -> Better | None:
    """Return the most informative other finding if it is significantly better than the configured one, the first, by
    bootstrap.
    """
    configured, *others = findings
    best = max(others, key=lambda finding: finding.information)
    count, generator = len(best.logits), torch.Generator().manual_seed(0)
    draws = torch.randint(count, (_RESAMPLINGS, count), generator=generator)
    leads = [mutual_information(best.logits[draw]) - mutual_information(configured.logits[draw]) for draw in draws]
    lead, error = best.information - configured.information, float(torch.tensor(leads, dtype=torch.float64).std())
    return Better(best, lead, error) if lead > _SIGNIFICANT * error else None


def read_images(
    stream: Stream, limit: int, preprocessing: Preprocessing, wait: Callable[[], None]
) -> tuple[Tensor, int]:
    """Return images (N, 3, H, W) in uint8, spread over the source, the first ones if its length is unknown, and the
    number of unreadable ones; raise StreamError if too few can be read.
    """
    count = stream.num_frames or limit
    numbers = {i * count // limit for i in range(limit)} if count > limit else range(count)
    chosen = (frame for number, frame in enumerate(itertools.islice(stream.frames, count)) if number in numbers)
    try:
        frames = list(prefetch(chosen, preprocessing.transform(), ahead=2 * _BATCH, wait=wait))
    finally:
        stream.close()
    readable = [frame.image for frame in frames if frame.image is not None]
    if len(readable) < MIN_IMAGES:
        reason = next((f"; {frame.source}: {frame.error}" for frame in frames if frame.error), "")
        raise StreamError(
            f"{stream.name}: {counted(len(readable), 'readable image')}, but at least {MIN_IMAGES} are needed{reason}"
        )
    return torch.stack(readable), len(frames) - len(readable)


@torch.inference_mode()
def _logits(model: nn.Module, candidate: Candidate, batch: Tensor) -> Tensor:
    pixels = batch.to(next(model.parameters()).device)
    pixels = pixels.flip(1) if candidate.swapped else pixels
    return model(candidate.preprocessing.normalise(pixels)).float().cpu()
