"""Rows of an evaluation: those of `adapt`, with what each image was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from remtta.evaluation.datasets import Dataset
from remtta.methods.losses import entropy, total_variation
from remtta.runs.batch import BatchResult
from remtta.runs.reading import Row
from remtta.runs.rows import RowFormat, prediction_rows


def evaluation_rows(
    result: BatchResult,
    dataset: Dataset,
    items: Sequence[tuple[int, int]],
    form: RowFormat,
    views: Tensor | None,
) -> list[Row]:
    """Return the rows of a batch, unreadable images included.

    Args:
        result: What came of it.
        dataset: Where its images are from.
        items: Domain number and position in the domain, of each of its images.
        form: How rows look.
        views: Logits (L, K, C) of the images' views, the plain one first, if there are several.
    """
    rows = prediction_rows(result, form)
    ranks = iter(_ranks(result))
    measured = iter([] if views is None else _view_rows(views))
    for row, (number, place) in zip(rows, items, strict=True):
        domain = dataset.domains[number]
        row |= {"domain": domain.name} | ({} if domain.severity is None else {"severity": domain.severity})
        if "error" not in row:
            row |= {**next(measured, {}), "label_true": int(domain.labels[place]), "rank_true": next(ranks)}
    return rows


def _ranks(result: BatchResult) -> list[int]:
    """Return how many classes were as likely as the true one or likelier, it included: 1 where it was predicted."""
    if result.logits is None:
        return []
    assert result.batch.labels is not None
    truths = result.batch.labels.to(result.logits.device)
    likelier = (result.logits > result.logits.gather(1, truths[:, None])).sum(1)
    predicted = result.logits.softmax(-1).max(-1).indices == truths  # of equals, one is predicted
    ranks: list[int] = torch.where(predicted, 1, (likelier + 1).clamp(min=2)).tolist()
    return ranks


def _view_rows(views: Tensor) -> list[Row]:
    """Return the total variation distance of masked from unmasked predictions, and each view's entropy in nats."""
    if len(views) < 2 or not torch.isfinite(views).all():
        return []
    entropies = entropy(views.float()).abs().T.tolist()
    distances = total_variation(views.float()).tolist()
    return [{"tvd": far, "entropies": nats} for far, nats in zip(distances, entropies, strict=True)]
