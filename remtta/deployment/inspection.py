"""Describe the folder of many streams, for `remtta inspect`."""

from __future__ import annotations

from pathlib import Path

from remtta.errors import counted
from remtta.files import is_locked
from remtta.runs.folder import RECORD, STREAM_GROUP
from remtta.runs.inspection import Content, Inspection, read_content, state_of
from remtta.runs.reading import aligned

_COUNTS = ("frames", "skipped", "updates")


def inspect_streams(folder: Path) -> Inspection:
    """Describe each stream, preferring the record of its own folder, which is newer; use it within `reading`."""
    site, streams = read_content(folder / STREAM_GROUP), {}
    for name, recorded in site["streams"].items():
        stream = {field: recorded[field] for field in ("source", "exit_reason", *_COUNTS)}
        if stream["exit_reason"] == "running" and (folder / name / RECORD).is_file():
            counts = read_content(folder / name / RECORD)["counts"]
            stream |= {field: counts[field] for field in _COUNTS}
        streams[name] = stream
    group, alive = {"exit_reason": site["exit_reason"], "streams": streams}, is_locked(folder)
    return Inspection({"site": group, "alive": alive}, _lines(group, alive))


def _lines(group: Content, alive: bool | None) -> list[str]:
    streams = group["streams"]
    rows = [
        (name, *(str(run[count]) for count in _COUNTS), f"{state_of(run['exit_reason'], alive)}, {run['source']}")
        for name, run in streams.items()
    ]
    return [
        f"streams      {state_of(group['exit_reason'], alive)}; {counted(len(streams), 'stream')}",
        "",
        *aligned([("stream", *_COUNTS, "state, source"), *rows], left=(0, 4)),
    ]
