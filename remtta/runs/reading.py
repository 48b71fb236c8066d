"""Read rows and records; imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from remtta.errors import RemttaError, UsageError
from remtta.files import from_json

Row = dict[str, Any]

_SECTIONS = ("timing", "model", "method", "options", "environment", "settings", "methods")
_KINDS = {"run": str, "resumed": int, "status": str, **dict.fromkeys(_SECTIONS, dict)}
"""Types of a record's entries, all of which may be missing."""

_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@contextlib.contextmanager
def reading(path: Path | str, kind: type[RemttaError] = RemttaError) -> Iterator[None]:
    """Report any failure in this block that damaged files can cause as an error of this kind, which names the path."""
    try:
        yield
    except RemttaError:
        raise
    except _DAMAGE as error:
        raise kind(f"{path} is damaged ({type(error).__name__}: {error})") from error


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file such as `predictions.jsonl`, without a last one that is not complete yet.
    Raise RemttaError if another line is damaged.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = from_json(line.decode())
                if not isinstance(row, dict):
                    raise ValueError("it is not a JSON object")
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise RemttaError(f"{path}, line {number} is damaged: {error}") from error
            yield row


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise RemttaError if it cannot be read, ValueError if it is no object."""
    try:
        content = from_json(path.read_bytes().decode())
    except OSError as error:
        raise RemttaError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def read_record(path: Path) -> dict[str, Any]:
    """Return a run's `run.json` or an evaluation's `results.json`, in order to resume it. Raise UsageError if it is
    damaged; RemttaError if it cannot be read.
    """
    try:
        record = read_object(path)
        for name, kind in _KINDS.items():
            if not isinstance(record.get(name, kind()), kind):
                raise ValueError(f"its {name} is of type {type(record[name]).__name__}")
    except ValueError as error:
        raise UsageError(f"{path} is damaged ({error}); start again with --overwrite") from error
    return record


def aligned(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return a line for each row of cells, printable, in columns: flush right except those at `left`."""
    table = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def shown_estimates(estimates: Mapping[str, float]) -> str:
    """Return the estimated accuracy of the predictions, and the gain of adaptation if it is known, in words."""
    accuracy = f"{100 * estimates['answers']:.0f} %" if "answers" in estimates else "not known yet"
    if "adapted" not in estimates:
        return accuracy
    gain, error = (100 * estimates.get(name, 0.0) for name in ("gain", "gain_error"))  # old runs have none
    interval = f"{gain:+z.0f} ± {error:.0f} points over the source model" if error else ""
    if abs(gain) > error:
        return f"{accuracy}; adapted {interval}"
    return f"{accuracy}; cannot tell whether adaptation helps" + (f" ({interval})" if error else "")


def printable(text: str) -> str:
    """Escape control characters and invalid bytes, which file names and labels may contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
