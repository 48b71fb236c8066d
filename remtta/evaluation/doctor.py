"""Does the preprocessing fit the model? What it says of the same images under others, too."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from remtta.errors import StreamError, UsageError
from remtta.evaluation.candidates import (
    Better,
    Candidate,
    ClassOrder,
    Finding,
    better_than,
    candidates_of,
    class_order,
    geometry,
)
from remtta.evaluation.classes import map_classes
from remtta.evaluation.trees import scan_tree
from remtta.methods.support import Support, refused_methods, support_in
from remtta.models.card import ModelCard, card_of
from remtta.models.preprocessing import Preprocessing
from remtta.streams.decoding_budget import Budget
from remtta.streams.prefetch import DecodedFrame, prefetch
from remtta.streams.sources import open_stream

DEFAULT_LIMIT = 100
LEAST_IMAGES = 16  # with fewer, the right one was missed where images were corrupted
_BATCH = 25

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Report:
    """What came of it.

    Attributes:
        card: The model's.
        source: The images.
        num_images: How many were looked at.
        unreadable: How many could not be.
        findings: Of each candidate, the configured one first.
        better: One that fits better, if there is one.
        class_order: Where class folders are named and hold enough images.
        labels: What the classes of images go by, or why there are none.
        support: What REM needs, and which of it there is.
    """

    card: ModelCard
    source: str
    num_images: int
    unreadable: int
    findings: Sequence[Finding]
    better: Better | None
    class_order: ClassOrder | None
    labels: str
    support: Support

    @property
    def fits(self) -> bool:
        """Whether nothing was found that a run would suffer from."""
        return self.better is None and (self.class_order is None or self.class_order.fits)

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        better = self.better
        return {
            "fits": self.fits,
            "model": {**self.card.origin, "num_classes": self.card.num_classes, "base_sha256": self.card.sha256},
            "source": self.source,
            "images": self.num_images,
            "unreadable": self.unreadable,
            "candidates": [finding.as_dict() for finding in self.findings],
            "better": better
            and {
                "title": better.finding.candidate.title,
                "by": better.by,
                "lead": better.lead,
                "standard_error": better.standard_error,
            },
            "class_order": self.class_order and asdict(self.class_order),
            "labels": self.labels,
            "rem": {
                "masks": list(self.support.masks),
                "adapts": self.support.adapts,
                "weights": self.support.num_adapted,
                "refused": self.support.refused.get("rem"),
            },
        }


def examine(
    model: nn.Module,
    source: str,
    *,
    limit: int = DEFAULT_LIMIT,
    class_map: Mapping[str, int] | None = None,
    wait: Callable[[], None] = lambda: None,
) -> Report:
    """Look at images of a source through a model, under its own preprocessing and under others.

    Args:
        model: A classifier; its preprocessing is what is examined.
        source: Images, as `open_stream` takes them; class folders in a layout of `open_dataset` are labels.
        limit: Most images, taken evenly from those of which there is a number.
        class_map: Class folder to class number.
        wait: Called between batches; may raise to stop.

    Raises:
        UsageError: If there is no such source.
        StreamError: If too few images can be read.
    """
    card = card_of(model)
    candidates = candidates_of(card.preprocessing)
    frames = _read(source, limit, [each.preprocessing for each in candidates], wait)
    readable = [frame for frame in frames if frame.image is not None]
    labels, how = _labels(source, readable, card, class_map)
    findings = [
        _finding(model, candidate, images, labels, wait) for candidate, images in _distinct(candidates, readable)
    ]
    folders = [Path(frame.source).parent.name for frame in readable]
    order = None if labels is None else class_order(findings, labels, folders, how)
    return Report(
        card=card,
        source=source,
        num_images=len(readable),
        unreadable=len(frames) - len(readable),
        findings=findings,
        better=better_than(findings, None if order is not None and not order.fits else labels),
        class_order=order,
        labels=how,
        support=support_in(model, card.name, refused=refused_methods(model, ["rem"])),
    )


def _read(source: str, limit: int, ways: Sequence[Preprocessing], wait: Callable[[], None]) -> list[DecodedFrame]:
    """Frames, with an image (K, 3, H, W) each: by each of the K ways that differ in more than what comes after."""
    stream = open_stream(source)
    count = stream.num_frames or limit
    spread = {place * count // limit for place in range(limit)} if count > limit else range(count)
    chosen = (frame for place, frame in enumerate(itertools.islice(stream.frames, count)) if place in spread)
    transforms = [way.transform() for way in {geometry(way): way for way in ways}.values()]
    memory = Budget(afterwards=min(ways, key=lambda way: way.crop_pct).resized_bytes)
    try:
        frames = list(prefetch(chosen, partial(_stacked, transforms), ahead=2 * _BATCH, memory=memory, wait=wait))
    finally:
        stream.close()
    if (readable := sum(frame.image is not None for frame in frames)) < LEAST_IMAGES:
        reason = next((f"; {frame.source}: {frame.error}" for frame in frames if frame.error), "")
        raise StreamError(f"{source}: {readable} image(s), and it takes {LEAST_IMAGES} to tell{reason}")
    return frames


def _stacked(transforms: Sequence[Callable[[Image.Image], Tensor]], image: Image.Image) -> Tensor:
    return torch.stack([torch.as_tensor(transform(image)) for transform in transforms])


def _distinct(candidates: Sequence[Candidate], frames: Sequence[DecodedFrame]) -> list[tuple[Candidate, Tensor]]:
    """Candidates and their images, uint8 (N, 3, H, W), without those to which the first one's are no others."""
    places = {
        key: place for place, key in enumerate(dict.fromkeys(geometry(each.preprocessing) for each in candidates))
    }
    stacked = torch.stack([frame.image for frame in frames if frame.image is not None], dim=1)
    same = [place for place, images in enumerate(stacked) if place and torch.equal(images, stacked[0])]
    numbered = [(each, places[geometry(each.preprocessing)]) for each in candidates]
    return [(candidate, stacked[place]) for candidate, place in numbered if place not in same]


@torch.inference_mode()
def _finding(
    model: nn.Module, candidate: Candidate, images: Tensor, labels: Tensor | None, wait: Callable[[], None]
) -> Finding:
    device, answers = next(model.parameters()).device, []
    for batch in images.split(_BATCH):
        wait()
        inputs = candidate.preprocessing.normalise(batch.to(device).flip(1) if candidate.swapped else batch.to(device))
        answers.append(model(inputs).float().cpu())
    logits = torch.cat(answers)
    right = None if labels is None else float((logits.argmax(-1) == labels).double().mean())
    _log.debug("%s: %s", candidate.title, "" if right is None else f"{right:.1%} right")
    return Finding(candidate, logits, right)


def _labels(
    source: str, frames: Sequence[DecodedFrame], card: ModelCard, class_map: Mapping[str, int] | None
) -> tuple[Tensor | None, str]:
    """The class of each image by its folder, and what they go by; None, and why there is none."""
    unlabelled = f"{source} has no class folders"
    if not Path(source).is_dir():
        return None, unlabelled
    try:
        _, tree = scan_tree(Path(source))
    except UsageError:
        return None, unlabelled
    folders = {str(path): name for levels in tree.values() for part in levels.values() for name, path in part.items()}
    try:
        mapping = map_classes(
            list(folders.values()), num_classes=card.num_classes, labels=card.labels, class_map=class_map
        )
    except UsageError as error:
        return None, str(error)
    names = [folders.get(str(Path(frame.source).parent)) for frame in frames]
    if None in names:
        return None, "not all images are in class folders"
    return torch.tensor([mapping.numbers[name] for name in names if name]), mapping.how
