"""A run's progress on a stream, from which it can resume after a stop, a kill or a power failure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from remtta.errors import UsageError, counted
from remtta.options import RunOptions
from remtta.options.option import fixed_fields
from remtta.runs.folder import check_same_settings
from remtta.runs.loop import Counts
from remtta.runs.reading import Row
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream


@dataclass
class RunProgress(Counts):
    """Counts of a run at a moment when its files and its method's state agree."""

    seconds: float = 0.0  # running time, over all parts of the run
    num_bytes: int = 0  # size of `predictions.jsonl`
    rows_sha256: str | None = None  # hash of that many bytes of it
    event_bytes: int = 0  # size of `events.jsonl`
    dropped: int = 0  # frames of a live source that were dropped for newer ones
    gaps: int = 0  # how often a live source was lost and came back
    fingerprint: str | None = None  # fingerprint of the last readable video frame
    last: list[str | int | None] | None = None  # source and number of the last frame seen

    def count(self, rows: Iterable[Row]) -> None:
        """Count rows that were written after the last save."""
        for row in rows:
            if "gap" in row:
                self.gaps += 1
                continue
            self.frames += 1
            self.skipped += "error" in row
            self.not_adapted += "not_adapted" in row
            self.by_source += row.get("answered_by") == "source"
            self.by_both += row.get("answered_by") == "both"
            self.smoothed += "raw" in row
            self.last, self.fingerprint = [row["source"], row.get("frame")], None


def check_same_run(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UsageError if a run's record and the one of now differ in a setting that changes predictions."""
    before, name = ((record.get("method") or {}).get("name", "") for record in (earlier, now))
    if before != name:
        raise UsageError(f"--resume needs the method that the run began with: it was {before}, is {name}")
    begun, settings = _settings(earlier), _settings(json.loads(json.dumps(now)))
    if begun["labels_sha256"] is None:  # the record of a version without it
        del begun["labels_sha256"], settings["labels_sha256"]
    if begun["method"].get("batch_size") != settings["method"].get("batch_size"):  # others follow from it
        begun, settings = ({"batch_size": each["method"].get("batch_size")} for each in (begun, settings))
    check_same_settings(begun, settings)


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    model, options, method = (record.get(name) or {} for name in ("model", "options", "method"))
    removed = {name: value for name, value in options.items() if value and not hasattr(RunOptions, name)}
    if method.get("precision") == "auto":  # in the record of an earlier version, where it was fp32
        method = {**method, "precision": "fp32"}
    return {
        **removed,
        "base_sha256": model.get("base_sha256"),
        "labels_sha256": model.get("labels_sha256"),
        "start_delta": (start := model.get("start_delta")) and {**start, "path": None},
        "preprocessing": record.get("preprocessing"),
        "source_statistics": (record.get("source_statistics") or {}).get("tensors_sha256"),
        "method": method,
        **{name: options.get(name, default) for name, default in fixed_fields(RunOptions).items() if name != "guard"},
        "guard": options.get("guard"),
    }


def unseen_frames(stream: Stream, progress: RunProgress, first: Row | None, unsaved: Sequence[Row]) -> Iterator[Frame]:
    """Yield the frames of a stream that were not seen yet; all frames of a live source, which starts anew. Raise
    UsageError if the stream no longer starts with the frames seen before, in that order.

    Args:
        first: The run's first row, if it has one: a pipe of other frames is refused at once, not at the last one seen.
        unsaved: The rows that the run wrote after its last save; the stream must still have their frames.
    """
    limit = stream.options.limit if stream.live else None  # other sources stop at it by themselves
    frames, left = stream.frames, None if limit is None else max(0, limit - progress.frames)
    # Only once the first frame is read is it known whether the address is a finite video.
    if stream.live and left != 0 and (head := next(frames, None)):
        frames = chain([head], frames)
    if stream.live and not (progress.frames and stream.live_source and stream.live_source.finite):
        yield from islice(frames, left)
        return
    wanted = "the paths in the same order (sort -V)" if stream.kind == "paths" else "the same source and --frame-stride"
    advice = f"give {wanted}, or choose another --output"
    rows = {0: first, **dict(enumerate(unsaved, progress.frames))}
    known = {number: [row["source"], row.get("frame")] for number, row in rows.items() if row}
    if progress.frames and progress.last:
        known[progress.frames - 1] = progress.last
    num_known, seen = progress.frames + len(unsaved), 0
    for number, frame in enumerate(frames):
        if (was := known.get(number)) and [frame.source, frame.number] != was:
            now, before = (
                source if part is None else f"frame {part} of {source}"
                for source, part in ((frame.source, frame.number), was)
            )
            raise UsageError(f"frame {number} of {stream.name} is {now}, and was {before}; {advice}")
        seen = number + 1
        if seen > progress.frames:
            yield frame
    if seen < num_known:
        within = "" if stream.options.limit is None else f" within --limit {stream.options.limit}"
        holds = f"{stream.name} holds {counted(seen, 'frame')}{within}"
        raise UsageError(f"{holds}, and the run had seen {num_known}; {advice}")
