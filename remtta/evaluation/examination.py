"""Check whether the preprocessing suits the model, by comparing its predictions under several alternatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.data import constants
from torch import Tensor, nn

from remtta.errors import StreamError, counted
from remtta.methods.losses import entropy
from remtta.methods.support import refused_methods, support_in
from remtta.models.card import card_of
from remtta.models.preprocessing import Preprocessing
from remtta.pipeline.information import mutual_information
from remtta.streams.decoding_budget import Budget
from remtta.streams.prefetch import DecodedFrame, prefetch
from remtta.streams.sources import Stream

MIN_IMAGES = 16  # with fewer, the right preprocessing was missed on corrupted images
NORMALISATIONS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "0.5": (constants.IMAGENET_INCEPTION_MEAN, constants.IMAGENET_INCEPTION_STD),
    "ImageNet's": (constants.IMAGENET_DEFAULT_MEAN, constants.IMAGENET_DEFAULT_STD),
    "CLIP's": (constants.OPENAI_CLIP_MEAN, constants.OPENAI_CLIP_STD),
    "none": ((0.0,) * 3, (1.0,) * 3),
}
"""Means and standard deviations with which published image classifiers were trained."""

_RESAMPLINGS = 200
_SURE = 3.0  # standard errors of a significant lead
_BATCH = 25


@dataclass(frozen=True)
class Candidate:
    """A preprocessing to try, with a readable title; `swapped` exchanges the red and blue channels."""

    title: str
    preprocessing: Preprocessing
    swapped: bool = False


@dataclass(frozen=True)
class Finding:
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

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
        return {
            "title": self.candidate.title,
            **self.candidate.preprocessing.as_dict(),
            "red_and_blue_swapped": self.candidate.swapped,
            "entropy": self.uncertainty,
            "information": self.information,
            "classes": len(self.logits.argmax(-1).unique()),
        }


def examine(model: nn.Module, stream: Stream, *, limit: int, wait: Callable[[], None]) -> dict[str, Any]:
    """Compare a model's predictions on images of a stream under its own and under other preprocessings. Raise
    StreamError if too few images can be read.

    Args:
        model: A classifier with the preprocessing to check.
        limit: Maximum number of images, spread evenly over the stream if its length is known.
        wait: Called between batches; may raise to stop.

    Returns:
        The contents of `--json`: whether the preprocessing `fits`, None if the images do not tell; the `candidates`,
        the configured one first; the `better` one, or None; what `rem` would mask and adapt.
    """
    card = card_of(model)
    frames = _read(stream, limit, card.preprocessing, wait)
    readable = [frame for frame in frames if frame.image is not None]
    images = torch.stack([frame.image for frame in readable if frame.image is not None])
    findings = [_finding(model, each, images, wait) for each in candidates_of(card.preprocessing)]
    telling = are_telling(findings)
    better = better_than(findings) if telling else None
    support = support_in(model, card.name, refused=refused_methods(model, ["rem"]))
    rem = {"masks": list(support.masks), "adapts": support.adapts, "weights": support.num_adapted}
    return {
        "fits": better is None if telling else None,
        "model": {**card.origin, "num_classes": card.num_classes, "base_sha256": card.sha256},
        "source": stream.name,
        "images": len(readable),
        "unreadable": len(frames) - len(readable),
        "candidates": [finding.as_dict() for finding in findings],
        "better": better,
        "rem": {**rem, "refused": support.refused.get("rem")},
    }


def candidates_of(configured: Preprocessing) -> list[Candidate]:
    """Return the configured preprocessing first, then other normalisations and channel orders."""
    own = (configured.mean, configured.std)
    titles = {pair: title for title, pair in NORMALISATIONS.items()}
    named = {titles.get(own, "as configured"): own} | dict(NORMALISATIONS)
    normalised = [
        Candidate(f"mean, std: {title}", replace(configured, mean=mean, std=std))
        for title, (mean, std) in named.items()
    ]
    swapped = [Candidate(f"{each.title}; red, blue swapped", each.preprocessing, swapped=True) for each in normalised]
    return [*normalised, *swapped]


def are_telling(findings: Sequence[Finding]) -> bool:
    """Return whether the best candidate's mutual information exceeds its mean entropy.

    Else the model is uncertain of these images under all preprocessings, and a wrong one can have more information: it
    may undo part of a corruption.
    """
    best = max(findings, key=lambda each: each.information)
    return best.information > best.uncertainty


def better_than(findings: Sequence[Finding]) -> dict[str, Any] | None:
    """Return the most informative other candidate if it is significantly better than the configured one, the first: its
    title, and its lead in nats with the standard error by bootstrap, ready for JSON.
    """
    configured, *others = findings
    best = max(others, key=lambda each: each.information)
    count, generator = len(best.logits), torch.Generator().manual_seed(0)
    draws = torch.randint(count, (_RESAMPLINGS, count), generator=generator)
    leads = [mutual_information(best.logits[draw]) - mutual_information(configured.logits[draw]) for draw in draws]
    lead, error = best.information - configured.information, float(torch.tensor(leads, dtype=torch.float64).std())
    found = {"title": best.candidate.title, "lead": lead, "standard_error": error}
    return found if lead > _SURE * error else None


def _read(stream: Stream, limit: int, way: Preprocessing, wait: Callable[[], None]) -> list[DecodedFrame]:
    """Read frames spread over the source, the first ones if its length is unknown."""
    count = stream.num_frames or limit
    spread = {place * count // limit for place in range(limit)} if count > limit else range(count)
    chosen = (frame for place, frame in enumerate(itertools.islice(stream.frames, count)) if place in spread)
    memory = Budget(afterwards=way.resized_bytes)
    try:
        frames = list(prefetch(chosen, way.transform(), ahead=2 * _BATCH, memory=memory, wait=wait))
    finally:
        stream.close()
    if (readable := sum(frame.image is not None for frame in frames)) < MIN_IMAGES:
        reason = next((f"; {frame.source}: {frame.error}" for frame in frames if frame.error), "")
        found = counted(readable, "readable image")
        raise StreamError(f"{stream.name}: {found}, but at least {MIN_IMAGES} are needed{reason}")
    return frames


@torch.inference_mode()
def _finding(model: nn.Module, candidate: Candidate, images: Tensor, wait: Callable[[], None]) -> Finding:
    device, answers = next(model.parameters()).device, []
    for batch in images.split(_BATCH):
        wait()
        pixels = batch.to(device).flip(1) if candidate.swapped else batch.to(device)
        answers.append(model(candidate.preprocessing.normalise(pixels)).float().cpu())
    return Finding(candidate, torch.cat(answers))
