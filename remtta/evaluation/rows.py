"""Rows of an evaluation: what each image was taken for, and what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remtta.evaluation.datasets import Dataset
from remtta.methods.losses import entropy, total_variation
from remtta.runs.batch import BatchResult
from remtta.runs.rows import answered_by

Row = dict[str, Any]


def evaluation_rows(
    result: BatchResult,
    dataset: Dataset,
    items: Sequence[tuple[int, int]],
    numbers: Sequence[int],
    labels: Sequence[str] | None,
    views: Tensor | None,
) -> list[Row]:
    """Rows of a batch, unreadable images included.

    Args:
        result: What came of it.
        dataset: Where its images are from.
        items: Domain number and position in the domain, of each of its images.
        numbers: The class that each output stands for.
        labels: One name per output, or None.
        views: Logits (L, K, C) of the images' views, the plain one first, if there are several.
    """
    predicted = iter([] if result.logits is None else _class_rows(result, numbers, labels))
    ranks = iter([] if result.logits is None else _ranks(result))
    measured = iter([] if views is None else _view_rows(views))
    rows = []
    for frame, (domain, place) in zip(result.batch.frames, items, strict=True):
        where = dataset.domains[domain]
        row: Row = {"index": frame.index, "source": frame.source, "domain": where.name}
        row |= {} if where.severity is None else {"severity": where.severity}
        if frame.error:
            row["error"] = frame.error
        else:
            row |= {**next(predicted), **next(measured, {}), "label_true": int(where.labels[place])}
            row["rank_true"] = next(ranks)
        rows.append(row)
    return rows


def _class_rows(result: BatchResult, numbers: Sequence[int], labels: Sequence[str] | None) -> list[Row]:
    assert result.logits is not None
    probs, guesses = result.logits.softmax(-1).max(-1)
    told: Mapping[str, Any] = {"update": result.update_told, "adapted": result.adapted}
    told = {**told, **answered_by(result.said)}
    columns = zip(probs.tolist(), guesses.tolist(), entropy(result.logits).tolist(), strict=True)
    rows: list[Row] = [
        {
            "class": int(numbers[guess]),
            "label": labels[guess] if labels else None,
            "prob": float(f"{prob:.9g}"),  # 9 digits restore a float32, on which the calibration bins depend
            "entropy": float(f"{abs(nats):.9g}"),
            **told,
        }
        for prob, guess, nats in columns
    ]
    if result.raw is not None:
        for row, raw, smoothed in zip(rows, _raw_rows(result.raw, numbers), result.smoothed, strict=True):
            row |= {"raw": raw} if smoothed else {}
    return rows


def _raw_rows(raw: Tensor, numbers: Sequence[int]) -> list[Row]:
    """What each image was taken for by itself."""
    probs, guesses = raw.softmax(-1).max(-1)
    return [
        {"class": int(numbers[guess]), "prob": float(f"{prob:.9g}")}
        for prob, guess in zip(probs.tolist(), guesses.tolist(), strict=True)
    ]


def _ranks(result: BatchResult) -> list[int]:
    """How many classes were as likely as the true one or likelier, it included: 1 where it was predicted."""
    assert result.logits is not None and result.batch.labels is not None
    truths = result.batch.labels.to(result.logits.device)
    likelier = (result.logits > result.logits.gather(1, truths[:, None])).sum(1)
    predicted = result.logits.softmax(-1).max(-1).indices == truths  # of equals, one is predicted
    ranks: list[int] = torch.where(predicted, 1, (likelier + 1).clamp(min=2)).tolist()
    return ranks


def _view_rows(views: Tensor) -> list[Row]:
    """Total variation distance of masked from unmasked predictions, mean over the views, and entropies in nats."""
    if len(views) < 2 or not torch.isfinite(views).all():
        return []
    entropies = entropy(views.float()).abs().T.tolist()
    distances = total_variation(views.float()).tolist()
    return [{"tvd": far, "entropies": nats} for far, nats in zip(distances, entropies, strict=True)]
