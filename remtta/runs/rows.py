"""Prediction rows, as written by `adapt` and `eval`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from remtta.methods.losses import entropy
from remtta.pipeline.prediction import Prediction
from remtta.runs.loop import BatchResult
from remtta.runs.reading import Row

SKETCH_SIZE = 16
"""Length of the random projection that stands for mean logits."""


@dataclass(frozen=True)
class RowFormat:
    """Format of prediction rows."""

    labels: Sequence[str] | None  # one name per output of the model, or None
    numbers: Sequence[int] | None = None  # the class number of each output; None if they are the outputs' indices
    topk: int = 0  # classes listed per frame; 0 for no list
    logits: bool = False  # whether to add all C logits
    # Whether numbers have nine significant digits, enough to restore a float32, instead of six decimals.
    exact: bool = False

    def rows(self, logits: Tensor) -> Iterator[Row]:
        """Yield class, label and probability of logits (B, C), with the most likely classes and entropy in nats."""
        best = logits.softmax(-1).topk(min(max(1, self.topk), logits.shape[1]))
        columns = (best.values.tolist(), best.indices.tolist(), entropy(logits).tolist(), logits)
        for probs, classes, nats, row_logits in zip(*columns, strict=True):
            ranked = [self._entry(number, prob) for number, prob in zip(classes, probs, strict=True)]
            row = {**ranked[0], **({"topk": ranked} if self.topk else {}), "entropy": self._number(abs(nats))}
            if self.logits:
                row["logits"] = [float(f"{value:.9g}") for value in row_logits.tolist()]
            yield row

    def short(self, logits: Tensor) -> list[Row]:
        """Return class, label and probability of logits (B, C)."""
        probs, classes = logits.softmax(-1).max(-1)
        return [self._entry(number, prob) for number, prob in zip(classes.tolist(), probs.tolist(), strict=True)]

    def _entry(self, position: int, prob: float) -> Row:
        return {
            "class": int(self.numbers[position]) if self.numbers is not None else position,
            "label": self.labels[position] if self.labels else None,
            "prob": self._number(prob),
        }

    def _number(self, value: float) -> float:
        return float(f"{value:.9g}") if self.exact else round(value, 6)


def prediction_rows(result: BatchResult, form: RowFormat) -> list[Row]:
    """Return a row per frame, in order, and one per gap before a frame."""
    prediction = result.prediction
    common: Row = {"update": prediction.num_updates, "adapted": result.adapted}
    if prediction.weight == 0:
        common |= {"update": 0, "answered_by": "source"}
    elif prediction.weight < 1:
        common |= {"answered_by": "both", "weight": round(prediction.weight, 6)}
    if prediction.temperature is not None:
        common["temperature"] = round(prediction.temperature, 6)
    predictions = zip(form.rows(prediction.logits), _others(prediction, form), strict=True)
    rows: list[Row] = []
    for frame in result.batch.frames:
        read_at = {} if frame.read_at is None else {"time": frame.read_at}
        if frame.gap:
            rows.append({"gap": True, "source": frame.source, **asdict(frame.gap), **read_at})
        row: Row = {"index": frame.index, "source": frame.source}
        if frame.number is not None:
            row |= {"frame": frame.number, "time_s": frame.time_s, **read_at}
        if frame.image is None:
            row["error"] = frame.error
        else:
            own, others = next(predictions)
            row |= {**own, **common, **others}
            if reason := result.excluded.get(frame.index):
                row |= {"adapted": False, "not_adapted": reason}
            row |= {"early": True} if result.batch.early else {}
            row |= {"estimate": dict(prediction.estimates)} if prediction.estimates else {}
        rows.append(row)
    return rows


def batch_row(
    result: BatchResult,
    rows: Sequence[Row],
    form: RowFormat,
    *,
    offset: Tensor | None,
    raw: Tensor | None,
    source: Tensor | None,
) -> Row:
    """Return a row on a batch: the shift of the stream, and what the source model predicted.

    Args:
        rows: Those of its frames; see `prediction_rows`.
        offset: The logits' offset by centering (C,), if there is one.
        raw: Raw logits (K, C) of the readable frames, always by the same model, if there are any.
        source: The source model's logits (K, C) of exactly these frames, if they are known.
    """
    predicted, prediction = [row for row in rows if "class" in row], result.prediction
    row: Row = {"frame": result.batch.frames[0].index, "frames": len(result.batch.frames)}
    if offset is not None:
        row["shift"] = _short(float((offset - offset.mean()).norm()))
    if raw is not None and len(raw) and (mean := raw.float().mean(0).cpu()).isfinite().all():
        row["sketch"] = [_short(value) for value in ((mean - mean.mean()) @ _projection(len(mean))).tolist()]
    if predicted and prediction.source is not None and prediction.adapted is not None:
        row["disagreement"] = _short(sum("each" in row for row in predicted) / len(predicted))
    if source is not None:
        row["source"] = [
            {"index": frame["index"], **own}
            for frame, own in zip(predicted, form.short(source.cpu()), strict=True)
            if frame["class"] != own["class"]
        ]
    return row


@functools.cache
def _projection(num_classes: int) -> Tensor:
    """Return a random projection (C, SKETCH_SIZE) that keeps distances, roughly; always the same."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(num_classes, SKETCH_SIZE, generator=random) / SKETCH_SIZE**0.5


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _others(prediction: Prediction, form: RowFormat) -> list[Row]:
    """Return each model's prediction where they differ, and the unsmoothed one where smoothing changed it."""
    others: list[Row] = [{} for _ in prediction.logits]
    if prediction.adapted is not None and prediction.source is not None:
        both = form.short(prediction.adapted.cpu()), form.short(prediction.source.cpu())
        for other, adapted, source in zip(others, *both, strict=True):
            if adapted["class"] != source["class"]:
                other["each"] = {"adapted": adapted, "source": source}
    if prediction.unsmoothed is not None:
        for other, raw, smoothed in zip(others, form.short(prediction.unsmoothed), prediction.smoothed, strict=True):
            if smoothed:
                other["raw"] = raw
    return others
