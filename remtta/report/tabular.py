"""Predictions as a table, for programs that read no JSON Lines: CSV, or Parquet by pyarrow. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from remtta.errors import UsageError, needed
from remtta.runs.folder import PREDICTIONS, RESULTS
from remtta.runs.reading import Row, check_entries, read_rows

Format = Literal["csv", "parquet"]

_Kind = Any
"""A type; or a list or mapping of kinds, which CSV holds as JSON."""

_ROWS_AT_ONCE = 10_000
_PREDICTION = {"class": int, "label": str, "prob": float}
_ANSWER: Mapping[str, _Kind] = {
    **_PREDICTION,
    "entropy": float,
    "update": int,
    "adapted": bool,
    "not_adapted": str,
    "answered_by": str,
    "weight": float,
    "raw": _PREDICTION,
}
RUN: Mapping[str, _Kind] = {
    "index": int,
    "source": str,
    "frame": int,
    "time_s": float,
    "time": str,
    **_ANSWER,
    "topk": [_PREDICTION],
    "each": {"adapted": _PREDICTION, "source": _PREDICTION},
    "estimate": {"answers": float, "adapted": float, "source": float},
    "early": bool,
    "logits": [float],
    "error": str,
}
"""Columns of a run's predictions."""

EVALUATION: Mapping[str, _Kind] = {
    "method": str,
    "seed": int,
    "phase": str,
    "visit": int,
    "domain": str,
    "severity": int,
    "index": int,
    "source": str,
    "label_true": int,
    "rank_true": int,
    **_ANSWER,
    "tvd": float,
    "entropies": [float],
    "error": str,
}
"""Columns of an evaluation's."""


def write_table(folder: Path, form: Format, sink: BinaryIO) -> None:
    """Write the predictions of a run or an evaluation as a table, a row per frame; gaps of live sources are left out.

    Raises:
        UsageError: If there are none, or pyarrow is missing.
        RemttaError: If a row is damaged.
    """
    path = folder / PREDICTIONS
    if not path.is_file():
        raise UsageError(f"{folder} holds no {PREDICTIONS}; name the folder of a run or an evaluation")
    columns = EVALUATION if (folder / RESULTS).is_file() else RUN
    shape = {
        f"{name}?": kind if isinstance(kind, type) else type(kind) for name, kind in columns.items() if kind is not bool
    }
    rows = (row for row in read_rows(path, lambda row: check_entries(row, shape)) if "gap" not in row)
    (_write_csv if form == "csv" else _write_parquet)(rows, columns, sink)


def _write_csv(rows: Iterator[Row], columns: Mapping[str, _Kind], sink: BinaryIO) -> None:
    text = io.TextIOWrapper(sink, "utf-8", errors="backslashreplace", newline="")  # stray bytes of names, as in JSON
    try:
        table = csv.writer(text, lineterminator="\n")
        table.writerow(columns)
        table.writerows([_cell(row.get(name)) for name in columns] for row in rows)
    finally:
        text.detach()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else value


def _write_parquet(rows: Iterator[Row], columns: Mapping[str, _Kind], sink: BinaryIO) -> None:
    arrow, parquet = (needed(name, "parquet", "--format parquet") for name in ("pyarrow", "pyarrow.parquet"))

    def type_of(kind: _Kind) -> Any:
        if isinstance(kind, list):
            return arrow.list_(type_of(kind[0]))
        if isinstance(kind, dict):
            return arrow.struct({name: type_of(part) for name, part in kind.items()})
        return {bool: arrow.bool_, int: arrow.int64, float: arrow.float64, str: arrow.string}[kind]()

    schema = arrow.schema({name: type_of(kind) for name, kind in columns.items()})
    with parquet.ParquetWriter(sink, schema) as writer:
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(arrow.Table.from_pylist(list(map(_encodable, some)), schema))


def _encodable(row: Row) -> Row:
    """A row whose stray bytes of names are escaped, as in JSON."""
    return {
        name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for name, value in row.items()
    }
