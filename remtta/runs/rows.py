"""Prediction rows: what is written down of each frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from remtta.guard.guard import ALONE, Said
from remtta.methods.losses import entropy
from remtta.runs.reading import Row
from remtta.streams.prefetch import DecodedFrame


def prediction_rows(
    frames: Sequence[DecodedFrame],
    logits: Tensor | None,
    raw: Tensor | None = None,
    *,
    update: int,
    adapted: bool,
    not_adapted: Mapping[int, str] | None = None,
    said: Said = ALONE,
    early: bool = False,
    estimates: Mapping[str, float] | None = None,
    labels: Sequence[str] | None,
    topk: int,
    with_logits: bool = False,
    with_each: bool = False,
) -> list[Row]:
    """Rows for a batch of frames, unreadable ones included, in their order, and of gaps before them.

    Args:
        frames: The batch; K of them have an image.
        logits: Shape (K, C), finite, on the CPU, from before the update; None if K is 0.
        raw: The same before the frames before had their say; None where they have none.
        update: Updates the weights had seen when they made these predictions.
        adapted: Whether these frames then entered an update.
        not_adapted: Why some of them did not, by frame index.
        said: Who made the predictions.
        early: Whether they are predicted before their batch is full.
        estimates: Estimated accuracies of the last frames.
        labels: One name per class, or None.
        topk: How many classes to list.
        with_logits: Add all C logits.
        with_each: Add what the adapted and the source model said, as far as they were asked.
    """
    readable = iter(()) if logits is None else iter(_class_rows(logits, labels, topk, with_logits))
    each = iter(_each_rows(said, labels) if with_each else ())
    by_itself = iter(() if logits is None or raw is None else _raw_rows(logits, raw, labels))
    rows: list[Row] = []
    for frame in frames:
        if frame.gap:
            rows.append({"gap": True, "source": frame.source, **asdict(frame.gap), **_read_at(frame)})
        row = _origin(frame)
        if frame.image is None:
            row["error"] = frame.error
        else:
            reason = (not_adapted or {}).get(frame.index)
            row.update(next(readable), update=update, adapted=adapted and reason is None)
            row.update(
                {"not_adapted": reason} if reason else {}, **answered_by(said), **next(each, {}), **next(by_itself, {})
            )
            row.update({"early": True} if early else {}, **({"estimate": dict(estimates)} if estimates else {}))
        rows.append(row)
    return rows


def answered_by(said: Said) -> Row:
    """What a row says of who made the prediction: nothing where it was the adapted model alone."""
    if said.weight == 0:
        return {"answered_by": "source"}
    return {"answered_by": "both", "weight": round(said.weight, 6)} if said.weight < 1 else {}


def _each_rows(said: Said, labels: Sequence[str] | None) -> list[Row]:
    told = {name: logits for name, logits in (("adapted", said.adapted), ("source", said.source)) if logits is not None}
    rows = {name: _class_rows(logits.cpu(), labels, 1, False) for name, logits in told.items()}
    return [
        {"each": {name: _short(row) for name, row in zip(rows, both, strict=True)}}
        for both in zip(*rows.values(), strict=True)
    ]


def _raw_rows(logits: Tensor, raw: Tensor, labels: Sequence[str] | None) -> list[Row]:
    """What each frame was taken for by itself, where that was not the answer."""
    smoothed = (logits != raw).any(1).tolist()
    rows = _class_rows(raw, labels, 1, False)
    return [{"raw": _short(row)} if differs else {} for row, differs in zip(rows, smoothed, strict=True)]


def _short(row: Row) -> Row:
    return {key: row[key] for key in ("class", "label", "prob")}


def _origin(frame: DecodedFrame) -> Row:
    row: Row = {"index": frame.index, "source": frame.source}
    if frame.number is not None:
        row.update(frame=frame.number, time_s=frame.time_s, **_read_at(frame))
    return row


def _read_at(frame: DecodedFrame) -> Row:
    return {} if frame.read_at is None else {"time": frame.read_at}


def _class_rows(logits: Tensor, labels: Sequence[str] | None, topk: int, with_logits: bool) -> Iterable[Row]:
    best = logits.softmax(-1).topk(min(topk, logits.shape[1]))
    columns = (best.values.tolist(), best.indices.tolist(), entropy(logits).tolist(), logits)
    for probs, classes, nats, row_logits in zip(*columns, strict=True):
        ranked = [
            {"class": number, "label": labels[number] if labels else None, "prob": round(prob, 6)}
            for number, prob in zip(classes, probs, strict=True)
        ]
        row = {**ranked[0], "topk": ranked, "entropy": round(abs(nats), 6)}
        if with_logits:
            row["logits"] = [float(f"{value:.9g}") for value in row_logits.tolist()]  # 9 digits restore a float32
        yield row
