"""Read the files of a run or an evaluation without using the code that wrote them."""

import json
from pathlib import Path
from typing import Any


def parsed(text: str | bytes) -> list[dict[str, Any]]:
    """Return the objects of JSON lines."""
    return [json.loads(line) for line in text.splitlines()]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return parsed(path.read_bytes())


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "predictions.jsonl")


def num_rows(folder: Path) -> int:
    """Count the rows that a run has written so far."""
    path = folder / "predictions.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def json_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def record_of(folder: Path) -> dict[str, Any]:
    return json_of(folder / "run.json")


def assert_same_results(folder: Path, expected: Path) -> None:
    """Compare the rows, counts and delta of two runs."""
    assert (folder / "predictions.jsonl").read_bytes() == (expected / "predictions.jsonl").read_bytes()
    assert record_of(folder)["counts"] == record_of(expected)["counts"]
    if (expected / "delta.safetensors").exists():
        assert _without_time(folder / "delta.safetensors") == _without_time(expected / "delta.safetensors")


def _without_time(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:end])
    for name in ("created", "content_sha256"):  # the one is the time, the other depends on it
        del header["__metadata__"][name]
    return header, content[end:]
