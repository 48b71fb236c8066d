"""Predictions as CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from remtta.errors import RemttaError, UsageError
from remtta.report.tabular import EVALUATION, RUN, write_table
from tests.command import refusal_of, remtta_here

PAGE = (Path(__file__).parent.parent.parent / "docs" / "files.md").read_text()
CAT = {"class": 1, "label": 'a "cat", or two', "prob": 0.75}
DOG = {"class": 2, "label": None, "prob": 0.25}
ROWS: list[dict[str, Any]] = [
    {"gap": True, "source": "cam", "seconds": 2.0, "reason": "lost", "attempts": 1, "time": "2026-01-01T00:00:00Z"},
    {"index": 0, "source": "a.png", **CAT, "topk": [CAT, DOG], "entropy": 0.5, "update": 0, "adapted": True},
    {"index": 1, "source": "b\udc80.png", "error": "it is no image"},
    {"index": 2, "source": "c.png", **DOG, "each": {"adapted": CAT, "source": DOG}, "adapted": False, "weight": 0.5},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def fields(heading: str) -> set[str]:
    """Return the first column of the table below a heading."""
    table = PAGE.partition(heading)[2].partition("\n\n| field")[2].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}


def test_the_columns_are_the_documented_fields() -> None:
    assert fields("### A line of `predictions.jsonl`") == set(RUN)
    assert fields("### Rows of an evaluation") == set(EVALUATION) - set(RUN)


def test_csv_has_a_line_per_frame_with_json_where_there_is_more_than_a_value(run: Path) -> None:
    sink = io.BytesIO()
    write_table(run, "csv", sink)
    assert not sink.closed
    read = list(csv.DictReader(io.StringIO(sink.getvalue().decode())))
    assert list(read[0]) == list(RUN) and [row["index"] for row in read] == ["0", "1", "2"]
    assert (read[0]["label"], read[0]["prob"], read[0]["adapted"]) == ('a "cat", or two', "0.75", "true")
    assert json.loads(read[0]["topk"]) == [CAT, DOG] and read[0]["each"] == read[1]["class"] == ""
    assert (read[1]["source"], read[1]["error"]) == ("b\\udc80.png", "it is no image")


def test_parquet_has_the_same_rows_with_their_types(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert remtta_here("inspect", run, "--format", "parquet") == 0
    table = parquet.read_table(io.BytesIO(capfdbinary.readouterr().out))
    assert table.column_names == list(RUN)
    first, broken, last = table.to_pylist()
    assert {name: value for name, value in first.items() if value is not None} == ROWS[1]
    assert (broken["source"], broken["class"]) == ("b\\udc80.png", None)
    assert last["each"] == {"adapted": CAT, "source": DOG} and last["adapted"] is False


def test_an_evaluations_rows_have_columns_of_their_own(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "results.json").write_text("{}")
    (run / "predictions.jsonl").write_text(json.dumps({"method": "rem", "seed": 0, "entropies": [0.5, 1.0]}) + "\n")
    assert remtta_here("inspect", run, "--format", "csv") == 0
    [read] = csv.DictReader(io.StringIO(capfd.readouterr().out))
    assert list(read) == list(EVALUATION) and (read["method"], read["entropies"]) == ("rem", "[0.5, 1.0]")


def test_format_takes_a_single_run_only(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, error = refusal_of(capfd, "inspect", run, "--format", "csv", "--json")
    assert code == 2 and "--format prints the predictions of one run" in error
    with pytest.raises(RemttaError, match=r"predictions\.jsonl, line 1 is damaged: its prob is not a number"):
        (run / "predictions.jsonl").write_text('{"index": 0, "prob": "high"}\n')
        write_table(run, "csv", io.BytesIO())
    (run / "predictions.jsonl").unlink()
    with pytest.raises(UsageError, match=r"holds no predictions\.jsonl; name the folder of a run or an evaluation"):
        write_table(run, "csv", io.BytesIO())
