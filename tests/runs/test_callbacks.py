"""Callbacks of runs: what they see, when, and what becomes of their failures."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest

from remtta import RunOptions, adapt_stream
from remtta.errors import OutputError, StreamError, UsageError
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.folder import PREDICTIONS
from remtta.runs.run import Run
from remtta.runs.summary import RunSummary
from tests.conftest import tiny_vit
from tests.records import rows_of
from tests.runs.tiny import GUARD, Each, adapt_tiny, camera, made_run


class Notes(Callback):
    """Notes each call of a hook in a list that several share."""

    def __init__(self, name: str, calls: list[tuple[str, str]], fails_at: str = "") -> None:
        self.name, self.calls, self._fails_at = name, calls, fails_at
        self.reports: list[BatchReport] = []
        self.end = ""

    def on_start(self, run: Run) -> None:
        assert run.context.info.num_classes == 7 and not run.summary.num_frames
        self._call("start")

    def on_batch(self, report: BatchReport) -> None:
        self.reports.append(report)
        self._call("batch")

    def on_end(self, summary: RunSummary) -> None:
        self.end = summary.exit_reason
        self._call("end")

    def _call(self, hook: str) -> None:
        self.calls.append((self.name, hook))
        if hook == self._fails_at:
            raise OutputError(f"{hook} of {self.name}")


def test_a_callback_sees_every_frame_with_its_row_and_what_was_written(frames: Path, tmp_path: Path) -> None:
    (frames_there := tmp_path / "frames").mkdir()
    for path in frames.iterdir():
        (frames_there / path.name).write_bytes(path.read_bytes())
    (frames_there / "frame_2b.png").write_text("no image")
    notes = Notes("a", [])
    updates: list[int] = []
    callbacks = [notes, Each(lambda summary: updates.append(summary.num_updates))]
    summary = adapt_tiny(frames_there, tmp_path / "run", callbacks=callbacks)
    assert [hook for _, hook in notes.calls] == ["start", *["batch"] * 5, "end"]
    assert notes.end == "completed" and updates[-1] == summary.num_updates > 1
    assert all(report.summary is summary and report.guard == "trust" for report in notes.reports)
    rows = [row for report in notes.reports for row in report.rows]
    seen = [frame for report in notes.reports for frame in report.frames]
    assert rows == rows_of(tmp_path / "run") and [frame.index for frame in seen] == list(range(13))
    assert (
        [frame.index for frame in seen if frame.image is None]
        == [3]
        == [row["index"] for row in rows if "error" in row]
    )
    assert b"".join(report.lines for report in notes.reports) == (tmp_path / "run" / PREDICTIONS).read_bytes()


def test_rows_that_an_earlier_part_wrote_are_shown_again_but_not_added_again(frames: Path, tmp_path: Path) -> None:
    run, notes = made_run(frames, tmp_path / "run", "killed0"), Notes("a", [])
    before = (run / PREDICTIONS).read_bytes()
    adapt_tiny(frames, run, resume=True, callbacks=[notes])
    assert [row["index"] for row in notes.reports[0].rows] == [0, 1, 2] and notes.reports[0].lines == b""
    assert before + b"".join(report.lines for report in notes.reports) == (run / PREDICTIONS).read_bytes()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"callbacks": Callback()}, "callbacks is a list of remtta.Callback objects, got <remtta"),
        ({"callbacks": [Callback]}, r"callbacks is a list of remtta.Callback objects, got \[<class"),
        ({"options": {"batch_size": 4}}, "options is a remtta.RunOptions, got {'batch_size': 4}"),
        ({"guard": "off"}, r"adapt_stream has no guard; settings go to config=\{...\}, the rest to options=RunOptions"),
    ],
)
def test_wrong_arguments_of_adapt_stream_are_one_line(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        adapt_stream(tiny_vit(), tmp_path, tmp_path / "run", **given)


def test_early_frames_are_reported_once(tmp_path: Path) -> None:
    notes = Notes("a", [])
    adapt_tiny(camera(4), tmp_path / "run", callbacks=[notes], options={"flush_after": 0.0})
    assert [frame.index for report in notes.reports for frame in report.frames] == [0, 1, 2, 3]
    assert notes.reports[0].summary.num_frames == 4  # the same object, which counts on


@pytest.mark.parametrize(
    ("fails_at", "calls", "end"),
    [
        ("start", ["a start", "b start", "a end"], "error: start of b"),
        (
            "batch",
            ["a start", "b start", "c start", "a batch", "b batch", "c end", "b end", "a end"],
            "error: batch of b",
        ),
        (
            "end",
            ["a start", "b start", "c start", *["a batch", "b batch", "c batch"], "c end", "b end", "a end"],
            "completed",
        ),
    ],
)
def test_what_a_hook_raises_ends_the_run_and_the_other_callbacks_end_well(
    fails_at: str, calls: list[str], end: str, frames: Path, tmp_path: Path
) -> None:
    made: list[tuple[str, str]] = []
    callbacks = [Notes("a", made), Notes("b", made, fails_at), Notes("c", made)]
    with pytest.raises(OutputError, match=f"{fails_at} of b"):
        adapt_tiny(frames, tmp_path / "run", callbacks=callbacks, options={"batch_size": 12})
    assert [f"{name} {hook}" for name, hook in made] == calls
    assert callbacks[0].end == end


def test_callbacks_hear_of_a_source_that_fails(tmp_path: Path) -> None:
    notes = Notes("a", [])
    with pytest.raises(StreamError):
        adapt_tiny(camera(0), tmp_path / "run", callbacks=[notes])
    assert notes.end.startswith("error: ") and not notes.reports


def test_the_keywords_of_0_5_do_what_they_did_with_one_warning(
    frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "remtta")
    echo, counts, labels = io.BytesIO(), list[int](), list[int]()
    hooks: dict[str, Any] = {
        "echo": echo,
        "on_batch": lambda summary: counts.append(summary.num_frames),
        "viewers": [lambda view: labels.extend(row["class"] for row in view.rows)],
    }
    adapt_stream(tiny_vit(), frames, tmp_path / "run", options=RunOptions(batch_size=6, guard=GUARD), **hooks)
    assert echo.getvalue() == (tmp_path / "run" / PREDICTIONS).read_bytes()
    assert counts == [6, 12] and labels == [row["class"] for row in rows_of(tmp_path / "run")]
    assert [text for text in caplog.messages if "will be removed" in text] == [
        "adapt_stream now takes callbacks=[...]; echo, health, metrics, on_batch and viewers will be removed"
    ]
    with pytest.raises(UsageError, match="adapt_stream has no on_batches"):
        adapt_stream(tiny_vit(), frames, tmp_path / "other", on_batches=print)
