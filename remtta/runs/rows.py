"""Prediction rows, as written by `adapt` and `eval`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from remtta.guard.observer import Answers
from remtta.methods.losses import entropy
from remtta.runs.batch import BatchResult
from remtta.runs.reading import Row
from remtta.streams.prefetch import DecodedFrame


@dataclass(frozen=True)
class RowFormat:
    """Format of prediction rows.

    Attributes:
        labels: One name per output of the model, or None.
        numbers: The class number of each output; None if they are the outputs' indices.
        topk: Classes listed per frame; 0 for no list.
        logits: Whether to add all C logits.
        exact: Whether numbers have nine significant digits, enough to restore a float32, instead of six decimals.
    """

    labels: Sequence[str] | None
    numbers: Sequence[int] | None = None
    topk: int = 0
    logits: bool = False
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
    """Return a row per frame whose prediction was not reported early, in order, and one per gap before a frame."""
    answers = iter(_answer_rows(result, form))
    rows: list[Row] = []
    for frame in result.batch.unreported:
        if frame.gap:
            rows.append({"gap": True, "source": frame.source, **asdict(frame.gap), **_read_at(frame)})
        row = _origin(frame)
        if frame.image is None:
            row["error"] = frame.error
        else:
            row |= next(answers)
            if reason := result.excluded.get(frame.index):
                row |= {"adapted": False, "not_adapted": reason}
            row |= {"early": True} if result.batch.early else {}
            row |= {"estimate": dict(result.estimates)} if result.estimates else {}
        rows.append(row)
    return rows


def _answer_rows(result: BatchResult, form: RowFormat) -> list[Row]:
    """Return the prediction of each readable frame, and which model made it."""
    if result.answers is None:
        return []
    answers, start = result.answers, result.batch.num_reported_readable
    common: Row = {"update": result.update, "adapted": result.adapted}
    if result.by_source:
        common |= {"update": 0, "answered_by": "source"}
    elif result.by_both:
        common |= {"answered_by": "both", "weight": round(answers.weight, 6)}
    rows = [{**row, **common} for row in form.rows(answers.logits[start:])]
    for kind, parts in (("each", _differing(answers, form)), ("raw", _raw(answers, form))):
        for row, part in zip(rows, parts[start:], strict=False):
            row.update({kind: part} if part else {})
    return rows


def _differing(answers: Answers, form: RowFormat) -> list[Row]:
    """Return each model's prediction for frames where both were computed and differ."""
    if answers.adapted is None or answers.source is None:
        return []
    both = (form.short(answers.adapted.cpu()), form.short(answers.source.cpu()))
    return [
        {"adapted": one, "source": other} if one["class"] != other["class"] else {}
        for one, other in zip(*both, strict=True)
    ]


def _raw(answers: Answers, form: RowFormat) -> list[Row]:
    """Return the unsmoothed prediction of frames where smoothing changed it."""
    if answers.raw is None:
        return []
    return [row if smoothed else {} for row, smoothed in zip(form.short(answers.raw), answers.smoothed, strict=True)]


def _origin(frame: DecodedFrame) -> Row:
    row: Row = {"index": frame.index, "source": frame.source}
    if frame.number is not None:
        row.update(frame=frame.number, time_s=frame.time_s, **_read_at(frame))
    return row


def _read_at(frame: DecodedFrame) -> Row:
    return {} if frame.read_at is None else {"time": frame.read_at}
